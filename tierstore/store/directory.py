"""Store directories: created, recognised, locked, and opened with the engine they were made for.

A directory holds ``TIERSTORE.json`` (:mod:`tierstore.store.identity`), ``LOCK`` (:mod:`tierstore.store.lock`,
held as long as the store is open) and a folder named after the engine.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.errors import ClosedError, ConfigError, StoreCorruptError, StoreMismatchError
from tierstore.store import identity as identities
from tierstore.store.commits import find_commit
from tierstore.store.files import open_own, store_errors, sync_directory, walk_files
from tierstore.store.identity import StoreIdentity
from tierstore.store.lock import LOCK, FolderLock, lock_for_reading, lock_for_writing
from tierstore.store.portable import Progress, export_rows
from tierstore.store.protocol import CommitId, CommitInfo, RowBatch, RowStore, StoredTable, StoreStats
from tierstore.store.registry import StoreOptions, get_engine

Chunk = TypeVar("Chunk")

NO_CAP = 1 << 62
_TEMPORARY = "tierstore-temporary-"
_MAY_BE_IN_A_NEW_ONE = {LOCK, identities.FILE_NAME + ".tmp", "lost+found"}


def open_store(
    path: str | os.PathLike[str] | None,
    engine: str | None = None,
    tables: Sequence[StoredTable] | None = None,
    ssd_bytes: int = NO_CAP,
    *,
    io: str = "auto",
    read_threads: int = 16,
    keep: int = 1,
    at: int | str = 0,
    read_only: bool = False,
    index: str = "auto",
) -> DirectoryStore:
    """Open the store directory ``path`` for ``tables``, at its last commit; create it where there is none.

    ``path`` None makes a temporary directory that is deleted on close, or when the process ends in good
    order. The temporary directory of a process that was killed is deleted when the next one is made.
    ``ssd_bytes`` caps the bytes of all files of the store; :class:`StoreOptions` describes the other options.
    A store opened read-only must exist, and may be where this user cannot write. Tables that the directory
    lacks are added, if each table that it has is among ``tables``. Without ``engine`` or ``tables`` the
    directory must exist, and its own engine and tables are taken.

    Raises ``StoreMismatchError`` (and touches nothing) when the directory is for other tables or another
    engine, or holds something else; ``StoreLockedError`` when the store is open elsewhere; ``ConfigError``
    when ``path`` is a file; ``StoreIOError`` or ``StoreFullError`` when the system refuses.
    """
    if engine is None or tables is None:
        if path is None:
            raise ConfigError("a new store needs an engine and tables")
        own = identities.read_identity(path)
        engine = own.engine if engine is None else engine
        tables = own.tables if tables is None else tables
    factory = get_engine(engine)
    wanted = StoreIdentity(engine, identities.plain(tables))
    options = StoreOptions(ssd_bytes, io, read_threads, keep, at, read_only, index)
    if read_only:
        return _open_read_only(Path(path or ""), wanted, options)
    doing = f"opening a store in {'a temporary directory' if path is None else os.fspath(path)}"
    with store_errors(doing), ExitStack() as undo:
        folder = _temporary(undo) if path is None else _make_folders(Path(path), undo)
        _recognise(folder, wanted)  # before there is a lock file, so that a foreign folder stays untouched
        lock = lock_for_writing(folder)
        undo.callback(lock.close)
        found = _recognise(folder, wanted)
        lock.sign()
        if found is None:
            undo.callback(_remove_new, folder, engine, lock)
            identities.write_identity(folder, wanted)
        inner = factory(_engine_folder(folder, engine), wanted.tables, options)
        undo.callback(inner.close)
        if found not in (None, wanted):
            identities.write_identity(folder, wanted)
        undo.pop_all()
    return DirectoryStore(folder, inner, lock, wanted.tables, at, temporary=path is None)


def _open_read_only(folder: Path, wanted: StoreIdentity, options: StoreOptions) -> DirectoryStore:
    with store_errors(f"opening the store in {folder}"), ExitStack() as undo:
        lock = lock_for_reading(folder)
        undo.callback(lock.close)
        identities.check(folder, identities.read_identity(folder), wanted)
        own = folder / wanted.engine
        check_no_links(own)
        inner = get_engine(wanted.engine)(own, wanted.tables, options)
        undo.pop_all()
    return DirectoryStore(folder, inner, lock, wanted.tables, options.at, temporary=False)


class DirectoryStore:
    """A :class:`RowStore` and its directory, whose lock it holds.

    In a forked child every method but ``close``, which does nothing there, raises ``ClosedError``.
    """

    def __init__(
        self,
        path: Path,
        inner: RowStore,
        lock: FolderLock,
        tables: tuple[StoredTable, ...],
        at: int | str,
        temporary: bool,
    ) -> None:
        self.path = path
        self.tables = tables
        """Ordered by index."""
        self.inner = inner
        """The engine's own object."""
        self.engine = inner.engine
        kept = inner.commits()
        self._commit = find_commit(kept, at, path) if at else (kept[-1] if kept else None)
        self._closing = threading.Lock()
        self._forks = _core.fork_count()
        # This runs even if close() is never called: the engine must end before the lock is free.
        self._release = weakref.finalize(self, _release, inner, lock, path if temporary else None)
        self._release.atexit = temporary
        _OPEN.add(self)

    def read(
        self, keys: NDArray[np.uint64], out: NDArray[np.uint8], slots: NDArray[np.int32] | None = None
    ) -> NDArray[np.bool_]:
        return self._engine().read(keys, out, slots)

    def places(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return self._engine().places(keys)

    def write(self, keys: NDArray[np.uint64], rows: NDArray[np.uint8]) -> None:
        self._engine().write(keys, rows)

    def keys(self, table: int) -> Iterator[NDArray[np.uint64]]:
        return self._while_locked(self._engine().keys(table))

    def count(self, table: int) -> int:
        return self._engine().count(table)

    def scan(self, tables: Sequence[int] | None = None) -> Iterator[RowBatch]:
        return self._while_locked(self._engine().scan(tables))

    def reserve(self, table: int, rows: int) -> None:
        self._engine().reserve(table, rows)

    def commit(self, meta: bytes = b"", tag: str | None = None) -> CommitId:
        """Commit as :class:`RowStore` says. After an interrupted call (Ctrl-C) :meth:`commits` shows whether
        it was made."""
        inner = self._engine()
        last = self._commit.id if self._commit else 0
        try:
            return inner.commit(meta, tag)
        finally:
            with suppress(ClosedError):
                kept = inner.commits()
                if kept and kept[-1].id > last:
                    self._commit = kept[-1]

    def commits(self) -> list[CommitInfo]:
        return self._engine().commits()

    def drop_commit(self, id: CommitId) -> None:
        self._engine().drop_commit(id)

    def compact(self) -> None:
        self._engine().compact()

    def set_cap(self, ssd_bytes: int) -> None:
        """Set the cap on the bytes of all files; ``ConfigError`` if the engine must be opened anew for it."""
        change = getattr(self.inner, "set_cap", None)
        if change is None:
            raise ConfigError(f"a store of engine {self.engine!r} takes another cap only when it is opened")
        change(ssd_bytes)

    def meta(self) -> bytes:
        return self._engine().meta()

    def stats(self) -> StoreStats:
        return self._engine().stats()

    def export(self, target: str | os.PathLike[str], progress: Progress | None = None) -> int:
        """Write a portable copy of all rows as they are now to the new folder ``target``; return how many.

        The copy has the meta and the tag of the commit that the store was opened at or made last, so commit
        first. :func:`tierstore.store.import_` reads the copy; for errors see
        :func:`tierstore.store.portable.export_rows`.
        """
        self._engine()
        return export_rows(self, target, self._commit, progress)

    def close(self) -> None:
        if self._forks == _core.fork_count():
            with self._closing:
                self._release()

    def __enter__(self) -> DirectoryStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _engine(self) -> RowStore:
        """Return the engine; ``ClosedError`` in a forked child, which lacks the engine's threads."""
        if self._forks != _core.fork_count():
            raise ClosedError(
                f"the store in {self.path} was opened before this process was forked; open it in the process "
                "that uses it"
            )
        return self.inner

    def _while_locked(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield ``chunks``, and keep this store (and so its lock) alive as long as the iterator."""
        while True:
            self._engine()
            chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk


_OPEN: weakref.WeakSet[DirectoryStore] = weakref.WeakSet()


def _keep_engines_for_ever() -> None:
    """Keep engines from being destroyed in a forked child, where their threads are missing."""
    for store in list(_OPEN):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store.inner))


os.register_at_fork(after_in_child=_keep_engines_for_ever)


def _release(inner: RowStore, lock: FolderLock, temporary: Path | None) -> None:
    """End the engine, then the lock. Do nothing in a forked child, whose parent still works with both."""
    if lock.closed:
        return
    try:
        inner.close()
    finally:
        lock.close()
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def _temporary(undo: ExitStack) -> Path:
    with suppress(OSError):
        _delete_left_behind(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    undo.callback(_delete_temporary, folder, _core.fork_count())
    return folder


def _delete_left_behind(parent: Path) -> None:
    """Delete this user's temporary stores of processes that were killed."""
    for folder in parent.glob(f"{_TEMPORARY}*"):
        with suppress(OSError, ValueError, StoreCorruptError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = open_own(folder / LOCK)
            try:
                # A process that makes a store writes its number once it has the lock; until then the file is
                # empty.
                if not _is_running(int(os.pread(lock.fileno(), 20, 0))):
                    fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                lock.close()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _delete_temporary(folder: Path, forks: int) -> None:
    if _core.fork_count() == forks:  # a forked child must not delete what its parent works with
        shutil.rmtree(folder, ignore_errors=True)


def _make_folders(folder: Path, undo: ExitStack) -> Path:
    """Create ``folder`` and its parents where they are missing, durably."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"path {folder} is a file; give the path of a folder")
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        undo.callback(_remove_if_empty, new)
        sync_directory(new.parent)
    return folder


def lock_folder(folder: Path) -> FolderLock:
    """Create ``folder`` where it is missing and take its lock, with this process's number in the file.

    Raises ``StoreLockedError`` when another object has the lock, also one in this process.
    """
    with store_errors(f"locking {folder}"), ExitStack() as undo:
        lock = lock_for_writing(_make_folders(folder, undo))
        undo.callback(lock.close)
        lock.sign()
        undo.pop_all()
    return lock


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _remove_new(folder: Path, engine: str, lock: FolderLock) -> None:
    """Remove the files of a store directory whose first opening failed; the caller holds its lock."""
    if lock.closed:  # in a forked child, whose parent owns the files
        return
    shutil.rmtree(folder / engine, ignore_errors=True)
    with suppress(OSError):
        (folder / identities.FILE_NAME).unlink()
    lock.remove_file()


def check_no_links(folder: Path) -> None:
    """Raise ``StoreCorruptError`` when ``folder`` or anything in it is a link: engines would follow it."""
    if folder.is_symlink():
        raise StoreCorruptError(f"{folder} is a symbolic link; a store does not follow links")
    for _ in walk_files(folder):
        pass


def _engine_folder(folder: Path, engine: str) -> Path:
    own = folder / engine
    if not own.is_symlink():
        own.mkdir(exist_ok=True)
        sync_directory(folder)  # always: the maker of the folder may have died before this
    check_no_links(own)
    return own


def _recognise(folder: Path, wanted: StoreIdentity) -> StoreIdentity | None:
    """Return the identity that ``folder`` has, if it fits ``wanted``; None when the folder is empty."""
    names = os.listdir(folder)
    if identities.FILE_NAME in names:
        found = identities.read_identity(folder)
        identities.check(folder, found, wanted)
        return found
    foreign = sorted(set(names) - _MAY_BE_IN_A_NEW_ONE)
    if foreign:
        raise StoreMismatchError(
            f"{folder} is not a store directory and not empty (it has {', '.join(foreign[:3])}"
            f"{', …' if len(foreign) > 3 else ''}); give an empty or new folder"
        )
    return None
