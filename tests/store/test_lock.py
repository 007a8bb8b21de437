"""The lock of a store directory beside those who remove its file, and names that must be durable in order."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tests.store.store_model import CAP, TABLES, assert_holds, open_memory, put
from tierstore import _core
from tierstore.errors import StoreIOError, StoreLockedError
from tierstore.store import directory, lock
from tierstore.store.directory import open_store
from tierstore.store.native import NativeConfig, NativeStore


def test_the_file_is_removed_before_it_is_locked(tmp_path, monkeypatch):
    """Whoever takes back a new store removes its file: the one who waited must not lock what nobody finds."""
    flock, calls = fcntl.flock, []

    def removed_meanwhile(fd: int, kind: int) -> None:
        if not calls:
            (tmp_path / "LOCK").unlink()
        calls.append(fd)
        flock(fd, kind)

    monkeypatch.setattr(lock.fcntl, "flock", removed_meanwhile)
    with open_memory(tmp_path):
        assert len(calls) == 2
        with pytest.raises(StoreLockedError):
            open_memory(tmp_path)


def test_another_ones_file_is_not_removed(tmp_path):
    held = lock.lock_for_writing(tmp_path)
    (tmp_path / "LOCK").unlink()
    (tmp_path / "LOCK").write_text("another's")
    held.remove_file()
    assert (tmp_path / "LOCK").read_text() == "another's"
    held.close()
    assert held.closed
    with lock.lock_for_writing(tmp_path) as held:
        held.remove_file()
        assert not (tmp_path / "LOCK").exists()


def test_readers_are_not_taken_for_the_last_writer(tmp_path):
    """The number in the file is that of the last process that wrote, which may be this one, and closed."""
    open_store(tmp_path, "native", TABLES, CAP).close()
    with open_store(tmp_path, read_only=True):
        with pytest.raises(StoreLockedError, match="in use by a reader, in this process or another; close"):
            open_store(tmp_path, "native", TABLES, CAP)
        open_store(tmp_path, read_only=True).close()  # other readers are still welcome
    open_store(tmp_path, "native", TABLES, CAP).close()


def test_a_failed_first_opening_leaves_the_folder_to_others(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patched:
        patched.setattr(directory, "get_engine", lambda _name: fail)
        with pytest.raises(StoreIOError):
            open_memory(tmp_path)
    assert os.listdir(tmp_path) == []
    open_memory(tmp_path).close()


def test_the_engines_folder_is_durable_before_it_is_used(tmp_path, monkeypatch):
    done: list[tuple[str, str]] = []
    mkdir, sync, get_engine = Path.mkdir, directory.sync_directory, directory.get_engine

    def recorded_mkdir(self: Path, *args, **kwargs) -> None:
        done.append(("mkdir", self.name))
        mkdir(self, *args, **kwargs)

    def recorded_sync(path: Path) -> None:
        done.append(("sync", path.name))
        sync(path)

    def recorded_engine(name: str):
        make = get_engine(name)

        def opened(*args):
            done.append(("open", name))
            return make(*args)

        return opened

    monkeypatch.setattr(Path, "mkdir", recorded_mkdir)
    monkeypatch.setattr(directory, "sync_directory", recorded_sync)
    monkeypatch.setattr(directory, "get_engine", recorded_engine)
    for first in (True, False):  # also of a folder that somebody made and did not get to sync
        done.clear()
        open_store(tmp_path / "store", "native", TABLES, CAP).close()
        assert done.index(("mkdir", "native")) < done.index(
            ("sync", "store"), done.index(("mkdir", "native"))
        )
        opened = done.index(("open", "native"))
        assert done[opened - 2 : opened] == [("mkdir", "native"), ("sync", "store")]
        # what says that there are files must not outlive the files
        assert done[opened + 1 :] == ([("sync", "native")] if first else [])


@pytest.mark.parametrize("unsynced", ["lost", "kept", "random"])
def test_segments_go_only_when_the_manifest_that_drops_them_is_durable(unsynced):
    """A process dies between rename and sync of the manifest; the next one opens; then power fails."""
    memory = _core.MemoryEnv()
    env = _core.FaultEnv(memory)
    config = NativeConfig(CAP, segment_bytes=128 << 10)

    def opened(where: _core.Env) -> NativeStore:
        return NativeStore(Path("disk"), TABLES, config=config, env=where)

    store = opened(env)
    put(store, 1, range(3000))
    store.commit(b"1")
    put(store, 1, range(3000), 2)
    env.fail("sync_directory", 2, errno.EIO)  # the first is of the new segments' names
    with pytest.raises(StoreIOError):
        store.commit(b"2")
    store.close()
    begun = memory.operations()
    opened(memory).close()
    for operations in range(begun, memory.operations() + 1):
        for seed in range(20 if unsynced == "random" else 1):
            after = memory.after_crash(operations, unsynced, seed)
            with opened(after) as found:
                assert found.meta() in (b"1", b"2")
                assert_holds(found, 1, range(3000), 0 if found.meta() == b"1" else 2)
