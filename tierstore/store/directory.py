"""Store directories: created, recognised, locked, and opened with the engine they were made for.

A directory holds ``TIERSTORE.json`` (:mod:`tierstore.store.identity`), ``LOCK`` (:mod:`tierstore.store.lock`,
held as long as the store is open) and a folder named after the engine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.errors import ClosedError, ConfigError, StoreCorruptError, StoreMismatchError
from tierstore.store import identity as identities
from tierstore.store.commits import find_commit
from tierstore.store.devices import FurtherFolders, StorePath, folders_of, recorded_folders
from tierstore.store.files import store_errors, sync_directory, walk_files
from tierstore.store.identity import StoreIdentity
from tierstore.store.lock import LOCK, FolderLock, FolderLocks, lock_for_reading, lock_for_writing
from tierstore.store.portable import Progress, export_rows
from tierstore.store.protocol import CommitId, CommitInfo, RowBatch, RowStore, StoredTable, StoreStats
from tierstore.store.registry import StoreOptions, check_spreads, get_engine
from tierstore.store.temporary import temporary_folder

Chunk = TypeVar("Chunk")

NO_CAP = 1 << 62
_MAY_BE_IN_A_NEW_ONE = {LOCK, identities.FILE_NAME + ".tmp", "lost+found"}


def open_store(
    path: StorePath,
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
    A list of paths spreads the store over several devices (native engine): the first is the store directory,
    and each further path gets a share of the segments. The list must have all paths that the store was opened
    with before, in any order behind the first; more paths are added.

    ``ssd_bytes`` caps the bytes of all files of the store; :class:`StoreOptions` describes the other options.
    A store opened read-only must exist, and may be where this user cannot write. Tables that the directory
    lacks are added, if each table that it has is among ``tables``. Without ``engine`` or ``tables`` the
    directory must exist, and its own engine and tables are taken; where one path is given, its own further
    paths, too.

    Raises ``StoreMismatchError`` (and touches nothing) when the directory is for other tables or another
    engine, or holds something else; ``StoreLockedError`` when the store is open elsewhere; ``ConfigError``
    when ``path`` is a file; ``StoreCorruptError`` for damage; ``StoreIOError`` or ``StoreFullError`` when the
    system refuses.
    """
    folders = folders_of(path)
    if engine is None or tables is None:
        if not folders:
            raise ConfigError("a new store needs an engine and tables")
        own = identities.read_identity(folders[0])
        if len(folders) == 1:
            folders = recorded_folders(folders[0], own)
        if not (folders[0] / own.engine).is_dir():
            own = replace(own, opened=True)  # only a call with engine and tables finishes a creation
        identities.check_has_rows(folders[0], own)
        engine = own.engine if engine is None else engine
        tables = own.tables if tables is None else tables
    factory = get_engine(engine)
    wanted = StoreIdentity(engine, identities.plain(tables))
    further = FurtherFolders(folders[0] if folders else Path(), folders[1:], engine)
    if folders[1:]:
        check_spreads(engine)
    options = StoreOptions(ssd_bytes, io, read_threads, keep, at, read_only, index, further.engine_folders)
    if read_only:
        return _open_read_only(folders[0] if folders else Path(), further, wanted, options)
    doing = f"opening a store in {folders[0] if folders else 'a temporary directory'}"
    with store_errors(doing), ExitStack() as undo:
        if folders[1:]:
            further.check(_recognise(folders[0], wanted))  # before anything is made
        folder = _make_all(folders, undo) if folders else temporary_folder(undo)
        # before there is a lock file, so that a foreign folder stays untouched
        further.check(_recognise(folder, wanted))
        lock = lock_for_writing(folder)
        undo.callback(lock.close)
        further.lock(undo)
        found = _recognise(folder, wanted)
        further.check(found)
        identities.check_has_rows(folder, found)
        lock.sign()
        if found is None:
            undo.callback(_remove_new, folder, engine, lock)
        wanted = _with_devices(folder, wanted, found, further, undo)
        for own_folder in further.engine_folders:
            _engine_folder(own_folder.parent, engine)
        inner = factory(_engine_folder(folder, engine), wanted.tables, options)
        undo.callback(inner.close)
        wanted = replace(wanted, opened=identities.has_files(folder / engine))
        if found != wanted:
            sync_directory(folder / engine)
            identities.write_identity(folder, wanted)
        undo.pop_all()
    locks = FolderLocks([lock, *further.locks])
    return DirectoryStore(folder, inner, locks, wanted.tables, at, temporary=not folders)


def _with_devices(
    folder: Path,
    wanted: StoreIdentity,
    found: StoreIdentity | None,
    further: FurtherFolders,
    undo: ExitStack,
) -> StoreIdentity:
    """Make the further folders the store's; return the identity to write when the engine has opened."""
    own = further.owner(found)
    tables, opened = (wanted.tables, False) if found is None else (found.tables, found.opened)
    if found is None or (own and not found.devices):
        # the further folders are about to name this store
        identities.write_identity(folder, StoreIdentity(wanted.engine, tables, devices=own, opened=opened))
    return StoreIdentity(wanted.engine, wanted.tables, devices=further.join(own, undo))


def _open_read_only(
    folder: Path, further: FurtherFolders, wanted: StoreIdentity, options: StoreOptions
) -> DirectoryStore:
    with store_errors(f"opening the store in {folder}"), ExitStack() as undo:
        lock = lock_for_reading(folder)
        undo.callback(lock.close)
        found = identities.read_identity(folder)
        identities.check(folder, found, wanted)
        further.check(found, read_only=True)
        identities.check_has_rows(folder, found)
        further.share_locks(undo)
        own = folder / wanted.engine
        for place in (own, *further.engine_folders):
            check_no_links(place)
        inner = get_engine(wanted.engine)(own, wanted.tables, options)
        undo.pop_all()
    locks = FolderLocks([lock, *further.locks])
    return DirectoryStore(folder, inner, locks, wanted.tables, options.at, temporary=False)


class DirectoryStore(RowStore):
    """A :class:`RowStore` and its directory, whose lock it holds; ``path`` is the first folder's.

    In a forked child every method but ``close``, which does nothing there, raises ``ClosedError``.
    """

    def __init__(
        self,
        path: Path,
        inner: RowStore,
        lock: FolderLocks,
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

    def write(
        self, keys: NDArray[np.uint64], rows: NDArray[np.uint8], slots: NDArray[np.int32] | None = None
    ) -> None:
        self._engine().write(keys, rows, slots)

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


def _release(inner: RowStore, lock: FolderLocks, temporary: Path | None) -> None:
    """End the engine, then the lock. Do nothing in a forked child, whose parent still works with both."""
    if lock.closed:
        return
    try:
        inner.close()
    finally:
        lock.close()
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def _make_all(folders: Sequence[Path], undo: ExitStack) -> Path:
    """Create the folders where they are missing; return the first."""
    for folder in folders:
        _make_folders(folder, undo)
    return folders[0]


def _make_folders(folder: Path, undo: ExitStack) -> Path:
    """Create ``folder`` and its parents where they are missing, durably."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"path {folder} is a file; give the path of a folder")
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    for new in reversed(missing):
        if new.is_symlink():
            raise ConfigError(
                f"path {folder}: {new} is a link to {os.readlink(new)}, which is not there; mount or make "
                "that folder, or give another path"
            )
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
    names = os.listdir(folder) if folder.exists() else []
    if identities.FILE_NAME in names:
        found = identities.read_identity(folder)
        identities.check(folder, found, wanted)
        return found
    identities.check_no_device(folder)
    foreign = sorted(set(names) - _MAY_BE_IN_A_NEW_ONE)
    if foreign:
        raise StoreMismatchError(
            f"{folder} is not a store directory and not empty (it has {', '.join(foreign[:3])}"
            f"{', …' if len(foreign) > 3 else ''}); give an empty or new folder"
        )
    return None
