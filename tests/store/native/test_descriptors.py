"""Few descriptors: stores of many segments leave the process its own, and a lack of them passes."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.in_memory import tmp_path as in_memory  # noqa: F401  (a fixture)
from tests.store.store_model import CAP, TABLES, assert_holds, get, put, run_child
from tierstore import _core
from tierstore.errors import StoreIOError
from tierstore.store import verify
from tierstore.store.native import NativeConfig, NativeStore

PRELUDE = """
import os, resource, sys
from contextlib import suppress
from pathlib import Path
import numpy as np
from tests.store.store_model import *
from tierstore.errors import *
from tierstore.store.native import NativeConfig, NativeStore
path, io, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
path.mkdir(exist_ok=True)
config = NativeConfig(CAP, io=io, segment_bytes=128 << 10)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
def free():
    held = []
    with suppress(OSError):
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    for fd in held: os.close(fd)
    return len(held)
before = free()
"""


@pytest.fixture
def tmp_path(in_memory):  # noqa: F811
    """In memory: hundreds of segments are synced, one by one."""
    return in_memory


def output_of(code: str, *arguments: object) -> list[str]:
    with run_child(PRELUDE + code, *arguments, stderr=subprocess.PIPE) as child:
        out, err = child.communicate(timeout=300)
        assert child.returncode == 0, err
    return out.split()


@pytest.mark.parametrize("limit", [48, 256])
@pytest.mark.parametrize("io", ["uring", "pread"])
def test_hundreds_of_segments(tmp_path, io, limit):
    code = """
ids = np.arange(150_000)
with NativeStore(path, TABLES, config=config) as store:
    for start in range(0, len(ids), 10_000):  # many segments are written before a commit
        put(store, 1, ids[start:start + 10_000])
    assert store.counters()["segments"] > 300
    store.commit(b"1")
    print(before - free())
    random = np.random.default_rng(1)
    for version in range(1, 4):
        some = random.permutation(ids)[:20_000]
        found, rows = get(store, 1, some)
        assert found.all()
        put(store, 1, some, 0)
        store.commit(b"%d" % version)
    put(store, 1, ids, 7)
    store.commit(b"7")
    store.compact()
    store.commit(b"8")
    assert_holds(store, 1, ids, 7)
with NativeStore(path, TABLES, config=config) as store:
    assert_holds(store, 1, random.permutation(ids), 7)
print(before - free())
"""
    during, after = map(int, output_of(code, tmp_path / "store", io, limit))
    assert during <= limit // 4 + 16  # io_uring's own, the folder's
    assert after <= 1


@pytest.mark.parametrize("io", ["uring", "pread"])
def test_a_lack_of_descriptors_passes(tmp_path, io):
    """While the process has used up all, calls work or say EMFILE; then all goes on, commits included."""
    code = """
ids = np.arange(60_000)
random = np.random.default_rng(1)
store = NativeStore(path, TABLES, config=config)
put(store, 1, ids); store.commit(b"1")
outcomes = set()
def attempt(call):
    try:
        call()
        outcomes.add("done")
    except StoreIOError as error:
        outcomes.add(error.errno)
for round in range(3):
    held = []
    with suppress(OSError):
        while True: held.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(3):
        attempt(lambda: assert_holds(store, 1, random.permutation(ids)[:5000]))
        attempt(lambda: put(store, 1, ids[:30_000]))
        attempt(lambda: store.commit(b"in need"))
        attempt(lambda: store.compact())
        attempt(lambda: store.commits() and store.stats())
    for fd in held: os.close(fd)
    with suppress(StoreIOError):  # one that waits to be told
        put(store, 1, ids[:1])
    put(store, 1, ids, 0)
    store.commit(b"after")
    assert store.meta() == b"after"
    assert_holds(store, 1, random.permutation(ids), 0)
store.close()
with NativeStore(path, TABLES, config=config) as store:
    assert store.meta() == b"after"
    assert_holds(store, 1, ids, 0)
print(sorted(map(str, outcomes)))
"""
    out = " ".join(output_of(code, tmp_path / "store", io, 64))
    assert out in (f"['{errno.EMFILE}', 'done']", "['done']"), out


def test_the_limit_of_the_process_stays_as_it_was(tmp_path):
    code = """
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
with NativeStore(path, TABLES, config=config) as store:
    put(store, 1, range(60_000)); store.commit(b"1"); assert_holds(store, 1, range(60_000))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert output_of(code, tmp_path / "store", "auto", 48) == ["48", "48"]


@pytest.fixture
def few_descriptors():
    """Room for some forty more in this process, so that a store keeps a few open: a quarter of the limit, for
    which there is room beside the files that other tests have left open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(others + 40, 4 * (others + 10) // 3), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_neither_a_new_name_nor_a_new_working_directory_matters(tmp_path, few_descriptors, monkeypatch):
    config = NativeConfig(CAP, segment_bytes=128 << 10)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with NativeStore(Path("here"), TABLES, config=config) as store:
        put(store, 1, range(60_000))
        store.commit(b"1")
        monkeypatch.chdir("/")
        (tmp_path / "here").rename(tmp_path / "there")
        assert_holds(store, 1, np.random.default_rng(1).permutation(60_000))
        put(store, 1, range(60_000), 2)
        store.commit(b"2")
        assert_holds(store, 1, range(60_000), 2)
    assert not (tmp_path / "here").exists()
    with NativeStore(tmp_path / "there", TABLES, config=config) as store:
        assert store.meta() == b"2"
        assert_holds(store, 1, range(60_000), 2)


def test_segments_that_go_while_they_are_read(tmp_path, few_descriptors):
    """Compaction removes files that a slow read has yet to open."""
    config = NativeConfig(24 << 20, segment_bytes=128 << 10)
    ids = np.arange(20_000)
    errors = []
    with NativeStore(tmp_path, TABLES, config=config) as store:
        put(store, 1, ids)
        store.commit(b"")
        stop = threading.Event()

        def read() -> None:
            random = np.random.default_rng(1)
            while not stop.is_set():
                found, _ = get(store, 1, random.permutation(ids)[:15_000])
                if not found.all():
                    errors.append("absent")

        def guarded() -> None:
            try:
                read()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded) for _ in range(2)]
        try:
            for thread in threads:
                thread.start()
            for version in range(30):
                put(store, 1, np.random.default_rng(version).permutation(ids)[:5000], version)
                store.commit(b"")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert errors == []


def test_a_replaced_file_is_not_opened_in_its_place(tmp_path, few_descriptors):
    """Whoever puts another file where a segment was gets no rows of it, and no writes into it."""
    config = NativeConfig(CAP, segment_bytes=128 << 10)
    with NativeStore(tmp_path, TABLES, config=config) as store:
        put(store, 1, range(200_000))
        store.commit(b"")
        for file in tmp_path.glob("*.seg"):
            other = file.with_name("other")
            other.write_bytes(file.read_bytes())
            other.replace(file)
        with pytest.raises(StoreIOError, match="another file has taken its place"):
            get(store, 1, range(200_000))


def test_commits_go_on_after_a_sync_without_descriptors(tmp_path):
    memory = _core.MemoryEnv()
    env = _core.FaultEnv(memory)
    with NativeStore("disk", TABLES, config=NativeConfig(CAP), env=env) as store:
        put(store, 1, range(1000))
        env.fail("sync", 1, errno.EMFILE)
        with pytest.raises(StoreIOError):
            store.commit(b"1")
        put(store, 1, range(500), 1)
        env.fail("sync_directory", 1, errno.ENFILE)
        with pytest.raises(StoreIOError):
            store.commit(b"2")
        store.commit(b"3")
    after = memory.after_crash(memory.operations(), "lost")
    with NativeStore("disk", TABLES, config=NativeConfig(CAP), env=after) as store:
        assert store.meta() == b"3"
        assert_holds(store, 1, range(500), 1)
        assert_holds(store, 1, range(500, 1000))


@pytest.mark.parametrize("io", ["uring", "pread"])
def test_files_take_no_number_of_a_standard_stream(tmp_path, io):
    """What a process whose streams are closed prints in native code would be written into its store."""
    code = """
import os
from contextlib import suppress
for stream in range(3):
    os.close(stream)
from tests.store.store_model import *
from tierstore.store import open_store
with open_store(sys.argv[1], "native", TABLES, CAP, io=sys.argv[2]) as store:
    for version in range(3):
        put(store, 0, range(900), version)
        store.commit()
        for stream in range(3):
            with suppress(OSError):
                os.write(stream, b"a message of native code")
                os._exit(3)
"""
    child = [sys.executable, "-c", "import sys" + code, str(tmp_path / "store"), io]
    assert subprocess.run(child, check=False).returncode == 0
    assert verify(tmp_path / "store").ok
