"""The engine `memory`: rows in process memory, all in one file at each commit. A test double and baseline.

The file ``commit-N`` (little-endian): the commit record (:mod:`tierstore.store.commits`), u64 sections, the
sections, the CRC-32 of all before it. Section: u64 row_bytes, u64 rows, the keys (u64 each), the rows. The
file with the highest number is the last commit.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.config import format_bytes
from tierstore.errors import StoreCorruptError, StoreFullError, StoreMismatchError
from tierstore.keys import ID_BITS
from tierstore.store.base import StoreBase
from tierstore.store.commits import find_commit, pack_commit, read_commit, unpack_commit
from tierstore.store.files import disk_bytes, read_regular, store_errors, sync_directory, write_atomically
from tierstore.store.protocol import CommitInfo, StoredTable
from tierstore.store.registry import StoreOptions

_FILE = re.compile(r"commit-(\d{12})")
_SECTIONS = struct.Struct("<Q")
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
        """Count the ``keys`` that are not stored yet."""
        return len(set(keys.tolist()).difference(self.positions))

    def keys(self) -> NDArray[np.uint64]:
        return np.fromiter(self.positions, np.uint64, len(self.positions))

    def _reserve(self, count: int) -> None:
        if count > len(self._rows):
            grown = np.empty((max(count, 2 * len(self._rows)), self._rows.shape[1]), np.uint8)
            grown[: len(self._rows)] = self._rows
            self._rows = grown


class MemoryStore(StoreBase):
    """Rows in memory. A commit rewrites the one file, so it costs as much as all rows."""

    engine = "memory"
    io = "memory"

    def __init__(self, path: Path, tables: Sequence[StoredTable], options: StoreOptions) -> None:
        super().__init__(path, tables, options)
        self._arenas = {size: _Arena(size) for size in self._sizes.known()}
        with store_errors(f"opening {path}"):
            if (path / "rows").exists():
                raise StoreMismatchError(f"{path} is of an earlier tierstore; it cannot be read any more")
            numbers = sorted(int(match[1]) for match in map(_FILE.fullmatch, os.listdir(path)) if match)
            self._kept = [read_commit(self._file(number)) for number in numbers]
            if [commit.id for commit in self._kept] != numbers:
                raise StoreCorruptError(
                    f"{path}: commits {self._kept} are in files of other numbers {numbers}"
                )
            if options.at or self._kept:
                self._load(find_commit(self._kept, options.at, path) if options.at else self._kept[-1])

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

    def _keys(self, table: int) -> Generator[NDArray[np.uint64], None, None]:
        keys = self._arenas[self._sizes.of_table(table)].keys()
        keys = keys[keys >> np.uint64(ID_BITS) == table]
        for start in range(0, len(keys), _CHUNK):
            yield keys[start : start + _CHUNK]

    def _commit(self, commit: CommitInfo) -> None:
        file = self._file(commit.id)
        with store_errors(f"writing {file}"):
            write_atomically(file, self._dump(commit))

    def _remove(self, commit: CommitInfo) -> None:
        self._file(commit.id).unlink(missing_ok=True)
        sync_directory(self._path)

    def _space(self) -> tuple[int, int, int, int]:
        rows = sum(len(arena.positions) for arena in self._arenas.values())
        memory = rows * _DICT_BYTES_PER_ROW + sum(arena.capacity_bytes for arena in self._arenas.values())
        return rows, self._live_bytes(), disk_bytes(self._path), memory

    def _release(self) -> None:
        self._arenas.clear()

    def _live_bytes(self) -> int:
        return sum(size * len(arena.positions) for size, arena in self._arenas.items())

    def _file(self, number: int) -> Path:
        return self._path / f"commit-{number:012d}"

    def _dump(self, commit: CommitInfo) -> Iterator[bytes | memoryview]:
        crc = 0
        for chunk in self._sections(commit):
            crc = zlib.crc32(chunk, crc)
            yield chunk
        yield _CHECKSUM.pack(crc)

    def _sections(self, commit: CommitInfo) -> Iterator[bytes | memoryview]:
        filled = {size: arena for size, arena in self._arenas.items() if arena.positions}
        yield pack_commit(commit)
        yield _SECTIONS.pack(len(filled))
        for size, arena in filled.items():
            yield _SECTION.pack(size, len(arena.positions))
            yield arena.keys().astype("<u8").data
            yield arena.rows.data

    def _load(self, commit: CommitInfo) -> None:
        file = self._file(commit.id)
        body = self._sections_of(file)
        if len(body) < _SECTIONS.size:
            raise StoreCorruptError(f"{file} ends behind its commit record")
        offset = _SECTIONS.size
        for _ in range(_SECTIONS.unpack_from(body)[0]):
            offset = self._load_section(file, body, offset)
        if offset != len(body):
            raise StoreCorruptError(f"{file} holds {len(body) - offset} bytes more than its sections")
        self._current = commit

    @staticmethod
    def _sections_of(file: Path) -> memoryview:
        """Return the checked bytes behind the commit record."""
        data = memoryview(read_regular(file, file.stat().st_size))
        body, tail = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
        if len(tail) < _CHECKSUM.size or _CHECKSUM.unpack(tail)[0] != zlib.crc32(body):
            raise StoreCorruptError(f"{file} is damaged: its checksum does not match its {len(data)} bytes")
        return body[unpack_commit(body, file)[1] :]

    def _load_section(self, file: Path, body: memoryview, offset: int) -> int:
        if len(body) - offset < _SECTION.size:
            raise StoreCorruptError(f"{file} ends within a section")
        size, count = _SECTION.unpack_from(body, offset)
        offset += _SECTION.size
        if size not in self._arenas or count * (8 + size) > len(body) - offset:
            raise StoreCorruptError(f"{file}: {count} rows of {size} bytes do not fit where it says they are")
        keys = np.frombuffer(body, "<u8", count, offset).astype(np.uint64)
        rows = np.frombuffer(body, np.uint8, count * size, offset + 8 * count).reshape(count, size)
        self._arenas[size].write(keys, rows)
        return offset + count * (8 + size)
