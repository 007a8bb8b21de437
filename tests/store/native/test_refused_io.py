"""Kernels, containers and file systems that refuse io_uring or direct IO, at once or later."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import tierstore
from tests.store.store_model import CAP, TABLES, assert_holds, get, put, run_child
from tierstore.errors import ConfigError
from tierstore.store import open_store
from tierstore.store.native import NativeConfig, NativeStore

PRELUDE = """
import ctypes, errno, os, struct, sys
from pathlib import Path
import numpy as np
from tests.store.store_model import *
from tierstore.errors import *
from tierstore.store import open_store
from tierstore.store.native import NativeConfig, NativeStore
path = Path(sys.argv[1])

def forbid(*calls, error=errno.EPERM):
    # A filter of this thread and of those that it starts: load the number, compare, refuse or allow.
    program = [(0x20, 0, 0, 0)]
    for i, call in enumerate(calls):
        program.append((0x15, len(calls) - 1 - i + 1, 0, call))
    program += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    chain = Program(len(program), ctypes.addressof(code))
    assert libc.prctl(22, 2, ctypes.byref(chain), 0, 0) == 0, os.strerror(ctypes.get_errno())
SETUP, ENTER, REGISTER = 425, 426, 427
"""


def output_of(code: str, *arguments: object) -> list[str]:
    with run_child(PRELUDE + code, *arguments, stderr=subprocess.PIPE) as child:
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
    return out.split()


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS", "EACCES"])
def test_io_uring_is_forbidden_from_the_start(tmp_path, error):
    code = f"""
forbid(SETUP, ENTER, REGISTER, error=errno.{error})
with open_store(path, "native", TABLES, CAP) as store:
    put(store, 1, range(20_000)); store.commit(b""); assert_holds(store, 1, range(20_000))
    print(store.stats().io)
try:
    open_store(path, io="uring")
except StoreIOError as refused:
    print(refused.errno == errno.{error}, "io='pread'" in str(refused))
with open_store(path, io="pread") as store:  # the lock was given back
    assert_holds(store, 1, range(20_000))
"""
    assert output_of(code, tmp_path / "store") == ["pread", "True", "True"]


def test_io_uring_is_forbidden_when_the_ring_is_there(tmp_path):
    """Reads of few rows happen on the calling thread, those of many in one that it starts."""
    code = """
with open_store(path, "native", TABLES, CAP) as store:
    put(store, 1, range(50_000)); store.commit(b"")
store = open_store(path)
assert_holds(store, 1, range(50_000))
print(store.stats().io)
forbid(SETUP, ENTER, REGISTER)
assert_holds(store, 1, range(0, 50_000, 50))
assert_holds(store, 1, range(50_000))
print(store.stats().io)
put(store, 1, range(500), 2); store.commit(b"2"); store.close()
store = open_store(path)
assert_holds(store, 1, range(500), 2); assert store.meta() == b"2"
"""
    assert output_of(code, tmp_path / "store") == ["uring", "pread"]


def test_asked_for_io_uring_and_refused_later(tmp_path):
    code = """
with open_store(path, "native", TABLES, CAP) as store:
    put(store, 1, range(50_000)); store.commit(b"")
store = open_store(path, io="uring")
assert_holds(store, 1, range(50_000))
forbid(ENTER)
for _ in range(2):
    try:
        get(store, 1, range(50_000))
    except StoreIOError as refused:
        print(refused.errno == errno.EPERM, "io='pread'" in str(refused))
put(store, 1, range(500), 2); store.commit(b"2"); store.close()
with open_store(path, io="pread") as store:
    assert_holds(store, 1, range(500), 2)
"""
    assert output_of(code, tmp_path / "store") == ["True"] * 4


@pytest.fixture(scope="module")
def strict_alignment(tmp_path_factory):
    library = tmp_path_factory.mktemp("preloaded") / "strict_alignment.so"
    source = Path(__file__).with_name("strict_alignment.c")
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize(("io", "refused"), [("uring", "all"), ("uring", "ring"), ("pread", "all")])
def test_direct_io_is_refused_when_it_is_made(tmp_path, monkeypatch, strict_alignment, io, refused):
    """The file goes through the page cache from then on."""
    monkeypatch.setenv("LD_PRELOAD", str(strict_alignment))
    monkeypatch.setenv("STRICT_ALIGNMENT", refused)
    code = f"""
path.mkdir()
config = NativeConfig(64 << 20, io="{io}", segment_bytes=1 << 20)
with NativeStore(path, TABLES, config=config) as store:
    put(store, 1, range(50_000)); put(store, 0, range(1000)); store.commit(b"1")
    assert_holds(store, 1, range(50_000))
    for version in range(5):
        put(store, 1, range(version * 100, 40_000), version); store.commit(b"")
    store.compact()
    assert store.stats().io == "{io}"
with NativeStore(path, TABLES, config=config) as store:
    order = np.random.default_rng(1).permutation(np.arange(400, 40_000))
    assert_holds(store, 1, order, 4)
    assert_holds(store, 1, order[:1000], 4)
    print(store.counters()["direct"])
"""
    assert output_of(code, tmp_path / "store") == ["False"]


@pytest.mark.parametrize("io", ["auto", "uring", "pread"])
def test_in_shared_memory(io):
    """tmpfs, which takes or refuses O_DIRECT depending on the kernel."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with open_store(Path(folder) / "store", "native", TABLES, CAP, io=io) as store:
            put(store, 1, range(50_000))
            store.commit(b"")
            assert_holds(store, 1, range(50_000))
        with open_store(Path(folder) / "store", io=io) as store:
            assert_holds(store, 1, range(50_000))


@pytest.mark.parametrize("kind", ["overlay", "ramfs"])
def test_on_other_file_systems(tmp_path, kind):
    """overlayfs, and ramfs, which refuses O_DIRECT when a file is opened. Only root may mount them."""
    target = tmp_path / "mounted"
    options = []
    for name in ("mounted", "lower", "upper", "work"):
        (tmp_path / name).mkdir()
    if kind == "overlay":
        folders = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
        options = ["-o", folders]
        with NativeStore(tmp_path / "lower", TABLES, config=NativeConfig(CAP)) as store:
            put(store, 1, range(10_000))
            store.commit(b"below")
    mounted = subprocess.run(["mount", "-t", kind, *options, "none", target], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount {kind} here: {mounted.stderr.strip()}")
    try:
        for io in ("auto", "pread"):
            with NativeStore(target, TABLES, config=NativeConfig(CAP, io=io)) as store:
                if kind == "overlay":
                    assert get(store, 1, range(10_000))[0].all()
                put(store, 1, range(30_000), 2)
                store.commit(b"above")
                assert store.counters()["direct"] == (kind == "overlay")
            with NativeStore(target, TABLES, config=NativeConfig(CAP, io=io)) as store:
                assert_holds(store, 1, range(30_000), 2)
                assert store.meta() == b"above"
    finally:
        subprocess.run(["umount", target], check=True)
    if kind == "overlay":
        with NativeStore(tmp_path / "lower", TABLES, config=NativeConfig(CAP)) as store:
            assert store.meta() == b"below"


@pytest.mark.parametrize("io", ["uring", "pread"])
def test_the_tiers_configuration_chooses(tmp_path, io):
    """The statistics of the store have the configuration's word."""
    config = tierstore.TierConfig(hbm="64KiB", path=tmp_path / "t", ssd="64MiB", io=io)
    table = tierstore.TieredEmbedding(10_000, 8, config=config)
    try:
        assert table.engine.store.stats().io == io
    finally:
        table.close()


@pytest.mark.parametrize("io", ["io_uring", "URING", "", None, 3, "mmap"])
def test_unknown_names(io):
    with pytest.raises(ConfigError, match=r"io is .*; it must be one of 'auto', 'uring', 'pread'"):
        tierstore.TierConfig(io=io)
    with pytest.raises(ConfigError, match=r"io is .*; it must be 'auto', 'uring' or 'pread'"):
        NativeConfig(CAP, io=io)
