"""Store directories: identity, lock, temporary ones, and everything a path can be that is not a store."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.store_model import (
    CAP,
    TABLES,
    assert_holds,
    folder_contents,
    make_store,
    open_memory,
    plain_user,
    put,
    run_child,
    stored_ids,
)
from tierstore.errors import (
    ConfigError,
    StoreCorruptError,
    StoreFullError,
    StoreIOError,
    StoreLockedError,
    StoreMismatchError,
)
from tierstore.store import files, open_store, read_identity, register_engine, registry, verify
from tierstore.store.identity import write_identity


def test_new_directory_with_missing_parents(tmp_path):
    path = tmp_path / "a" / "b"
    make_store(path)
    assert sorted(os.listdir(path)) == ["LOCK", "TIERSTORE.json", "memory"]
    identity = read_identity(path)
    assert (identity.engine, identity.format) == ("memory", 1)
    assert identity.tables == TABLES
    with open_memory(path) as store:
        assert_holds(store, 1, range(10))


def test_foreign_directory_stays_as_it_is(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(
        StoreMismatchError, match=r"not a store directory and not empty \(it has holiday.jpg\)"
    ):
        open_memory(tmp_path)
    assert os.listdir(tmp_path) == ["holiday.jpg"]
    with pytest.raises(StoreMismatchError, match=r"has no TIERSTORE\.json"):
        read_identity(tmp_path)


def test_empty_directory_and_leftovers_of_a_crash_while_creating(tmp_path):
    (tmp_path / "LOCK").write_bytes(b"12345               ")
    (tmp_path / "TIERSTORE.json.tmp").write_bytes(b'{"for')
    (tmp_path / "lost+found").mkdir()
    make_store(tmp_path)
    open_memory(tmp_path).close()


def test_path_is_a_file_or_below_one(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with pytest.raises(ConfigError, match="is a file"):
        open_memory(file)
    with pytest.raises(StoreIOError, match="Not a directory"):
        open_memory(file / "below")


def test_a_path_that_is_not_utf8(tmp_path, engine):
    path = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(ConfigError, match=r"udcff.*not UTF-8"):
        open_store(path, engine, TABLES, CAP)
    assert not os.listdir(tmp_path)
    with open_store(tmp_path / "store", engine, TABLES, CAP) as store:
        store.commit()
    (tmp_path / "store").rename(path)
    for use in (open_store, verify):
        with pytest.raises(ConfigError, match="not UTF-8"):
            use(path)


def test_failed_creation_leaves_nothing(tmp_path, monkeypatch):
    def broken(path, tables, options):
        (path / "half").write_bytes(b"x")
        raise StoreIOError("no luck")

    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    monkeypatch.setattr(registry, "ENGINE_NAMES", list(registry.ENGINE_NAMES))
    register_engine("broken", broken)
    with pytest.raises(StoreIOError, match="no luck"):
        open_store(tmp_path / "a" / "b", "broken", TABLES, CAP)
    assert os.listdir(tmp_path) == []


def test_locked_by_this_process(tmp_path):
    store = open_memory(tmp_path)
    with pytest.raises(StoreLockedError, match="another object of this process"):
        open_memory(tmp_path)
    store.close()
    open_memory(tmp_path).close()


def test_locked_by_another_process(tmp_path):
    code = (
        "import sys; from tests.store.store_model import *; from tierstore.store import open_store\n"
        "store = open_store(sys.argv[1], 'memory', TABLES, CAP); print('open', flush=True); sys.stdin.read()"
    )
    child = run_child(code, tmp_path, stdin=subprocess.PIPE)
    with child:
        assert child.stdout.readline() == "open\n"
        with pytest.raises(StoreLockedError, match=f"in use by process {child.pid}; close it there"):
            open_memory(tmp_path)
        child.stdin.close()
    open_memory(tmp_path).close()


def test_locked_by_someone_unknown(tmp_path):
    make_store(tmp_path)
    with open(tmp_path / "LOCK", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreLockedError, match="another process"):
            open_memory(tmp_path)


def test_temporary_directory_is_deleted_on_close():
    store = open_memory(None)
    path = store.path
    put(store, 1, range(10))
    store.commit(b"")
    assert path.is_dir()
    store.close()
    assert not path.exists()


def test_temporary_directory_is_deleted_at_exit_but_not_by_a_forked_child(tmp_path):
    code = (
        "import os, sys; from tests.store.store_model import *; from tierstore.store import open_store\n"
        "store = open_store(None, 'memory', TABLES, CAP); print(store.path, flush=True)\n"
        "if os.fork() == 0: sys.exit(0)\n"
        "os.wait(); print(store.path.is_dir(), flush=True)"
    )
    child = run_child(code, tmp_path)
    out, _ = child.communicate(timeout=60)
    path, still_there = out.split()
    assert still_there == "True"
    assert not Path(path).exists()


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGKILL"])
def test_temporary_directories_of_killed_processes_are_deleted_by_the_next(
    tmp_path, monkeypatch, signal_name
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import time; from tests.store.store_model import *; from tierstore.store import open_store\n"
        "store = open_store(None, 'memory', TABLES, CAP); print(store.path, flush=True); time.sleep(60)"
    )
    others = [tmp_path / "tierstore-temporary-notes", tmp_path / "tierstore-mine"]
    others[0].mkdir()
    make_store(others[1])
    (others[1] / "LOCK").write_bytes(b"%-20d" % 2**30)  # of no process: a store that somebody has closed
    with run_child(code) as child:
        left = Path(child.stdout.readline().strip())
        with open_memory(None) as store:  # while it runs
            assert left.is_dir()
            child.send_signal(getattr(signal, signal_name))
            child.wait(60)
            assert left.is_dir()
            with open_memory(None):
                assert not left.exists()
                assert store.path.is_dir()
    assert sorted(tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("engine", ["native", "rocksdb", "lmdb", "memory"])
def test_a_forked_child_may_drop_a_store(tmp_path, engine):
    """As the workers of a torch DataLoader do when their garbage collector finds one."""
    code = (
        "import gc, os; from tests.store.store_model import *; from tierstore.store import open_store\n"
        f"store = open_store(None, {engine!r}, TABLES, CAP); put(store, 1, range(10)); store.commit(b'')\n"
        "child = os.fork()\n"
        "if child == 0: del store; gc.collect(); os._exit(0)\n"
        "print(os.waitpid(child, 0)[1]); put(store, 1, range(20)); store.commit(b''); store.close()"
    )
    child = run_child(code, tmp_path)
    out, _ = child.communicate(timeout=60)
    assert (out.split(), child.returncode) == (["0"], 0)


@pytest.fixture
def reachable():
    """A new directory that every user can reach, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def test_read_only_directory(reachable):
    path = reachable / "s"
    make_store(path)
    for name, mode in [("LOCK", 0o444), ("memory", 0o555), (".", 0o555)]:
        (path / name).chmod(mode)
    before = folder_contents(path)
    for target in (path, path / "new"):
        with (
            plain_user(),
            pytest.raises(StoreIOError, match="Permission denied; give a path that this user") as info,
        ):
            open_memory(target)
        assert info.value.errno == errno.EACCES
    assert folder_contents(path) == before


def test_read_only_file_system(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(StoreIOError, match="Read-only file system; give a path"):
        open_memory(tmp_path)


def test_full_disk_while_creating(tmp_path, monkeypatch):
    def refuse(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "write", refuse)
    with pytest.raises(StoreFullError, match="No space left on device; free some space"):
        open_memory(tmp_path / "s")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
    make_store(tmp_path / "s")


@pytest.mark.parametrize("name", ["TIERSTORE.json", "LOCK", "memory", "memory/commit-000000000001"])
def test_links_are_not_followed(tmp_path, name):
    path, elsewhere = tmp_path / "s", tmp_path / "elsewhere"
    make_store(path)
    (path / name).rename(elsewhere)
    (path / name).symlink_to(elsewhere)
    before = elsewhere.stat().st_mtime_ns
    with pytest.raises(StoreCorruptError, match=f"{name} is a symbolic link"):
        open_memory(path)
    assert elsewhere.stat().st_mtime_ns == before


def test_identity_that_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "TIERSTORE.json")
    with pytest.raises(StoreCorruptError, match="not a regular file"):
        open_memory(tmp_path)


def test_store_path_itself_may_be_a_link(tmp_path):
    make_store(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with open_memory(tmp_path / "link") as store:
        assert stored_ids(store, 1) == list(range(10))


def opened_twice(path: Path, engine: str) -> None:
    """Make a store of ten rows. The engine ``memory`` has files only after its first commit."""
    with open_store(path, engine, TABLES, CAP) as store:
        put(store, 1, range(10))
        store.commit()
    open_store(path, engine, TABLES, CAP).close()


@pytest.mark.parametrize("left", ["no folder", "an empty folder"])
def test_a_store_whose_files_are_gone_is_not_begun_anew(tmp_path, engine, left):
    opened_twice(tmp_path, engine)
    shutil.rmtree(tmp_path / engine)
    if left == "an empty folder":
        (tmp_path / engine).mkdir()
    what = "missing" if left == "no folder" else "empty"
    before = sorted(tmp_path.rglob("*"))
    for read_only in (False, True):
        with pytest.raises(
            StoreCorruptError, match=f"{engine} is {what}, which had the rows; restore a copy"
        ):
            open_store(tmp_path, engine, TABLES, CAP, read_only=read_only)
    report = verify(tmp_path)
    assert not report.ok
    assert [damage.lost for damage in report.damage] == [True]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("made", ["no folder", "an empty folder"])
def test_a_creation_that_was_cut_short_is_made_again(tmp_path, engine, made):
    opened_twice(tmp_path, engine)
    identity = read_identity(tmp_path)
    shutil.rmtree(tmp_path / engine)
    write_identity(tmp_path, replace(identity, opened=False))  # as it is before the engine's first opening
    if made == "an empty folder":
        (tmp_path / engine).mkdir()
    with open_store(tmp_path, engine, TABLES, CAP) as store:
        put(store, 1, range(10))
        store.commit()
    with open_store(tmp_path, engine, TABLES, CAP) as store:
        assert_holds(store, 1, range(10))
    assert read_identity(tmp_path) == identity


def test_an_older_store_is_known_to_have_files_once_it_is_opened_for_writing(tmp_path, engine):
    opened_twice(tmp_path, engine)
    identity = read_identity(tmp_path)
    assert identity.opened
    write_identity(tmp_path, replace(identity, opened=False))
    open_store(tmp_path, engine, TABLES, CAP, read_only=True).close()
    assert not read_identity(tmp_path).opened
    open_store(tmp_path, engine, TABLES, CAP).close()
    assert read_identity(tmp_path) == identity
