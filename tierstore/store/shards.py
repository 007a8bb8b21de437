"""Files of an export: rows of one table as tensors in the safetensors format.

A file is u64 length of the header, the header (JSON, padded with blanks to a multiple of 8), the tensors:
``ids`` I64 (n,), ``weights`` F32 (n, dim), ``state`` F32 (n, row_bytes / 4 - dim). Where the store holds rows
in other dtypes, weights are BF16, F16 or U8, state is F32 or BF16, and between them U8 weights have
``quantisation`` F32 (n, 2), the step and the offset of each row. The zeros at the end of a row belong to its
state. Everything is little endian. Any reader of safetensors reads these files; a file that is read here must
have just this layout.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import InputError, StoreCorruptError
from tierstore.keys import MAX_ID
from tierstore.store.files import open_regular, write_fully
from tierstore.store.protocol import StoredTable

_LENGTH_BYTES = 8
_BATCH_BYTES = 16 << 20
_BLOCK = 4096  # offsets, sizes and memory of direct IO are multiples of it
_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "int8": "U8"}


class ShardLayout:
    """Places of the tensors of ``rows`` rows of a table in their file."""

    def __init__(self, spec: StoredTable, rows: int) -> None:
        self.rows = rows
        self.spec = spec
        self.parts = spec.format.parts(spec.embedding_dim, spec.row_bytes)
        """Parts of a row, each of which is a tensor behind ``ids``."""
        self.widths = (8, *(part.bytes for part in self.parts))
        """Bytes of a row of each tensor."""
        ends = np.cumsum([width * rows for width in self.widths]).tolist()
        starts = [0, *ends[:-1]]
        self.tensors: dict[str, dict[str, object]] = {
            "ids": {"dtype": "I64", "shape": [rows], "data_offsets": [0, ends[0]]}
        }
        for part, start, end in zip(self.parts, starts[1:], ends[1:], strict=True):
            about = {"dtype": _DTYPES[part.dtype], "shape": [rows, part.columns]}
            self.tensors[part.name] = {**about, "data_offsets": [start, end]}
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


class Shard(TypedDict):
    """A file of an export, and the checksums of its tensors."""

    file: str
    rows: int
    crc32: dict[str, int]


class _TensorWriter:
    """Writes the bytes of a tensor, a stretch of a file, row after row.

    They go past the page cache by ``direct``, a descriptor with O_DIRECT, in whole blocks; ``pool`` writes
    while the caller goes on. The blocks that the tensor shares with its neighbours go by ``fd``.
    """

    def __init__(
        self, files: tuple[int, int], start: int, width: int, buffer_bytes: int, pool: Executor
    ) -> None:
        self.crc32 = 0
        self._fd, self._direct = files
        self._pool = pool
        self._width = width
        self._written = self._end = start  # offsets of the file, as the next is
        self._base = start - start % _BLOCK  # of the buffer's first byte
        blocks = max(buffer_bytes, width + _BLOCK) // _BLOCK + 1
        self._buffer, self._other = (np.frombuffer(mmap.mmap(-1, blocks * _BLOCK), np.uint8) for _ in "ab")
        self._writing: Future[None] | None = None

    def append(self, rows: NDArray[np.uint8]) -> None:
        """Append ``rows``, uint8 (n, width)."""
        while len(rows):
            used = self._end - self._base
            n = min(len(rows), (len(self._buffer) - used) // self._width)
            if not n:
                self._write_blocks()
                continue
            new = self._buffer[used : used + n * self._width]
            np.copyto(new.reshape(n, self._width), rows[:n])
            self.crc32 = zlib.crc32(new.data, self.crc32)
            self._end += n * self._width
            rows = rows[n:]

    def finish(self) -> None:
        """Write what waits in the buffer."""
        self._write_blocks()
        self._settle()
        _write_at(self._fd, self._written, self._bytes(self._end))

    def close(self) -> None:
        """Wait for the write that is under way, whatever comes of it."""
        if self._writing is not None:
            wait([self._writing])

    def _write_blocks(self) -> None:
        """Begin to write the whole blocks, and go on in the other buffer."""
        self._settle()
        whole = self._end - self._end % _BLOCK
        if whole <= self._written:
            return
        if self._written % _BLOCK:
            self._written = _write_at(self._fd, self._written, self._bytes(self._base + _BLOCK))
        if whole > self._written:
            self._writing = self._pool.submit(self._write_direct, self._written, self._bytes(whole))
        self._other[: self._end - whole] = self._buffer[whole - self._base :][: self._end - whole]
        self._buffer, self._other = self._other, self._buffer
        self._base = self._written = whole

    def _bytes(self, end: int) -> memoryview:
        """Return the buffer's bytes that are not written, up to the offset ``end``."""
        return self._buffer[self._written - self._base : end - self._base].data

    def _write_direct(self, offset: int, data: memoryview) -> None:
        try:
            _write_at(self._direct, offset, data)
        except OSError as error:
            if error.errno != errno.EINVAL:  # of a device whose blocks are larger
                raise
            _write_at(self._fd, offset, data)

    def _settle(self) -> None:
        """Wait for the write that is under way."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None


class ShardWriter:
    """Writes one file, batch after batch, and its checksums; ``pool`` writes ``buffer_bytes`` at a time."""

    def __init__(self, path: Path, layout: ShardLayout, buffer_bytes: int, pool: Executor) -> None:
        self._parts = layout.parts
        self.rows = self.left = layout.rows
        """Rows of the file, and how many of them are yet to come."""
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with ExitStack() as undo:
            self._fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            undo.callback(os.close, self._fd)
            os.ftruncate(self._fd, layout.file_bytes)
            write_fully(self._fd, memoryview(layout.header))
            self._direct = _open_direct(path, flags)
            undo.pop_all()
        self._header_crc32 = zlib.crc32(layout.header)
        files, row_bytes = (self._fd, self._direct), layout.spec.row_bytes
        self._tensors = {
            name: _TensorWriter(files, start, width, buffer_bytes * width // row_bytes, pool)
            for name, start, width in zip(layout.tensors, layout.starts, layout.widths, strict=True)
        }

    @property
    def crc32(self) -> dict[str, int]:
        """Return the checksums of what was written so far."""
        return {"header": self._header_crc32, **{name: part.crc32 for name, part in self._tensors.items()}}

    def write(self, ids: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Append rows, uint8 (n, row_bytes), with their ids, int64 (n,)."""
        own = np.ascontiguousarray(ids, "<i8").view(np.uint8).reshape(len(ids), 8)
        parts = [rows[:, part.begin : part.begin + part.bytes] for part in self._parts]
        for tensor, part in zip(self._tensors.values(), (own, *parts), strict=True):
            if part.shape[1]:
                tensor.append(part)
        self.left -= len(ids)

    def close(self, sync: bool) -> None:
        """Close the file, whole and durable if ``sync``."""
        try:
            if sync:
                for tensor in self._tensors.values():
                    tensor.finish()
                os.fsync(self._fd)
        finally:
            for tensor in self._tensors.values():
                tensor.close()
            os.close(self._direct)
            os.close(self._fd)


def _open_direct(path: Path, flags: int) -> int:
    """Open ``path`` past the page cache where its file system allows that."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)


@dataclass(frozen=True)
class WriteSizes:
    """Bytes of rows of a whole file, and bytes that are written to it at a time."""

    shard_bytes: int
    buffer_bytes: int


class TableWriter:
    """Writes ``rows`` rows of a table, in any order, to files in ``folder``; ``pool`` writes."""

    def __init__(self, folder: Path, spec: StoredTable, rows: int, sizes: WriteSizes, pool: Executor) -> None:
        self.shards: list[Shard] = []
        """The files that are complete."""
        self._folder = folder
        self._spec = spec
        self._left = rows  # beyond the open file
        self._rows_per_shard = max(1, sizes.shard_bytes // spec.row_bytes)
        self._buffer_bytes = sizes.buffer_bytes
        self._pool = pool
        self._writer: ShardWriter | None = None

    def write(self, ids: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Append rows, uint8 (n, row_bytes), with their ids, int64 (n,). Raises ``InputError`` for more rows
        than there should be."""
        while len(ids):
            writer = self._writer or self._begin()
            n = min(writer.left, len(ids))
            writer.write(ids[:n], rows[:n])
            ids, rows = ids[n:], rows[n:]
            if not writer.left:
                self._end(writer)

    def finish(self) -> None:
        """Raise ``InputError`` unless all rows came."""
        if self._left or self._writer is not None:
            raise self._changed()

    def close(self) -> None:
        """Close the file that is not complete, if there is one."""
        if self._writer is not None:
            self._writer.close(sync=False)

    def _begin(self) -> ShardWriter:
        if not self._left:
            raise self._changed()
        rows = min(self._left, self._rows_per_shard)
        layout = ShardLayout(self._spec, rows)
        self._writer = ShardWriter(self._folder / self._name(), layout, self._buffer_bytes, self._pool)
        self._left -= rows
        return self._writer

    def _end(self, writer: ShardWriter) -> None:
        self._writer = None
        writer.close(sync=True)
        self.shards.append({"file": self._name(), "rows": writer.rows, "crc32": writer.crc32})

    def _name(self) -> str:
        return f"{self._spec.index:05d}-{len(self.shards):05d}.safetensors"

    def _changed(self) -> InputError:
        return InputError(
            f"rows of table {self._spec.name!r} were stored while it was exported; export it when nothing "
            "writes to the store"
        )


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
        names = list(layout.tensors)
        found = dict.fromkeys(names, 0)
        for first, last in layout.batches():
            parts = [
                _read_at(file.fileno(), path, start + first * width, (last - first) * width)
                for start, width in zip(layout.starts, layout.widths, strict=True)
            ]
            for name, part in zip(names, parts, strict=True):
                found[name] = zlib.crc32(part, found[name])
            yield _batch(path, layout, parts, last - first)
        for name, start in zip(names, layout.starts, strict=True):
            if found[name] != crc32.get(name):
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
    rows = np.zeros((count, layout.spec.row_bytes), np.uint8)
    for part, data in zip(layout.parts, parts[1:], strict=True):
        values = np.frombuffer(data, np.uint8).reshape(count, part.bytes)
        rows[:, part.begin : part.begin + part.bytes] = values
    return ids, rows


def _write_at(fd: int, offset: int, data: memoryview) -> int:
    """Write all of ``data``, and return the offset behind it."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done
    return offset


def _read_at(fd: int, path: Path, offset: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.pread(fd, size, offset)
        if not part:
            raise StoreCorruptError(f"{path} ends at offset {offset}, within its rows")
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)
