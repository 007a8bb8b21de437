"""Kept commits: the choice of a commit by number or tag, and the record in which Python engines keep a
commit.

The record (little-endian): magic ``TSCOMMIT``, u64 number, i64 nanoseconds since 1970, u32 bytes of tag, u32
bytes of meta, tag (UTF-8), meta, CRC-32 of all before it.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import InputError, StoreCorruptError
from tierstore.store.files import open_regular
from tierstore.store.protocol import CommitInfo

_MAGIC = b"TSCOMMIT"
_HEAD = struct.Struct("<8sQqII")
_CHECKSUM = struct.Struct("<I")
RECORD_OVERHEAD = _HEAD.size + _CHECKSUM.size
"""Bytes of a record besides tag and meta."""


def new_commit(id: int, tag: str | None, meta: bytes) -> CommitInfo:
    """Describe a commit that is made now."""
    return CommitInfo(id, tag or "", time.time_ns(), meta)


def pack_commit(commit: CommitInfo) -> bytes:
    """Return the bytes of the record of ``commit``."""
    tag = commit.tag.encode()
    head = _HEAD.pack(_MAGIC, commit.id, commit.unix_nanoseconds, len(tag), len(commit.meta))
    body = head + tag + commit.meta
    return body + _CHECKSUM.pack(zlib.crc32(body))


def unpack_commit(data: bytes | memoryview, where: str | Path) -> tuple[CommitInfo, int]:
    """Read the record that ``data`` begins with; return it and its length. Errors name ``where``."""
    if len(data) < RECORD_OVERHEAD:
        raise StoreCorruptError(f"{where} ends within its commit record")
    magic, id, nanoseconds, tag_bytes, meta_bytes = _HEAD.unpack_from(data)
    end = _HEAD.size + tag_bytes + meta_bytes
    if magic != _MAGIC or end + _CHECKSUM.size > len(data):
        raise StoreCorruptError(f"{where} does not begin with a commit record")
    if _CHECKSUM.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        raise StoreCorruptError(f"{where} is damaged: the checksum of its commit record does not match")
    try:
        tag = bytes(data[_HEAD.size : _HEAD.size + tag_bytes]).decode()
    except UnicodeDecodeError as error:
        raise StoreCorruptError(f"{where} is damaged: its tag is not UTF-8") from error
    meta = bytes(data[_HEAD.size + tag_bytes : end])
    return CommitInfo(id, tag, nanoseconds, meta), end + _CHECKSUM.size


def read_commit(path: Path) -> CommitInfo:
    """Read the record that the file ``path`` begins with, and nothing behind it."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        raise StoreCorruptError(f"{path} is missing") from None
    with open(fd, "rb") as file:
        head = file.read(_HEAD.size)
        if len(head) == _HEAD.size:
            _, _, _, tag_bytes, meta_bytes = _HEAD.unpack(head)
            size = os.fstat(file.fileno()).st_size
            head += file.read(min(tag_bytes + meta_bytes + _CHECKSUM.size, size))
    return unpack_commit(head, path)[0]


def find_commit(commits: Sequence[CommitInfo], at: int | str, path: str | Path) -> CommitInfo:
    """Return the kept commit of number ``at``, or the newest tagged ``at``; ``InputError`` lists them."""
    for commit in reversed(commits):
        if at == (commit.tag if isinstance(at, str) else commit.id):
            return commit
    named = f"a commit tagged {at!r}" if isinstance(at, str) else f"commit {at}"
    hint = ""
    if not isinstance(at, str) and any(commit.tag == str(at) for commit in commits):
        hint = f"a commit tagged {str(at)!r} is: say tag:{at} on the command line, at={str(at)!r} in Python; "
    raise InputError(f"{path}: {named} is not kept; {hint}{describe(commits)}")


def check_droppable(commits: Sequence[CommitInfo], id: int, path: str | Path) -> None:
    """Raise ``InputError`` unless commit ``id`` is kept and not the newest."""
    if find_commit(commits, id, path) is commits[-1]:
        raise InputError(f"{path}: commit {id} is the newest, which a store keeps; drop an older commit")


def superseded(commits: Sequence[CommitInfo], keep: int) -> Sequence[CommitInfo]:
    """Return the ``commits``, oldest first, that have no tag and are not among the last ``keep``."""
    return [commit for commit in commits[: max(0, len(commits) - keep)] if not commit.tag]


def describe(commits: Sequence[CommitInfo]) -> str:
    """Write ``kept commits: 3, 5 ("best")``, for messages."""
    if not commits:
        return "there is no commit yet"
    some = ", ".join(f'{c.id} ("{c.tag}")' if c.tag else str(c.id) for c in commits[-8:])
    return f"kept commits: {'…, ' if len(commits) > 8 else ''}{some}"
