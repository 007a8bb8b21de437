"""Base of the engines: checks of arguments, the closed state, counters, the list of kept commits.

Engines implement the ``_`` methods.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import ClosedError, InputError, StoreCorruptError
from tierstore.keys import ID_BITS
from tierstore.store.commits import check_droppable, find_commit, new_commit, superseded
from tierstore.store.files import store_errors
from tierstore.store.protocol import CommitId, CommitInfo, RowBatch, StoredTable, StoreStats
from tierstore.store.registry import StoreOptions

log = logging.getLogger(__name__)

_SCANNED_BYTES = 4 << 20  # of rows in a batch of a scan
_TAG = re.compile(r"[ -.0-~]{0,100}")  # a tag may be part of a file's name, or of a command line


class RowSizes:
    """Row sizes by table index, and the check that arrays of a call fit them."""

    def __init__(self, tables: Sequence[StoredTable]) -> None:
        self._sizes = np.zeros(1 + max((spec.index for spec in tables), default=-1), np.int64)
        for spec in tables:
            self._sizes[spec.index] = spec.row_bytes
        sizes = {int(size) for size in self._sizes}
        self._alike = sizes.pop() if len(sizes) == 1 else None  # of all indices up to the largest

    def known(self) -> list[int]:
        """Return all row sizes, ascending."""
        return np.unique(self._sizes[self._sizes > 0]).tolist()

    def of_table(self, table: int) -> int:
        """Return the row size of ``table``; ``InputError`` when the store has no such table."""
        size = self._sizes[table] if 0 <= table < len(self._sizes) else 0
        if size == 0:
            raise InputError(f"table index {table} is unknown to this store; it has {self._indices()}")
        return int(size)

    def chosen(self, tables: Sequence[int] | None) -> list[int]:
        """Return ``tables``, or the indices of all tables for None; ``InputError`` for an unknown table."""
        if tables is None:
            return np.flatnonzero(self._sizes).tolist()
        for table in tables:
            self.of_table(table)
        return list(dict.fromkeys(tables))

    def of_keys(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the row size of each key's table, int64 (n,). Raises ``InputError`` for an unknown table."""
        return self._sizes[keys >> np.uint64(ID_BITS)]

    def check(
        self,
        keys: NDArray[np.uint64],
        rows: NDArray[np.uint8],
        name: str,
        slots: NDArray[np.int32] | None = None,
    ) -> None:
        """Raise ``InputError`` unless keys are uint64 (n,) and rows uint8 (n, row_bytes), C-contiguous.

        With ``slots``, int32 (n,), rows may have any length that ``slots`` point into. ``name``: the name of
        ``rows`` in messages.
        """
        self.check_keys(keys)
        _check_array(rows, name, np.uint8, 2)
        if slots is not None:
            _check_array(slots, "slots", np.int32, 1)
            if len(slots) and not 0 <= slots.min() <= slots.max() < len(rows):
                raise InputError(
                    f"slots are from {slots.min()} to {slots.max()}; {name} has {len(rows)} rows"
                )
        if len(keys) != len(rows if slots is None else slots):
            what = f"{name} has {len(rows)} rows" if slots is None else f"there are {len(slots)} slots"
            raise InputError(f"{len(keys)} keys, but {what}")
        if not len(keys):
            return
        if rows.shape[1] == self._alike and int(keys.max()) >> ID_BITS < len(self._sizes):
            return  # what follows takes longer than some calls
        tables = keys >> np.uint64(ID_BITS)
        self.of_table(int(tables.max()))
        sizes = self._sizes[tables]
        wrong = np.flatnonzero(sizes != rows.shape[1])
        if wrong.size:
            table = int(tables[wrong[0]])
            raise InputError(
                f"{name} has rows of {rows.shape[1]} bytes, but rows of table {table} have "
                f"{self.of_table(table)}; all keys of one call must belong to tables of one row size"
            )

    @staticmethod
    def check_keys(keys: NDArray[np.uint64]) -> None:
        """Raise ``InputError`` unless keys are uint64 (n,), C-contiguous."""
        _check_array(keys, "keys", np.uint64, 1)

    def _indices(self) -> str:
        indices = np.flatnonzero(self._sizes)
        some = ", ".join(map(str, indices[:8].tolist()))
        return f"tables {some}{', …' if len(indices) > 8 else ''}" if some else "no tables"


def _check_array(array: object, name: str, dtype: type[np.generic], ndim: int) -> None:
    if not isinstance(array, np.ndarray):
        raise InputError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if array.dtype != dtype:
        raise InputError(f"{name} must be {np.dtype(dtype)}, not {array.dtype}")
    if array.ndim != ndim:
        raise InputError(f"{name} must have {ndim} dimension{'s' * (ndim > 1)}, not {array.ndim}")
    if not array.flags.c_contiguous:
        raise InputError(f"{name} must be C-contiguous; pass np.ascontiguousarray({name})")


def as_bytes(rows: NDArray[np.uint8]) -> list[bytes]:
    """Return each row of uint8 (n, row_bytes) as a bytes object."""
    return rows.view(f"V{rows.shape[1]}").ravel().tolist()


def scatter(values: list[bytes], positions: NDArray[np.int64], out: NDArray[np.uint8], path: Path) -> None:
    """Copy ``values[i]``, of row_bytes each, to ``out[positions[i]]``."""
    data = b"".join(values)
    if len(data) != len(values) * out.shape[1]:
        raise StoreCorruptError(
            f"{path} has rows that are not {out.shape[1]} bytes long, as their table's are"
        )
    out[positions] = np.frombuffer(data, np.uint8).reshape(-1, out.shape[1])


def check_commit(meta: object, tag: object) -> None:
    """Raise ``InputError`` unless a commit can have this ``meta`` and ``tag``."""
    if not isinstance(meta, bytes):
        raise InputError(f"meta must be bytes, not {type(meta).__name__}")
    if tag is not None and not (isinstance(tag, str) and _TAG.fullmatch(tag)):
        raise InputError(f"tag must be at most 100 printable ASCII characters without '/', not {tag!r}")


class StoreBase(ABC):
    """A :class:`RowStore` whose public methods check, count and lock; the engine does the other work."""

    engine: str
    io: str

    def __init__(self, path: Path, tables: Sequence[StoredTable], options: StoreOptions) -> None:
        self._path = path
        self._sizes = RowSizes(tables)
        self._cap = options.ssd_bytes
        self._keep = options.keep
        self._read_only = options.read_only
        self._kept: list[CommitInfo] = []  # oldest first; for engines to fill when they open
        self._current: CommitInfo | None = None  # the commit that the store was opened at or made last
        self._lock = threading.RLock()
        self._closed = ""  # why, once it is
        self._listings: weakref.WeakSet[Generator[NDArray[np.uint64], None, None]] = (
            weakref.WeakSet()
        )  # not at their end
        self._read_rows = self._read_bytes = self._read_requests = 0
        self._written_rows = self._written_bytes = 0

    def read(
        self, keys: NDArray[np.uint64], out: NDArray[np.uint8], slots: NDArray[np.int32] | None = None
    ) -> NDArray[np.bool_]:
        with self._lock:
            self._check_open()
            self._sizes.check(keys, out, "out", slots)
            if not out.flags.writeable:
                raise InputError("out must be writable")
            if not len(keys):
                return np.zeros(0, np.bool_)
            rows = out if slots is None else np.empty((len(keys), out.shape[1]), np.uint8)
            found = self._read(keys, rows)
            if slots is not None:
                out[slots[found]] = rows[found]
            count = int(np.count_nonzero(found))
            self._read_rows += count
            self._read_bytes += count * out.shape[1]
            self._read_requests += len(keys)
            return found

    def places(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the keys: engines that keep rows sorted by key read neighbours together."""
        with self._lock:
            self._check_open()
            self._sizes.check_keys(keys)
            return keys

    def write(
        self, keys: NDArray[np.uint64], rows: NDArray[np.uint8], slots: NDArray[np.int32] | None = None
    ) -> None:
        with self._lock:
            self._check_writable()
            self._sizes.check(keys, rows, "rows", slots)
            if len(keys):
                self._write(keys, rows if slots is None else rows[slots])
                self._written_rows += len(keys)
                self._written_bytes += len(keys) * rows.shape[1]

    def keys(self, table: int) -> Iterator[NDArray[np.uint64]]:
        with self._lock:
            self._check_open()
            self._sizes.of_table(table)
            chunks = self._keys(table)
            self._listings.add(chunks)
        return self._checked(chunks)

    def count(self, table: int) -> int:
        return sum(map(len, self.keys(table)))

    def scan(self, tables: Sequence[int] | None = None) -> Iterator[RowBatch]:
        chosen = self._sizes.chosen(tables)
        return self._scan([(self._sizes.of_table(table), self.keys(table)) for table in chosen])

    def reserve(self, table: int, rows: int) -> None:
        with self._lock:
            self._check_writable()
            self._sizes.of_table(table)

    def commit(self, meta: bytes = b"", tag: str | None = None) -> CommitId:
        with self._lock:
            self._check_writable()
            check_commit(meta, tag)
            commit = new_commit(self._kept[-1].id + 1 if self._kept else 1, tag, meta)
            self._commit(commit)
            self._kept.append(commit)
            self._current = commit
            for old in superseded(self._kept, self._keep):
                try:
                    self._drop(old)
                except OSError as error:  # the newest commit is safe, and the next commit tries again
                    log.warning("removing commit %d of %s: %s", old.id, self._path, error)
            return commit.id

    def commits(self) -> list[CommitInfo]:
        with self._lock:
            self._check_open()
            return list(self._kept)

    def drop_commit(self, id: CommitId) -> None:
        with self._lock:
            self._check_writable()
            check_droppable(self._kept, id, self._path)
            with store_errors(f"removing commit {id} of {self._path}"):
                self._drop(find_commit(self._kept, id, self._path))

    def compact(self) -> None:
        with self._lock:
            self._check_writable()
            self._compact()

    def meta(self) -> bytes:
        with self._lock:
            self._check_open()
            return self._current.meta if self._current else b""

    def stats(self) -> StoreStats:
        with self._lock:
            self._check_open()
            rows, live, disk, index = self._space()
            return StoreStats(
                engine=self.engine,
                rows=rows,
                disk_bytes=disk,
                live_bytes=live,
                index_bytes=index,
                read_rows=self._read_rows,
                read_bytes=self._read_bytes,
                read_requests=self._read_requests,
                written_rows=self._written_rows,
                written_bytes=self._written_bytes,
                io=self.io,
            )

    def close(self) -> None:
        self._shut("the store was closed")

    def __enter__(self) -> StoreBase:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def _read(self, keys: NDArray[np.uint64], out: NDArray[np.uint8]) -> NDArray[np.bool_]: ...

    @abstractmethod
    def _write(self, keys: NDArray[np.uint64], rows: NDArray[np.uint8]) -> None: ...

    @abstractmethod
    def _keys(self, table: int) -> Generator[NDArray[np.uint64], None, None]: ...

    @abstractmethod
    def _commit(self, commit: CommitInfo) -> None:
        """Make everything written so far durable as ``commit``."""

    @abstractmethod
    def _remove(self, commit: CommitInfo) -> None:
        """Remove the files of a kept commit, which is not the last; a file that is gone is no error."""

    def _compact(self) -> None:  # noqa: B027  # most engines have nothing to do
        """Win back space; an engine without superseded rows need not override this."""

    @abstractmethod
    def _space(self) -> tuple[int, int, int, int]:
        """Return rows, live bytes, bytes on disk, bytes of memory."""

    @abstractmethod
    def _release(self) -> None:
        """Free everything; called once."""

    def _drop(self, commit: CommitInfo) -> None:
        self._remove(commit)
        self._kept.remove(commit)

    # The lock is taken by ``with self._lock`` alone: a context manager of Python's would keep it as long as
    # the traceback of an exception that a signal raised inside it.

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._closed}; open it again to go on from its last commit")

    def _check_writable(self) -> None:
        self._check_open()
        if self._read_only:
            raise InputError("the store is opened read-only; open it without read_only to change it")

    @contextmanager
    def _breaking(self, doing: str) -> Iterator[None]:
        """Close the store at any error of the body: some engines cannot go on after a failed change."""
        try:
            yield
        except BaseException as error:
            self._shut(f"the store lost the rows written since its last commit when {doing} failed ({error})")
            raise

    def _shut(self, why: str) -> None:
        with self._lock:
            if not self._closed:
                self._closed = why
                for chunks in list(self._listings):
                    with suppress(ValueError):  # the error itself says that the store must be closed
                        chunks.close()  # the error's frames would keep released objects alive
                self._release()

    def _scan(self, listings: list[tuple[int, Iterator[NDArray[np.uint64]]]]) -> Iterator[RowBatch]:
        for row_bytes, chunks in listings:
            step = max(1, _SCANNED_BYTES // row_bytes)
            for chunk in chunks:
                for start in range(0, len(chunk), step):
                    keys = chunk[start : start + step]
                    rows = np.empty((len(keys), row_bytes), np.uint8)
                    if not self.read(keys, rows).all():
                        raise StoreCorruptError(f"{self._path}: rows are listed, but not there")
                    yield keys, rows

    def _checked(self, chunks: Generator[NDArray[np.uint64], None, None]) -> Iterator[NDArray[np.uint64]]:
        while True:
            with self._lock:
                self._check_open()
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk
