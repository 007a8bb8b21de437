"""Store directories: created, recognised, locked, and opened with the engine they were made for.

A directory holds ``TIERSTORE.json`` (:mod:`tierstore.store.identity`), ``LOCK`` (held with flock as long
as the store is open; its text is the holder's process id) and a folder named after the engine.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import ConfigError, StoreCorruptError, StoreLockedError, StoreMismatchError
from tierstore.store import identity as identities
from tierstore.store.commits import find_commit
from tierstore.store.files import open_regular, store_errors, sync_directory, walk_files
from tierstore.store.identity import StoreIdentity
from tierstore.store.portable import Progress, export_rows
from tierstore.store.protocol import CommitId, CommitInfo, RowStore, StoreStats, TableSpec
from tierstore.store.registry import StoreOptions, get_engine

NO_CAP = 1 << 62
_LOCK = "LOCK"
_TEMPORARY = "tierstore-temporary-"
_MAY_BE_IN_A_NEW_ONE = {_LOCK, identities.FILE_NAME + ".tmp", "lost+found"}


def open_store(
    path: str | os.PathLike[str] | None,
    engine: str | None = None,
    tables: Sequence[TableSpec] | None = None,
    ssd_bytes: int = NO_CAP,
    *,
    io: str = "auto",
    read_threads: int = 16,
    keep: int = 1,
    at: int | str = 0,
    read_only: bool = False,
) -> DirectoryStore:
    """Opens the store directory ``path`` for ``tables``, at its last commit; creates it where there is none.

    ``path`` None makes a temporary directory that is deleted on close, or when the process ends in good
    order; that of a process that was killed, when the next one is made. ``ssd_bytes`` caps all files of the
    store; ``io``, ``read_threads``, ``keep``, ``at`` and ``read_only`` are those of :class:`StoreOptions`; a
    store opened read-only must exist, and may be where this user cannot write. Tables that the directory does
    not have yet are added, if it has no others than those asked for. Without ``engine`` or ``tables`` the
    directory must exist, and its own are taken.

    Raises ``StoreMismatchError`` (and touches nothing) when the directory is for other tables or another
    engine, or holds something else; ``StoreLockedError`` when it is open elsewhere; ``ConfigError`` when
    ``path`` is a file; ``StoreIOError`` or ``StoreFullError`` when the system refuses.
    """
    if engine is None or tables is None:
        if path is None:
            raise ConfigError("a new store needs an engine and tables")
        own = identities.read_identity(path)
        engine = own.engine if engine is None else engine
        tables = own.tables if tables is None else tables
    factory = get_engine(engine)
    wanted = StoreIdentity(engine, identities.plain(tables))
    options = StoreOptions(ssd_bytes, io, read_threads, keep, at, read_only)
    if read_only:
        return _open_read_only(Path(path or ""), wanted, options)
    doing = f"opening a store in {'a temporary directory' if path is None else os.fspath(path)}"
    with store_errors(doing), ExitStack() as undo:
        folder = _temporary(undo) if path is None else _make_folders(Path(path), undo)
        _recognise(folder, wanted)  # before there is a lock file, so that a foreign folder stays untouched
        lock = undo.enter_context(_lock(folder))
        found = _recognise(folder, wanted)
        os.pwrite(lock.fileno(), b"%-20d" % os.getpid(), 0)
        if found is None:
            undo.callback(_remove_new, folder, engine)
            identities.write_identity(folder, wanted)
        inner = factory(_engine_folder(folder, engine), wanted.tables, options)
        undo.callback(inner.close)
        if found not in (None, wanted):
            identities.write_identity(folder, wanted)
        undo.pop_all()
    return DirectoryStore(folder, inner, lock, wanted.tables, at, temporary=path is None)


def _open_read_only(folder: Path, wanted: StoreIdentity, options: StoreOptions) -> DirectoryStore:
    with store_errors(f"opening the store in {folder}"), ExitStack() as undo:
        lock = undo.enter_context(lock_for_reading(folder))
        identities.check(folder, identities.read_identity(folder), wanted)
        own = folder / wanted.engine
        check_no_links(own)
        inner = get_engine(wanted.engine)(own, wanted.tables, options)
        undo.pop_all()
    return DirectoryStore(folder, inner, lock, wanted.tables, options.at, temporary=False)


class DirectoryStore:
    """A row store together with the directory that it holds the lock of. A :class:`RowStore`."""

    def __init__(
        self,
        path: Path,
        inner: RowStore,
        lock: FileIO,
        tables: tuple[TableSpec, ...],
        at: int | str,
        temporary: bool,
    ) -> None:
        self.path = path
        self.tables = tables
        """Ordered by index."""
        self.inner = inner
        """The engine's own object."""
        self.engine = inner.engine
        self._lock = lock
        kept = inner.commits()
        self._commit = find_commit(kept, at, path) if at else (kept[-1] if kept else None)
        self._closing = threading.Lock()
        self._delete = weakref.finalize(self, _delete_temporary, path, os.getpid()) if temporary else None

    def read(self, keys: NDArray[np.uint64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        return self.inner.read(keys, out)

    def write(self, keys: NDArray[np.uint64], rows: NDArray[np.uint8]) -> None:
        self.inner.write(keys, rows)

    def keys(self, table: int) -> Iterator[NDArray[np.uint64]]:
        return self.inner.keys(table)

    def expect(self, table: int, rows: int) -> None:
        self.inner.expect(table, rows)

    def commit(self, meta: bytes = b"", tag: str | None = None) -> CommitId:
        number = self.inner.commit(meta, tag)
        self._commit = self.inner.commits()[-1]
        return number

    def commits(self) -> list[CommitInfo]:
        return self.inner.commits()

    def drop_commit(self, id: CommitId) -> None:
        self.inner.drop_commit(id)

    def compact(self) -> None:
        self.inner.compact()

    def set_cap(self, ssd_bytes: int) -> None:
        """Sets the cap on the bytes of all files; ``ConfigError`` by engines that must be opened anew for
        that."""
        change = getattr(self.inner, "set_cap", None)
        if change is None:
            raise ConfigError(f"a store of engine {self.engine!r} takes another cap only when it is opened")
        change(ssd_bytes)

    def meta(self) -> bytes:
        return self.inner.meta()

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def export(self, target: str | os.PathLike[str], progress: Progress | None = None) -> int:
        """Writes a portable copy of all rows as they are now to the new folder ``target``; returns how many.

        The meta and the tag with them are those of the commit that the store was opened at or made last, so
        commit first. :func:`tierstore.store.import_` reads the copy; for errors see
        :func:`tierstore.store.portable.export_rows`.
        """
        return export_rows(self, target, self._commit, progress)

    def close(self) -> None:
        with self._closing:
            if self._lock.closed:
                return
            try:
                self.inner.close()
            finally:
                self._lock.close()
                if self._delete:
                    self._delete()

    def __enter__(self) -> DirectoryStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _temporary(undo: ExitStack) -> Path:
    with suppress(OSError):
        _delete_left_behind(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    undo.callback(_delete_temporary, folder, os.getpid())
    return folder


def _delete_left_behind(parent: Path) -> None:
    """Deletes this user's temporary stores of processes that were killed."""
    for folder in parent.glob(f"{_TEMPORARY}*"):
        with suppress(OSError, ValueError, StoreCorruptError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with FileIO(open_regular(folder / _LOCK), "r") as lock:
                # Whoever makes a store writes its number when it has the lock; until then there is none.
                if not _is_running(int(os.pread(lock.fileno(), 20, 0))):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _delete_temporary(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not delete what its parent works with
        shutil.rmtree(folder, ignore_errors=True)


def _make_folders(folder: Path, undo: ExitStack) -> Path:
    """Creates ``folder`` and its parents where they are missing, durably."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"path {folder} is a file; give the path of a folder")
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        undo.callback(_remove_if_empty, new)
        sync_directory(new.parent)
    return folder


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _remove_new(folder: Path, engine: str) -> None:
    """Takes back the files of a store directory whose first opening failed."""
    shutil.rmtree(folder / engine, ignore_errors=True)
    for name in (identities.FILE_NAME, _LOCK):
        with suppress(OSError):
            (folder / name).unlink()


def check_no_links(folder: Path) -> None:
    """``StoreCorruptError`` when ``folder``, or anything in it, is a link, which engines would follow."""
    if folder.is_symlink():
        raise StoreCorruptError(f"{folder} is a symbolic link; a store does not follow links")
    for _ in walk_files(folder):
        pass


def _engine_folder(folder: Path, engine: str) -> Path:
    own = folder / engine
    if not own.is_symlink():
        own.mkdir(exist_ok=True)
    check_no_links(own)
    return own


def _recognise(folder: Path, wanted: StoreIdentity) -> StoreIdentity | None:
    """The identity that ``folder`` has, if it fits the one wanted; None when the folder is empty."""
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


def _lock(folder: Path) -> FileIO:
    """Takes the lock of ``folder``; closing the file releases it."""
    return _flock(folder, FileIO(open_regular(folder / _LOCK, os.O_RDWR | os.O_CREAT), "r+"), fcntl.LOCK_EX)


def lock_for_writing(folder: Path) -> FileIO:
    """Creates ``folder`` where it is missing and takes its lock, as the text of which it leaves this process.

    ``StoreLockedError`` when somebody has it, also in this process. Closing the file releases it, and so does
    the end of the process, whatever it has forked.
    """
    with store_errors(f"locking {folder}"), ExitStack() as undo:
        lock = undo.enter_context(_lock(_make_folders(folder, undo)))
        os.pwrite(lock.fileno(), b"%-20d" % os.getpid(), 0)
        undo.pop_all()
    _held_for_writing.add(lock)
    return lock


_held_for_writing: weakref.WeakSet[FileIO] = weakref.WeakSet()


def _give_up_locks_of_parent() -> None:
    for lock in list(_held_for_writing):
        lock.close()


os.register_at_fork(after_in_child=_give_up_locks_of_parent)


def lock_for_reading(folder: Path) -> FileIO:
    """Keeps others from writing to the store in ``folder``, without writing there; several may at a time.

    ``StoreLockedError`` when it is open for writing, ``StoreMismatchError`` when it is no store directory.
    """
    identities.read_identity(folder)  # says so where there is none
    try:
        fd = open_regular(folder / _LOCK)
    except FileNotFoundError:  # a copy without it, which nobody writes to
        fd = open_regular(folder / identities.FILE_NAME)
    return _flock(folder, FileIO(fd, "r"), fcntl.LOCK_SH)


def _flock(folder: Path, file: FileIO, kind: int) -> FileIO:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file.fileno(), 20, 0).decode("ascii", "replace").strip()
        file.close()
        if holder == str(os.getpid()):
            who = "another object of this process"
        else:
            who = f"process {holder}" if holder.isdigit() else "another process"
        raise StoreLockedError(f"{folder} is in use by {who}; close it there, or give another path") from None
    except BaseException:
        file.close()
        raise
    return file
