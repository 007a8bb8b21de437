"""The lock of a store directory: flock on its file ``LOCK``, whose text is the holder's process id.

A forked child does not inherit the lock, which ends with the process that took it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tierstore import _core
from tierstore.errors import StoreLockedError
from tierstore.store import identity as identities
from tierstore.store.files import open_own

LOCK = "LOCK"


class FolderLock:
    """A lock that is held until :meth:`close`, or the end of the process."""

    def __init__(self, path: Path, descriptor: _core.OwnDescriptor) -> None:
        self._path = path
        self._descriptor = descriptor

    @property
    def closed(self) -> bool:
        return self._descriptor.fileno() < 0

    def close(self) -> None:
        self._descriptor.close()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def sign(self) -> None:
        """Write this process's number into the file, which errors of other processes name."""
        os.pwrite(self._descriptor.fileno(), b"%-20d" % os.getpid(), 0)

    def remove_file(self) -> None:
        """Remove the file, unless another file has taken its place."""
        with suppress(OSError):
            if self.is_current():
                self._path.unlink()

    def is_current(self) -> bool:
        """Tell whether the locked file is the file that other processes find."""
        try:
            return os.path.samestat(os.fstat(self._descriptor.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return False


class FolderLocks:
    """The locks of all folders of a store, released together."""

    def __init__(self, locks: Sequence[FolderLock]) -> None:
        self._locks = locks

    @property
    def closed(self) -> bool:
        return self._locks[0].closed

    def close(self) -> None:
        for lock in reversed(self._locks):
            lock.close()


def lock_for_writing(folder: Path) -> FolderLock:
    """Take the exclusive lock of ``folder``. Raises ``StoreLockedError`` when another object has it."""
    return _take(folder, folder / LOCK, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)


@contextmanager
def lock_for_making(folder: Path, file: Path) -> Iterator[None]:
    """Hold the exclusive lock of a ``folder`` that is not there yet, by ``file``, which goes at the end.

    Raises ``StoreLockedError`` when another object has it.
    """
    with _take(folder, file, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX) as lock:
        try:
            lock.sign()
            yield
        finally:
            lock.remove_file()


def lock_for_reading(folder: Path) -> FolderLock:
    """Take the shared lock of the store in ``folder``, which keeps writers out, without writing there.

    Raises ``StoreLockedError`` when the store is open for writing, and ``StoreMismatchError`` when
    ``folder`` is no store directory.
    """
    identities.read_identity(folder)  # raises where there is no store
    return share_lock(folder, identities.FILE_NAME)


def share_lock(folder: Path, otherwise: str) -> FolderLock:
    """Take the shared lock of ``folder``, by the file ``otherwise`` in a copy without the lock's file, to
    which no process writes."""
    try:
        return _take(folder, folder / LOCK, os.O_RDONLY, fcntl.LOCK_SH)
    except FileNotFoundError:
        return _take(folder, folder / otherwise, os.O_RDONLY, fcntl.LOCK_SH)


def _take(folder: Path, path: Path, flags: int, kind: int) -> FolderLock:
    while True:
        lock = FolderLock(path, descriptor := open_own(path, flags))
        try:
            fcntl.flock(descriptor.fileno(), kind | fcntl.LOCK_NB)
            if lock.is_current():
                return lock
        except BlockingIOError:
            who = _holder(descriptor.fileno())
            lock.close()
            message = f"{folder} is in use by {who}, or give another path"
            raise StoreLockedError(message) from None
        except BaseException:
            lock.close()
            raise
        lock.close()  # the holder has removed the file meanwhile: there is a new file, or will be


def _holder(fd: int) -> str:
    """Say who has the lock of the file ``fd``, which this process could not take, and what to do."""
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # The number in the file is that of a writer before, since readers cannot write theirs.
        return "a reader, in this process or another; close it there"
    holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
    if holder == str(os.getpid()):
        return "another object of this process; call its close() first"
    return f"{f'process {holder}' if holder.isdigit() else 'another process'}; close it there"
