"""Files of an export: rows of one table as three tensors in the safetensors format.

A file is u64 length of the header, the header (JSON, padded with blanks to a multiple of 8), the tensors:
``ids`` I64 (n,), ``weights`` F32 (n, dim), ``state`` F32 (n, row_bytes / 4 - dim). Everything is little
endian. Any reader of safetensors reads these files; a file that is read here must have just this layout.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import StoreCorruptError
from tierstore.keys import MAX_ID
from tierstore.store.files import open_regular, write_fully
from tierstore.store.protocol import StoredTable

_LENGTH_BYTES = 8
_BATCH_BYTES = 16 << 20
_NAMES = ("ids", "weights", "state")


class ShardLayout:
    """Places of the tensors of ``rows`` rows of a table in their file."""

    def __init__(self, spec: StoredTable, rows: int) -> None:
        self.rows = rows
        self.spec = spec
        self.weight_bytes = 4 * spec.embedding_dim
        self.widths = (8, self.weight_bytes, spec.row_bytes - self.weight_bytes)
        """Bytes of a row of each tensor."""
        ends = np.cumsum([width * rows for width in self.widths]).tolist()
        starts = [0, *ends[:-1]]
        shapes = ([rows], [rows, spec.embedding_dim], [rows, self.widths[2] // 4])
        self.tensors = {
            name: {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            for name, dtype, shape, start, end in zip(
                _NAMES, ("I64", "F32", "F32"), shapes, starts, ends, strict=True
            )
        }
        text = json.dumps({"__metadata__": {"table": spec.name}, **self.tensors}, separators=(",", ":"))
        header = text.encode()
        header += b" " * (-len(header) % 8)
        self.header = len(header).to_bytes(_LENGTH_BYTES, "little") + header
        self.starts = [len(self.header) + start for start in starts]
        self.file_bytes = len(self.header) + ends[-1]

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last row (exclusive) of stretches of some megabytes."""
        step = max(1, _BATCH_BYTES // self.spec.row_bytes)
        for start in range(0, self.rows, step):
            yield start, min(self.rows, start + step)


class ShardWriter:
    """Writes one file, batch after batch, and its checksums."""

    def __init__(self, path: Path, layout: ShardLayout) -> None:
        self._layout = layout
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o666)
        self._done = 0
        self.crc32 = dict.fromkeys(("header", *_NAMES), 0)
        write_fully(self._fd, memoryview(layout.header))
        self.crc32["header"] = zlib.crc32(layout.header)

    def write(self, ids: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Append rows, uint8 (n, row_bytes), with their ids, int64 (n,)."""
        cut = self._layout.weight_bytes
        parts = (ids.astype("<i8", copy=False), rows[:, :cut], rows[:, cut:])
        layout = zip(_NAMES, self._layout.starts, self._layout.widths, parts, strict=True)
        for name, start, width, part in layout:
            if width:
                data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
                self.crc32[name] = zlib.crc32(data, self.crc32[name])
                _write_at(self._fd, start + self._done * width, data)
        self._done += len(ids)

    def close(self, sync: bool) -> None:
        """Close the file, durably if ``sync``."""
        try:
            if sync:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)


def read_shard(
    path: Path, layout: ShardLayout, crc32: dict[str, int]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    """Yield ids and rows of a file in batches.

    Raises ``StoreCorruptError`` unless the file has this ``layout`` and ``crc32``. The checksums are compared
    at the very end, so the caller must make nothing durable before it.
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size != layout.file_bytes:
            raise StoreCorruptError(f"{path} has {size} bytes, not {layout.file_bytes}")
        header = file.read(len(layout.header))
        if zlib.crc32(header) != crc32["header"] or not _fits(header, layout):
            raise StoreCorruptError(f"{path} is damaged: its header, at offset 0, is not that of its rows")
        found = dict.fromkeys(_NAMES, 0)
        for first, last in layout.batches():
            parts = [
                _read_at(file.fileno(), path, start + first * width, (last - first) * width)
                for start, width in zip(layout.starts, layout.widths, strict=True)
            ]
            for name, part in zip(_NAMES, parts, strict=True):
                found[name] = zlib.crc32(part, found[name])
            yield _batch(path, layout, parts, last - first)
        for name, start in zip(_NAMES, layout.starts, strict=True):
            if found[name] != crc32[name]:
                raise StoreCorruptError(
                    f"{path} is damaged: the checksum of {name}, from offset {start} on, is wrong"
                )


def _fits(header: bytes, layout: ShardLayout) -> bool:
    try:
        content = json.loads(header[_LENGTH_BYTES:])
    except (ValueError, RecursionError):
        return False
    if not isinstance(content, dict):
        return False
    content.pop("__metadata__", None)
    return content == layout.tensors and header[:_LENGTH_BYTES] == layout.header[:_LENGTH_BYTES]


def _batch(
    path: Path, layout: ShardLayout, parts: list[bytes], count: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    ids = np.frombuffer(parts[0], "<i8").astype(np.int64)
    if count and not (ids.min() >= 0 and ids.max() < min(layout.spec.num_embeddings, MAX_ID + 1)):
        raise StoreCorruptError(f"{path} has ids that table {layout.spec.name!r} does not have")
    rows = np.empty((count, layout.spec.row_bytes), np.uint8)
    cut = layout.weight_bytes
    rows[:, :cut] = np.frombuffer(parts[1], np.uint8).reshape(count, cut)
    rows[:, cut:] = np.frombuffer(parts[2], np.uint8).reshape(count, layout.spec.row_bytes - cut)
    return ids, rows


def _write_at(fd: int, offset: int, data: memoryview) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _read_at(fd: int, path: Path, offset: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.pread(fd, size, offset)
        if not part:
            raise StoreCorruptError(f"{path} ends at offset {offset}, within its rows")
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)
