"""Temporary folders of stores, deleted on close or when a later process finds them left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from tierstore import _core
from tierstore.errors import StoreCorruptError
from tierstore.store.files import open_own
from tierstore.store.lock import LOCK

_PREFIX = "tierstore-temporary-"


def temporary_folder(undo: ExitStack) -> Path:
    """Make a folder, which ``undo`` deletes; delete the folders of processes that were killed."""
    with suppress(OSError):
        _delete_left_behind(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    undo.callback(_delete, folder, _core.fork_count())
    return folder


def _delete_left_behind(parent: Path) -> None:
    """Delete this user's temporary stores of processes that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
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


def _delete(folder: Path, forks: int) -> None:
    if _core.fork_count() == forks:  # a forked child must not delete what its parent works with
        shutil.rmtree(folder, ignore_errors=True)
