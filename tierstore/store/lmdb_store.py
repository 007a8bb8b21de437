"""The engine `lmdb`: one memory-mapped B+tree, through its Python package.

Everything between two commits is one write transaction, which LMDB never shows to the durable tree: a
commit is the transaction's own commit, and a crash or a close drops it. The directory's lock keeps other
processes out, so LMDB's own is off; without it a transaction may also move between threads. Changed pages
are kept in process memory until the commit, up to 512 MiB (a constant of LMDB); after that LMDB writes
some to unused places of the file.

There is one database per row size, with native-endian integer keys, and one for the commit record (key
``commit``: u64 number, then the meta bytes). An error inside a transaction breaks it, so it closes the
store.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.config import format_bytes
from tierstore.errors import StoreCorruptError, StoreFullError, StoreIOError
from tierstore.keys import ID_BITS, MAX_ID
from tierstore.store.base import StoreBase, as_bytes, scatter
from tierstore.store.files import disk_bytes, store_errors
from tierstore.store.parallel import SMALLEST, Readers
from tierstore.store.protocol import TableSpec
from tierstore.store.registry import StoreOptions

_COMMIT = b"commit"
_NUMBER = struct.Struct("<Q")
_CHUNK = 65_536
_MAX_MAP = 1 << 46  # x86-64 gives a process 2**47 bytes of addresses
_MIN_MAP = 1 << 20
_SAMPLE = 64
_COLD_SECONDS = 20e-6  # per row; a page in memory takes under 5 µs, one on a fast SSD over 50 µs
_MOST_DIRTY_PAGES = 131_071  # MDB_IDL_UM_MAX


class LMDBStore(StoreBase):
    """Rows in one LMDB environment. The map is as large as the cap, so it never has to grow."""

    engine = "lmdb"
    io = "mmap"

    def __init__(self, path: Path, tables: Sequence[TableSpec], options: StoreOptions) -> None:
        super().__init__(tables)
        self._path = path
        self._cap = options.ssd_bytes
        self._changed_rows = 0
        self._readers = Readers(options.read_threads)
        sizes = self._sizes.known()
        with self._lmdb_errors("opening"):
            self._env = lmdb.open(
                str(path),
                map_size=min(max(self._cap, _MIN_MAP), _MAX_MAP) // 4096 * 4096,
                max_dbs=len(sizes) + 1,
                lock=False,
                readahead=False,
                meminit=False,
            )
        try:
            with self._lmdb_errors("opening"):
                self._check_length()
                self._records = self._env.open_db(b"records")
                self._rows = {
                    size: self._env.open_db(b"rows-%d" % size, integerkey=True, create=True) for size in sizes
                }
                self._txn = self._env.begin(write=True)
                record = self._txn.get(_COMMIT, db=self._records) or _NUMBER.pack(0)
        except BaseException:
            self._env.close()
            raise
        self._number = _NUMBER.unpack_from(record)[0]
        self._committed_meta = record[_NUMBER.size :]

    def _read(self, keys: NDArray[np.uint64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        order = np.argsort(keys)  # neighbours in the tree share pages
        ordered = keys[order]
        names = ordered.view("V8").tolist()
        database = self._rows[out.shape[1]]
        with self._lmdb_errors("reading"):
            if len(names) >= SMALLEST and self._is_cold(database, names):
                self._readers.map(lambda chunk: self._touch(database, chunk), names)
            pairs = self._get(self._txn, database, names)
        found = np.ones(len(keys), np.bool_)
        if len(pairs) < len(keys):
            found[order] = np.isin(ordered, np.frombuffer(b"".join(name for name, _ in pairs), np.uint64))
        scatter([value for _, value in pairs], order[found[order]], out, self._path)
        return found

    @staticmethod
    def _get(transaction: Any, database: Any, names: list[bytes]) -> list[tuple[bytes, bytes]]:
        with transaction.cursor(database) as cursor:
            return cursor.getmulti(names)

    def _is_cold(self, database: Any, names: list[bytes]) -> bool:
        """Whether a sample of the rows takes so long to read that their pages must come from the device."""
        sample = names[:: len(names) // _SAMPLE]
        start = time.perf_counter()
        self._get(self._txn, database, sample)
        return time.perf_counter() - start > len(sample) * _COLD_SECONDS

    def _touch(self, database: Any, names: list[bytes]) -> list[None]:
        """Brings pages of the last commit to memory; the caller then reads what is newest.

        Only a transaction of the last commit may be used beside others, and most pages are still those of it.
        """
        with self._env.begin() as transaction:
            self._get(transaction, database, names)
        return []

    def _write(self, keys: NDArray[np.uint64], rows: NDArray[np.uint8]) -> None:
        order = np.argsort(keys, kind="stable")
        names = keys[order].view("V8").tolist()
        values = as_bytes(rows[order])
        with (
            self._breaking("writing"),
            self._lmdb_errors("writing"),
            self._txn.cursor(self._rows[rows.shape[1]]) as cursor,
        ):
            cursor.putmulti(zip(names, values, strict=True))
        self._changed_rows += len(keys)

    def _keys(self, table: int) -> Iterator[NDArray[np.uint64]]:
        start, last = table << ID_BITS, table << ID_BITS | MAX_ID
        while start <= last:
            with (
                self._lmdb_errors("reading"),
                self._txn.cursor(self._rows[self._sizes.of_table(table)]) as cursor,
            ):
                if not cursor.set_range(np.uint64(start).tobytes()):
                    return
                names = b"".join(islice(cursor.iternext(keys=True, values=False), _CHUNK))
            chunk = np.frombuffer(names, np.uint64)
            chunk = chunk[chunk <= last]
            if not len(chunk):
                return
            start = int(chunk[-1]) + 1
            yield chunk

    def _commit(self, meta: bytes) -> int:
        with self._breaking("committing"), self._lmdb_errors("committing"):
            self._txn.put(_COMMIT, _NUMBER.pack(self._number + 1) + meta, db=self._records)
            self._txn.commit()
            self._txn = self._env.begin(write=True)
        self._number += 1
        self._committed_meta = meta
        self._changed_rows = 0
        return self._number

    def _meta(self) -> bytes:
        return self._committed_meta

    def _space(self) -> tuple[int, int, int, int]:
        with self._lmdb_errors("reading"):
            counts = {size: self._txn.stat(db)["entries"] for size, db in self._rows.items()}
            page = self._env.stat()["psize"]
        live = sum(size * count for size, count in counts.items())
        dirty = page * min(self._changed_rows, _MOST_DIRTY_PAGES)
        return sum(counts.values()), live, disk_bytes(self._path), dirty

    def _release(self) -> None:
        self._readers.close()
        self._txn.abort()
        self._env.close()

    def _check_length(self) -> None:
        """A file shorter than its tree would kill the process at the first access beyond its end."""
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        length = (self._path / "data.mdb").stat().st_size
        if length < needed:
            raise StoreCorruptError(f"{self._path / 'data.mdb'} is cut off: {length} bytes of {needed}")

    def _need_room(self) -> None:
        """Raises the system's error when the file cannot grow; LMDB itself calls a full disk an IO error."""
        fd = os.open(self._path / "data.mdb", os.O_RDWR | os.O_NOFOLLOW)
        try:
            length = os.fstat(fd).st_size
            os.posix_fallocate(fd, length, 1 << 20)
            os.ftruncate(fd, length)
        finally:
            os.close(fd)

    @contextmanager
    def _lmdb_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreFullError(
                f"{doing} {self._path}: the cap of {format_bytes(self._cap)} is reached; raise ssd, or "
                "commit more often, since LMDB keeps the pages of the last commit beside the changed ones"
            ) from error
        except lmdb.DiskError as error:
            raise StoreFullError(f"{doing} {self._path}: {error}; free some space") from error
        except (
            lmdb.CorruptedError,
            lmdb.InvalidError,
            lmdb.PageNotFoundError,
            lmdb.VersionMismatchError,
        ) as error:
            raise StoreCorruptError(f"{doing} {self._path}: {error}") from error
        except lmdb.Error as error:
            with store_errors(f"{doing} {self._path}"):
                self._need_room()
            raise StoreIOError(f"{doing} {self._path}: {error}") from error
