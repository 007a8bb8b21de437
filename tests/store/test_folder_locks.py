"""Locks of folders that sharded commits hold: one holder at a time, and none once it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tierstore import StoreLockedError
from tierstore.store.directory import lock_folder

HOLDER = """
import os, sys
from pathlib import Path
from tierstore.store.directory import lock_folder
lock = lock_folder(Path(sys.argv[1]))
if sys.argv[2] == "fork" and os.fork() == 0:
    print("worker", os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
if sys.argv[2] == "alone":
    print("worker 0", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_the_lock_of_a_killed_process_is_free(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "new" / "one"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    worker = int(holder.stdout.readline().split()[1])
    try:
        with pytest.raises(StoreLockedError, match=f"is in use by process {holder.pid}; close it there"):
            lock_folder(folder)
        holder.kill()
        holder.wait()
        if worker:
            os.kill(worker, 0)  # lives on, and has not the lock
        lock = lock_folder(folder)
        with pytest.raises(StoreLockedError, match="another object of this process"):
            lock_folder(folder)
        lock.close()
        lock_folder(folder).close()
    finally:
        holder.kill()
        if worker:
            os.kill(worker, signal.SIGKILL)
        holder.communicate()
