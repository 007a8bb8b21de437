"""Calls of the operating system by store directories and Python engines, and the errors that they raise."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from tierstore import _core
from tierstore.errors import StoreCorruptError, StoreFullError, StoreIOError

JSON: TypeAlias = dict[str, object]
"""An object of JSON."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ADVICE = {
    errno.EACCES: "; give a path that this user has the rights to",
    errno.EPERM: "; give a path that this user has the rights to",
    errno.EROFS: "; give a path that can be written to",
}


def store_error(error: OSError, doing: str) -> StoreIOError | StoreFullError:
    """Return the error for users of an ``OSError`` met while ``doing`` something; it keeps the errno.

    The message names the file that the system refused, unless ``doing`` ends with its name.
    """
    if isinstance(error.filename, str | os.PathLike) and not doing.endswith(f" {error.filename}"):
        doing = f"{doing}: {error.filename}"
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _FULL:
        return StoreFullError(error.errno, f"{doing}: {reason}; free some space, committed rows are intact")
    return StoreIOError(error.errno, f"{doing}: {reason}{_ADVICE.get(error.errno or 0, '')}")


@contextmanager
def store_errors(doing: str) -> Iterator[None]:
    """Turn every plain ``OSError`` of the body into a ``StoreIOError`` or ``StoreFullError``."""
    try:
        yield
    except (StoreIOError, StoreFullError):
        raise
    except OSError as error:
        raise store_error(error, doing) from error


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    _sync(path, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make the content of the file ``path`` durable; a link is refused."""
    _sync(path, os.O_NOFOLLOW)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Replace ``path`` by a file with ``chunks``, durably: a crash leaves the old file or the new file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o666), "wb", buffering=0) as file:
            for chunk in chunks:
                write_fully(file.fileno(), memoryview(chunk).cast("B"))
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_fully(fd: int, data: memoryview) -> None:
    """Call ``os.write`` until all of ``data`` is written."""
    while data:
        data = data[os.write(fd, data) :]


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open the regular file ``path`` and return its descriptor; refuse a link and anything else."""
    with _no_link(path):
        fd = os.open(path, flags | _REGULAR, 0o666)
    if not os.path.isfile(fd):
        os.close(fd)
        raise StoreCorruptError(f"{path} is not a regular file")
    return fd


def open_own(path: Path, flags: int = os.O_RDONLY) -> _core.OwnDescriptor:
    """Open as :func:`open_regular` does, but with a descriptor that no forked child keeps."""
    with _no_link(path):
        own = _core.OwnDescriptor(os.fsencode(path), flags | _REGULAR)
    if not os.path.isfile(own.fileno()):
        own.close()
        raise StoreCorruptError(f"{path} is not a regular file")
    return own


_REGULAR = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def _no_link(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreCorruptError(f"{path} is a symbolic link; a store does not follow links") from error
        raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of ``path``. A link and a file above ``max_bytes`` raise ``StoreCorruptError``."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise StoreCorruptError(f"{path} has {size} bytes, more than the {max_bytes} that it may have")
        return file.read(max_bytes)


def json_with_checksum(content: Mapping[str, object]) -> bytes:
    """Return ``content`` as JSON with one more field, ``crc32``, the checksum of the rest."""
    return json.dumps({**content, "crc32": _crc_of(content)}, indent=1, allow_nan=False).encode()


def parse_json(data: bytes, file: Path) -> JSON:
    """Return the object that ``data`` holds, without ``crc32``, which must match where there is one.

    ``StoreCorruptError`` names ``file`` when ``data`` is anything else.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreCorruptError(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise StoreCorruptError(f"{file} is damaged: it is not a JSON object")
    if "crc32" in content and content.pop("crc32") != _crc_of(content):
        raise StoreCorruptError(
            f"{file} is damaged: its checksum does not match; restore it from a copy, or remove its crc32 "
            "if the file was edited on purpose"
        )
    return content


def _crc_of(content: Mapping[str, object]) -> int:
    try:
        return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    except RecursionError:
        return -1


def supports_direct_io(folder: Path) -> bool:
    """Tell whether files in ``folder`` can be opened past the page cache, which some file systems refuse."""
    probe = folder / "direct-io-probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_NOFOLLOW, 0o666))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def walk_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all regular files below ``folder``; ``StoreCorruptError`` at a link or another kind of file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise StoreCorruptError(f"{entry.path} is a symbolic link; a store does not follow links")
            if entry.is_dir():
                yield from walk_files(Path(entry.path))
            elif entry.is_file():
                yield entry
            else:
                raise StoreCorruptError(f"{entry.path} is neither a file nor a folder")


def disk_bytes(folder: Path) -> int:
    """Return the bytes that the files below ``folder`` occupy, each inode once, without vanishing files."""
    sizes: dict[int, int] = {}
    for entry in walk_files(folder):
        try:
            status = entry.stat()
        except FileNotFoundError:
            continue
        sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())
