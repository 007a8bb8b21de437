"""The engine `lmdb`: one memory-mapped B+tree, through its Python package.

Everything between two commits is one write transaction, which LMDB never shows to the durable tree: a
commit is the transaction's own commit, and a crash or a close drops it. The directory's lock keeps other
processes out, so LMDB's own is off; without it a transaction may also move between threads. Changed pages
are kept in process memory until the commit, up to 512 MiB (a constant of LMDB); after that LMDB writes
some to unused places of the file.

LMDB knows only its last commit. An older commit that is kept is a copy of the tree, ``commit-N.mdb``, made
just before the next commit, beside the record ``commit-N.record`` that lists it. A store opened at such a
commit works on another copy, ``branch.mdb``, which the next commit puts in the place of ``data.mdb``.

There is one database per row size, with native-endian integer keys, and one for the commit record (key
``commit``, :mod:`tierstore.store.commits`). An error inside a transaction breaks it, so it closes the store.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from tierstore.config import format_bytes
from tierstore.errors import ConfigError, InputError, StoreCorruptError, StoreFullError, StoreIOError
from tierstore.keys import ID_BITS, MAX_ID
from tierstore.store.base import StoreBase, as_bytes, scatter
from tierstore.store.commits import find_commit, pack_commit, read_commit, unpack_commit
from tierstore.store.files import disk_bytes, open_regular, store_errors, sync_directory, write_atomically
from tierstore.store.parallel import SMALLEST, Readers
from tierstore.store.protocol import CommitInfo, StoredTable
from tierstore.store.registry import StoreOptions

_COMMIT = b"commit"
_DATA, _BRANCH = "data.mdb", "branch.mdb"
_COPY = re.compile(r"commit-(\d{12})\.mdb")
_CHUNK = 65_536
_MAX_MAP = 1 << 46  # x86-64 gives a process 2**47 bytes of addresses
_MIN_MAP = 1 << 20
_SAMPLE = 64
_COLD_SECONDS = 20e-6  # per row; a page in memory takes under 5 µs, one on a fast SSD over 50 µs
_MAX_DIRTY_PAGES = 131_071  # MDB_IDL_UM_MAX


class LMDBStore(StoreBase):
    """Rows in one LMDB environment. The map is as large as the cap, so it never has to grow."""

    engine = "lmdb"
    io = "mmap"

    def __init__(self, path: Path, tables: Sequence[StoredTable], options: StoreOptions) -> None:
        super().__init__(path, tables, options)
        if self._cap < _MIN_MAP and not options.read_only:
            raise ConfigError(
                f"{path}: the cap is {format_bytes(self._cap)}; an LMDB store needs at least "
                f"{format_bytes(_MIN_MAP)}, so raise ssd, or choose another engine"
            )
        self._changed_rows = 0
        with store_errors(f"opening {path}"):
            if not options.read_only:
                _clean(path)
            self._kept = [read_commit(path / _record_name(number)) for number in _copies(path)]
        self._readers = Readers(options.read_threads)
        self._current = self._open_tree(path / _DATA)
        if self._current is not None:
            for copy in [copy for copy in self._kept if copy.id >= self._current.id]:
                self._drop(copy)  # made for a commit that a crash cut short
            self._kept.append(self._current)
        if options.at:
            self._branch(options.at)

    def _branch(self, at: int | str) -> None:
        """Go on from a copy of the kept commit ``at``, unless it is the last commit."""
        try:
            commit = find_commit(self._kept, at, self._path)
        except InputError:
            self._release()
            raise
        if commit is self._kept[-1]:
            return
        self._close_tree()
        with store_errors(f"opening {self._path} at commit {commit.id}"):
            file = self._path / _copy_name(commit.id)
            if not self._read_only:
                file = Path(shutil.copyfile(file, self._path / _BRANCH))
        self._current = self._open_tree(file)
        if self._current != commit:
            self._release()
            raise StoreCorruptError(
                f"{self._path / _copy_name(commit.id)} does not hold that commit's record"
            )

    def _open_tree(self, file: Path) -> CommitInfo | None:
        """Open the environment ``file`` and begin a transaction; return the commit that the file holds."""
        sizes = self._sizes.known()
        self._file = file
        map_size = min(self._cap, _MAX_MAP)
        if self._read_only:
            with store_errors(f"opening {file}"):
                map_size = max(file.stat().st_size, _MIN_MAP)
        with self._lmdb_errors("opening"):
            self._env = lmdb.open(
                str(file),
                subdir=False,
                map_size=map_size // 4096 * 4096,
                max_dbs=len(sizes) + 1,
                readonly=self._read_only,
                create=not self._read_only,
                lock=False,
                readahead=False,
                meminit=False,
            )
        try:
            with self._lmdb_errors("opening"):
                self._check_length()
                create = not self._read_only
                self._records = self._env.open_db(b"records", create=create)
                self._rows = {
                    size: self._env.open_db(b"rows-%d" % size, integerkey=True, create=create)
                    for size in sizes
                }
                self._txn = self._env.begin(write=not self._read_only)
                record = self._txn.get(_COMMIT, db=self._records)
            return unpack_commit(record, file)[0] if record else None
        except BaseException:
            self._env.close()
            raise

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
    def _get(
        transaction: lmdb.Transaction, database: lmdb._Database, names: list[bytes]
    ) -> list[tuple[bytes, bytes]]:
        with transaction.cursor(database) as cursor:
            return cursor.getmulti(names)  # type: ignore[return-value]  # no buffers: bytes

    def _is_cold(self, database: lmdb._Database, names: list[bytes]) -> bool:
        """Tell whether a sample of the rows reads so slowly that its pages must come from the device."""
        sample = names[:: len(names) // _SAMPLE]
        start = time.perf_counter()
        self._get(self._txn, database, sample)
        return time.perf_counter() - start > len(sample) * _COLD_SECONDS

    def _touch(self, database: lmdb._Database, names: list[bytes]) -> list[None]:
        """Bring pages of the last commit to memory; the caller then reads the newest rows.

        Several threads can read the last commit at a time, but not newer rows; most pages are the same.
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

    def _keys(self, table: int) -> Generator[NDArray[np.uint64], None, None]:
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

    def _commit(self, commit: CommitInfo) -> None:
        branched = self._file.name == _BRANCH
        if self._kept and not branched and (self._keep > 1 or self._kept[-1].tag):
            with self._lmdb_errors("committing"), store_errors(f"copying commit {self._kept[-1].id}"):
                self._copy_last()
        with (
            self._breaking("committing"),
            self._lmdb_errors("committing"),
            store_errors(f"committing {self._path}"),
        ):
            self._txn.put(_COMMIT, pack_commit(commit), db=self._records)
            self._txn.commit()
            if branched:
                self._replace_data()
            self._txn = self._env.begin(write=True)
        self._changed_rows = 0

    def _copy_last(self) -> None:
        """Copy the last commit, which the next commit is about to replace."""
        last = self._kept[-1]
        needed = disk_bytes(self._path) + self._file.stat().st_size
        if needed > self._cap:
            raise StoreFullError(
                f"{self._path}: keeping commit {last.id} beside a new one takes {format_bytes(needed)} of "
                f"its cap of {format_bytes(self._cap)}, since LMDB must copy it; raise ssd, or keep fewer"
            )
        write_atomically(self._path / _record_name(last.id), [pack_commit(last)])
        temporary = self._path / (_copy_name(last.id) + ".tmp")
        fd = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self._env.copyfd(fd, compact=True)
            os.fsync(fd)
        except BaseException:
            temporary.unlink()
            raise
        finally:
            os.close(fd)
        temporary.rename(self._path / _copy_name(last.id))
        sync_directory(self._path)

    def _replace_data(self) -> None:
        """Put the branch in the place of the last commit, which becomes a copy."""
        last = self._kept[-1]
        write_atomically(self._path / _record_name(last.id), [pack_commit(last)])
        (self._path / _DATA).rename(self._path / _copy_name(last.id))
        self._file = self._file.rename(self._path / _DATA)
        sync_directory(self._path)

    def _remove(self, commit: CommitInfo) -> None:
        if not self._read_only and (self._path / _copy_name(commit.id)).exists():
            (self._path / _copy_name(commit.id)).unlink()
            (self._path / _record_name(commit.id)).unlink(missing_ok=True)
            sync_directory(self._path)

    def _space(self) -> tuple[int, int, int, int]:
        with self._lmdb_errors("reading"):
            counts = {size: self._txn.stat(db)["entries"] for size, db in self._rows.items()}
            page = self._env.stat()["psize"]
        live = sum(size * count for size, count in counts.items())
        dirty = page * min(self._changed_rows, _MAX_DIRTY_PAGES)
        return sum(counts.values()), live, disk_bytes(self._path), dirty

    def _release(self) -> None:
        self._readers.close()
        self._close_tree()

    def _close_tree(self) -> None:
        self._txn.abort()
        self._env.close()

    def _check_length(self) -> None:
        """Check that the file has its tree's length: an access beyond its end would kill the process."""
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        length = self._file.stat().st_size
        if length < needed:
            raise StoreCorruptError(f"{self._file} is cut off: {length} bytes of {needed}")

    def _need_room(self) -> None:
        """Raise the system's error when the file cannot grow; LMDB itself calls a full disk an IO error."""
        fd = os.open(self._file, os.O_RDWR | os.O_NOFOLLOW)
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


def _clean(path: Path) -> None:
    """Remove files that a crash left, and finish a replacement of ``data.mdb`` by a branch that the crash cut
    short."""
    data, branch = path / _DATA, path / _BRANCH
    if not data.exists() and branch.exists() and _copies(path):
        branch.rename(data)  # the branch is synced: only the names were still to be changed
        sync_directory(path)
    whole = {name(number) for number in _copies(path) for name in (_copy_name, _record_name)}
    for name in os.listdir(path):
        if name != _DATA and name not in whole:
            (path / name).unlink()


def _copies(path: Path) -> list[int]:
    """Return the numbers of the commits that are copies, ascending."""
    return sorted(int(match[1]) for match in map(_COPY.fullmatch, os.listdir(path)) if match)


def _copy_name(number: int) -> str:
    return f"commit-{number:012d}.mdb"


def _record_name(number: int) -> str:
    return f"commit-{number:012d}.record"
