"""The engine `memory`: rows in process memory, all in one file at each commit. A test double and baseline.

The file ``rows`` (little-endian): header, then per row size a section, then the meta bytes, then the
CRC-32 of all before it. Header: magic ``TSROWS01``, u64 commit number, u64 bytes of meta, u64 sections.
Section: u64 row_bytes, u64 rows, the keys (u64 each), the rows.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.config import format_bytes
from tierstore.errors import StoreCorruptError, StoreFullError
from tierstore.keys import ID_BITS
from tierstore.store.base import StoreBase
from tierstore.store.files import disk_bytes, read_regular, store_errors, write_atomically
from tierstore.store.protocol import TableSpec
from tierstore.store.registry import StoreOptions

_MAGIC = b"TSROWS01"
_HEADER = struct.Struct("<8sQQQ")
_SECTION = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<I")
_CHUNK = 65_536
_DICT_BYTES_PER_ROW = 150


class _Arena:
    """Rows of one size in a growing array, found by a dict from key to position."""

    def __init__(self, row_bytes: int) -> None:
        self.positions: dict[int, int] = {}
        self._rows = np.empty((0, row_bytes), np.uint8)

    @property
    def rows(self) -> NDArray[np.uint8]:
        return self._rows[: len(self.positions)]

    @property
    def capacity_bytes(self) -> int:
        return self._rows.nbytes

    def read(self, keys: NDArray[np.uint64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        get = self.positions.get
        where = np.fromiter((get(key, -1) for key in keys.tolist()), np.int64, len(keys))
        found = where >= 0
        out[found] = self._rows[where[found]]
        return found

    def write(self, keys: NDArray[np.uint64], rows: NDArray[np.uint8]) -> None:
        positions = self.positions
        self._reserve(len(positions) + self.count_new(keys))
        where = np.fromiter(
            (positions.setdefault(key, len(positions)) for key in keys.tolist()), np.int64, len(keys)
        )
        self._rows[where] = rows

    def count_new(self, keys: NDArray[np.uint64]) -> int:
        """How many of ``keys`` are not stored yet."""
        return len(set(keys.tolist()).difference(self.positions))

    def keys(self) -> NDArray[np.uint64]:
        return np.fromiter(self.positions, np.uint64, len(self.positions))

    def _reserve(self, count: int) -> None:
        if count > len(self._rows):
            grown = np.empty((max(count, 2 * len(self._rows)), self._rows.shape[1]), np.uint8)
            grown[: len(self._rows)] = self._rows
            self._rows = grown


class MemoryStore(StoreBase):
    """Rows in memory; a commit rewrites the one file, so it costs all rows, not only the changed ones."""

    engine = "memory"
    io = "memory"

    def __init__(self, path: Path, tables: Sequence[TableSpec], options: StoreOptions) -> None:
        super().__init__(tables)
        self._path = path
        self._file = path / "rows"
        self._cap = options.ssd_bytes
        self._arenas = {size: _Arena(size) for size in self._sizes.known()}
        self._commits = 0
        self._committed_meta = b""
        if self._file.exists():
            with store_errors(f"reading {self._file}"):
                data = read_regular(self._file, self._file.stat().st_size)
            self._load(memoryview(data))

    def _read(self, keys: NDArray[np.uint64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        return self._arenas[out.shape[1]].read(keys, out)

    def _write(self, keys: NDArray[np.uint64], rows: NDArray[np.uint8]) -> None:
        arena = self._arenas[rows.shape[1]]
        after = self._live_bytes() + arena.count_new(keys) * rows.shape[1]
        if after > self._cap:
            raise StoreFullError(
                f"{format_bytes(after)} of rows would exceed the cap of {format_bytes(self._cap)}; raise ssd"
            )
        arena.write(keys, rows)

    def _keys(self, table: int) -> Iterator[NDArray[np.uint64]]:
        keys = self._arenas[self._sizes.of_table(table)].keys()
        keys = keys[keys >> np.uint64(ID_BITS) == table]
        for start in range(0, len(keys), _CHUNK):
            yield keys[start : start + _CHUNK]

    def _commit(self, meta: bytes) -> int:
        with store_errors(f"writing {self._file}"):
            write_atomically(self._file, self._dump(meta))
        self._commits += 1
        self._committed_meta = meta
        return self._commits

    def _meta(self) -> bytes:
        return self._committed_meta

    def _space(self) -> tuple[int, int, int, int]:
        rows = sum(len(arena.positions) for arena in self._arenas.values())
        memory = rows * _DICT_BYTES_PER_ROW + sum(arena.capacity_bytes for arena in self._arenas.values())
        return rows, self._live_bytes(), disk_bytes(self._path), memory

    def _release(self) -> None:
        self._arenas.clear()

    def _live_bytes(self) -> int:
        return sum(size * len(arena.positions) for size, arena in self._arenas.items())

    def _dump(self, meta: bytes) -> Iterator[bytes | memoryview]:
        crc = 0
        for chunk in self._sections(meta):
            crc = zlib.crc32(chunk, crc)
            yield chunk
        yield _CHECKSUM.pack(crc)

    def _sections(self, meta: bytes) -> Iterator[bytes | memoryview]:
        filled = {size: arena for size, arena in self._arenas.items() if arena.positions}
        yield _HEADER.pack(_MAGIC, self._commits + 1, len(meta), len(filled))
        for size, arena in filled.items():
            yield _SECTION.pack(size, len(arena.positions))
            yield arena.keys().astype("<u8").data
            yield arena.rows.data
        yield meta

    def _load(self, data: memoryview) -> None:
        body, tail = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
        if len(body) < _HEADER.size or _CHECKSUM.unpack(tail)[0] != zlib.crc32(body):
            raise StoreCorruptError(
                f"{self._file} is damaged: its checksum does not match its {len(data)} bytes"
            )
        magic, self._commits, meta_bytes, sections = _HEADER.unpack_from(body)
        if magic != _MAGIC:
            raise StoreCorruptError(f"{self._file} does not start with {_MAGIC.decode()}")
        offset = _HEADER.size
        for _ in range(sections):
            offset = self._load_section(body, offset)
        if len(body) - offset != meta_bytes:
            raise StoreCorruptError(f"{self._file}: {meta_bytes} bytes of meta expected at offset {offset}")
        self._committed_meta = bytes(body[offset:])

    def _load_section(self, body: memoryview, offset: int) -> int:
        if len(body) - offset < _SECTION.size:
            raise StoreCorruptError(f"{self._file} ends within a section at offset {offset}")
        size, count = _SECTION.unpack_from(body, offset)
        offset += _SECTION.size
        if size not in self._arenas or count * (8 + size) > len(body) - offset:
            raise StoreCorruptError(
                f"{self._file}: {count} rows of {size} bytes cannot be at offset {offset}"
            )
        keys = np.frombuffer(body, "<u8", count, offset).astype(np.uint64)
        rows = np.frombuffer(body, np.uint8, count * size, offset + 8 * count).reshape(count, size)
        self._arenas[size].write(keys, rows)
        return offset + count * (8 + size)
