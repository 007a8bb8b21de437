"""Processes that fork with stores open: as the workers of a DataLoader do, and as nobody should."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest

from tests.store.store_model import CAP, TABLES, assert_holds, get, put, run_child, stored_ids
from tierstore.errors import ClosedError, StoreLockedError
from tierstore.store import engine_names, open_store

PRELUDE = """
import ctypes, gc, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
from tests.store.store_model import *
from tierstore.errors import *
from tierstore.store import open_store
path, engine = sys.argv[1], sys.argv[2]
"""

EVERY_CALL = """
def every_call(store):
    rows = np.zeros((5, 272), np.uint8)
    keys = np.arange(5, dtype=np.uint64) + (np.uint64(1) << np.uint64(48))
    return {
        "read": lambda: store.read(keys, rows), "write": lambda: store.write(keys, rows),
        "keys": lambda: list(store.keys(1)), "reserve": lambda: store.reserve(1, 5), "commit": store.commit,
        "commits": store.commits, "drop_commit": lambda: store.drop_commit(1), "compact": store.compact,
        "scan": lambda: list(store.scan()), "count": lambda: store.count(1),
        "meta": store.meta, "stats": store.stats, "export": lambda: store.export(path + "-copy"),
    }
def outcomes(store):
    out = set()
    for name, call in every_call(store).items():
        try:
            call()
        except ClosedError as error:
            out.add("before this process was forked" in str(error))
        else:
            out.add(name)
    return out
"""


def output_of(code: str, *arguments: object, timeout: float = 120) -> list[str]:
    with run_child(code, *arguments, stderr=subprocess.PIPE) as child:
        out, err = child.communicate(timeout=timeout)
        assert child.returncode == 0, err
    return out.split()


@pytest.mark.parametrize("engine", ["native", "rocksdb", "lmdb", "memory"])
def test_every_use_in_a_child_is_one_error_and_its_exit_harms_nothing(tmp_path, engine):
    code = (
        PRELUDE
        + EVERY_CALL
        + """
# As multiprocessing's workers end: RocksDB's own static objects do not survive exit() in a child.
end = os._exit if engine == "rocksdb" else sys.exit
store = open_store(path, engine, TABLES, CAP)
put(store, 1, range(5000)); store.commit(b"")
listing = store.keys(1); next(listing)
put(store, 1, range(5000, 30000))
scan = store.scan(); next(scan)
if os.fork() == 0:
    found = outcomes(store)
    for name, begun in (("listing", listing), ("scan", scan)):
        try:
            list(begun)
        except ClosedError:
            found.add(name)
    store.close()
    del store, listing, scan, begun
    gc.collect()
    end(0 if found == {True, "listing", "scan"} else 1)
print(os.wait()[1])
assert 0 < sum(len(keys) for keys, _ in scan) < 30000
assert_holds(store, 1, range(5000))
put(store, 1, range(100), 2)
store.commit(b"later")
if os.fork() == 0:
    end(0)
print(os.wait()[1])
store.close()
with open_store(path) as store:
    assert store.meta() == b"later"
    assert_holds(store, 1, range(100), 2)
if os.fork() == 0:  # after close
    store.close()
    end(0)
print(os.wait()[1])
"""
    )
    assert output_of(code, tmp_path / "store", engine) == ["0", "0", "0"]


OPEN_STATES = {
    "open": "",
    "written": "put(store, 1, range(2000, 90000))",
    "listing": "listing = store.keys(1); next(listing)",
    "scanning": "busy(lambda: list(store.scan()))",
    "reading": "busy(lambda: get(store, 1, range(50000)))",
    "writing": "busy(lambda: put(store, 1, range(50000)))",
    "committing": "busy(lambda: store.commit(b''))",
}


# Each child tells by a session of its own that the store's handlers of forks have run in it.
FORKS = {
    "by Python": """
child = os.fork()
if child == 0:
    os.setsid()
    while True:
        signal.pause()
""",
    # Handlers run in the order of their registration, and this child never leaves the last. The child runs no
    # Python: where another thread waits for the GIL, Python would offer it for ever to a thread not forked.
    "past Python": """
libc = ctypes.PyDLL(None)
for handler in ("setsid", "pause"):
    libc["__register_atfork"](None, None, ctypes.cast(libc[handler], ctypes.c_void_p), None)
child = libc.fork()
""",
}


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("state", OPEN_STATES)
def test_the_lock_ends_with_its_owner_whatever_children_live(tmp_path, state, fork):
    """Also where the child was forked past Python, or holds its copies and waits."""
    code = (
        PRELUDE
        + f"""
def busy(call):
    started = threading.Event()
    def loop():
        while True:
            call(); started.set()
    threading.Thread(target=loop, daemon=True).start()
    started.wait()
store = open_store(path, engine, TABLES, CAP)
put(store, 1, range(2000)); store.commit(b"kept")
{OPEN_STATES[state]}
{FORKS[fork]}
while os.getsid(child) != child:
    time.sleep(.01)
print(child, flush=True)
time.sleep(600)
"""
    )
    with run_child(code, tmp_path / "store", "native") as owner:
        child = int(owner.stdout.readline())
        try:
            with pytest.raises(StoreLockedError):
                open_store(tmp_path / "store")
            owner.kill()
            owner.wait(60)
            os.kill(child, 0)  # it lives
            with open_store(tmp_path / "store") as store:
                assert_holds(store, 1, range(2000))
            links = [os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")]
            assert [link for link in links if str(tmp_path) in link or "io_uring" in link] == []
        finally:
            os.kill(child, signal.SIGKILL)


def test_children_do_not_hold_deleted_segments(tmp_path):
    code = (
        PRELUDE
        + """
store = open_store(path, engine, TABLES, 16 << 20)
put(store, 1, range(10000)); store.commit(b"")
ready, wait = os.pipe()
if os.fork() == 0:
    os.close(wait)
    os.read(ready, 1)
    os._exit(0)
os.close(ready)
free = lambda: os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
for version in range(30):
    put(store, 1, range(10000), version); store.commit(b"")
for process in [p for p in os.listdir("/proc") if p.isdigit()]:
    try:
        links = [os.readlink(f"/proc/{process}/fd/{fd}") for fd in os.listdir(f"/proc/{process}/fd")]
    except OSError:
        continue
    if int(process) != os.getpid():
        assert not any(path in link for link in links), links
store.close()
os.close(wait)
print(os.wait()[1])
"""
    )
    assert output_of(code, tmp_path / "store", "native") == ["0"]


def test_children_get_no_copy_of_large_memory(tmp_path):
    """What the store's index and buffers take is marked so that a fork leaves it out."""
    with open_store(tmp_path / "store", "native", TABLES, CAP, index="hash") as store:
        put(store, 1, range(400_000))
        left_out, size = 0, 0
        with open("/proc/self/smaps") as maps:
            for line in maps:
                if line.startswith("Rss:"):
                    size = int(line.split()[1]) << 10
                elif line.startswith("VmFlags:") and "dc" in line.split():
                    left_out += size
        counters = store.inner.counters()
        assert counters["index_bytes"] > 4_000_000
        assert left_out >= counters["index_bytes"]


def test_forks_while_calls_are_under_way(tmp_path):
    """Whatever mutex another thread holds at a fork, the child can open a store of its own, and ends."""
    code = (
        PRELUDE
        + EVERY_CALL
        + """
store = open_store(path, engine, TABLES, CAP)
put(store, 1, range(20000)); store.commit(b"")
stop = threading.Event()
def loop(call):
    while not stop.is_set():
        call()
calls = [lambda: get(store, 1, range(20000)), lambda: put(store, 1, range(5000)), store.stats,
         lambda: store.commit(b""), lambda: open_store(None, engine, TABLES, CAP).close()]
threads = [threading.Thread(target=loop, args=(call,)) for call in calls]
for thread in threads: thread.start()
children = []
for i in range(40):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang ends the child
        if outcomes(store) != {True}: os._exit(1)
        with open_store(f"{path}-{i}", engine, TABLES, CAP) as own:
            put(own, 1, range(500)); own.commit(b""); assert_holds(own, 1, range(500))
        os._exit(0)
    children.append(child)
codes = {os.waitpid(child, 0)[1] for child in children}
stop.set()
for thread in threads: thread.join()
assert_holds(store, 1, range(20000))
store.commit(b""); store.close()
print(codes)
"""
    )
    assert output_of(code, tmp_path / "store", "native", timeout=300) == ["{0}"]


def test_a_handler_that_forks_within_a_call(tmp_path):
    """The child comes out of the call with an error; the parent's call goes on."""
    code = (
        PRELUDE
        + """
from tierstore import _core
from tierstore.store.native import NativeConfig, NativeStore
os.mkdir(path)
env = _core.FaultEnv(_core.posix_env(path))
with NativeStore(Path(path), TABLES, config=NativeConfig(CAP)) as store:
    put(store, 1, range(6000)); store.commit(b"")
store = NativeStore(Path(path), TABLES, config=NativeConfig(CAP), env=env)
children = []
def handler(*_):
    if not children: children.append(os.fork())
signal.signal(signal.SIGALRM, handler)
env.slow_down(0.05)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    assert_holds(store, 1, range(0, 6000))
    out = "read"
except ClosedError as error:
    out = "forked" if "forked" in str(error) else str(error)
if children[0] == 0:
    os._exit(7 if out == "forked" else 1)
print(out, os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
"""
    )
    assert output_of(code, tmp_path / "store", "native") == ["read", "7"]


def test_an_opening_that_fails_in_a_child_leaves_the_parents_folder(tmp_path):
    """A handler forks while a store is being opened: what the child undoes is not its own."""
    code = (
        PRELUDE
        + """
import signal
from tierstore.store import directory
with open_store(path, engine, TABLES, CAP) as store:
    put(store, 1, range(100)); store.commit(b"")
make = directory.get_engine(engine)
def forking(*arguments):
    child = os.fork()
    if child == 0:
        raise ClosedError("forked")
    os.waitpid(child, 0)
    return make(*arguments)
directory.get_engine = lambda name: forking
for where in (path, path + "-new", None):
    try:
        store = open_store(where, engine, TABLES, CAP)
    except ClosedError:
        os._exit(0)
    put(store, 1, range(10)); store.commit(b"")
    folder = store.path
    print(len(os.listdir(folder)), flush=True)
    store.close()
"""
    )
    assert output_of(code, tmp_path / "store", "native") == ["3", "3", "3"]


@pytest.mark.parametrize("engine", engine_names())
def test_a_store_is_not_sent_to_another_process(tmp_path, engine):
    import pickle

    with open_store(tmp_path / "store", engine, TABLES, CAP) as store, pytest.raises(TypeError):
        pickle.dumps(store)


def test_a_listing_keeps_the_lock(tmp_path):
    """The engine lives as long as its iterator does, so the folder must not be free before."""
    store = open_store(tmp_path / "store", "native", TABLES, CAP)
    put(store, 1, range(200_000))
    store.commit(b"")
    chunks = store.keys(1)
    next(chunks)
    del store
    with pytest.raises(StoreLockedError):
        open_store(tmp_path / "store")
    assert sum(map(len, chunks)) > 0
    del chunks
    with open_store(tmp_path / "store") as store:
        assert len(stored_ids(store, 1)) == 200_000


def test_a_store_that_is_dropped_ends_before_its_lock(tmp_path):
    store = open_store(tmp_path / "store", "native", TABLES, CAP)
    put(store, 1, range(100))
    store.commit(b"")
    inner, chunks = store.inner, store.keys(1)
    del store, chunks
    with open_store(tmp_path / "store") as again:
        with pytest.raises(ClosedError):
            inner.stats()
        assert get(again, 1, range(100))[0].all()


def test_children_of_other_threads_can_use_their_own_stores(tmp_path):
    """No thread of the parent may hold what a child needs, here while stores open and close."""
    stop = threading.Event()

    def open_and_close() -> None:
        while not stop.is_set():
            open_store(None, "native", TABLES, CAP).close()

    threads = [threading.Thread(target=open_and_close) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                open_store(None, "native", TABLES, CAP).close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
