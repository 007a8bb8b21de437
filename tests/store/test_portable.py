"""Export and import: bit for bit, from any engine to any, whole or not at all."""

from __future__ import annotations

import base64
import errno
import fcntl
import itertools
import json
import os
import resource
import shutil
import signal
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.store.exported_stores import contents, export, fill
from tests.store.store_model import (
    CAP,
    TABLES,
    assert_holds,
    folder_contents,
    make_rows,
    put,
    run_child,
    stored_ids,
)
from tierstore.errors import (
    ConfigError,
    InputError,
    StoreFullError,
    StoreIOError,
    StoreLockedError,
)
from tierstore.keys import make_keys
from tierstore.store import StoredTable, engine_names, import_, open_store, portable
from tierstore.store.portable import export_rows, read_description
from tierstore.store.shards import ShardLayout, read_shard


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """An export by the native engine."""
    folder = tmp_path_factory.mktemp("exports")
    fill(folder / "store", "native")
    export(folder / "store", folder / "export")
    return folder / "export"


@pytest.mark.parametrize("to", engine_names())
def test_bit_for_bit_from_any_engine_to_any(tmp_path, engine, to):
    fill(tmp_path / "store", engine)
    before = folder_contents(tmp_path / "store")
    assert export(tmp_path / "store", tmp_path / "export") == 450 + 702 + 5
    assert folder_contents(tmp_path / "store") == before
    number = import_(tmp_path / "export", tmp_path / "again", to)
    assert contents(tmp_path / "again") == contents(tmp_path / "store")
    with open_store(tmp_path / "again", read_only=True) as store:
        assert store.engine == to
        assert [(c.id, c.tag) for c in store.commits()] == [(number, "best")]
    assert sorted(os.listdir(tmp_path)) == ["again", "export", "store"]


@pytest.mark.parametrize(
    ("dtypes", "tensors", "size"),
    [
        (("bf16", "fp32"), {"weights": ("BF16", 3), "state": ("F32", 2)}, 16),
        (("fp16", "bf16"), {"weights": ("F16", 3), "state": ("BF16", 4)}, 16),
        (("int8", "bf16"), {"weights": ("U8", 3), "quantisation": ("F32", 2), "state": ("BF16", 2)}, 16),
        (("fp32", "bf16"), {"weights": ("F32", 3), "state": ("BF16", 2)}, 16),
    ],
)
def test_rows_of_other_dtypes(tmp_path, dtypes, tensors, size):
    table = StoredTable("t", 0, 1000, 3, size, {}, 0, {}, *dtypes)
    data = np.random.default_rng(0).integers(0, 256, (500, size), np.uint8)
    data[:, 3 if dtypes[0] == "int8" else 6 : 4 if dtypes[0] == "int8" else 8] = 0  # between the parts
    if dtypes[0] == "fp32":
        data = np.random.default_rng(0).integers(0, 256, (500, size), np.uint8)
    with open_store(tmp_path / "store", "native", [table], CAP) as store:
        store.write(make_keys(0, np.arange(500)), data)
        store.commit(b"")
    export(tmp_path / "store", tmp_path / "export")
    described = json.loads((tmp_path / "export" / "EXPORT.json").read_text())
    assert described["format"] == 2
    (file,) = (tmp_path / "export").glob("*.safetensors")
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    found = {name: (part["dtype"], part["shape"][1]) for name, part in header.items() if name in tensors}
    assert found == tensors
    assert header.keys() == {"__metadata__", "ids", *tensors}
    import_(tmp_path / "export", tmp_path / "again", "memory")
    assert contents(tmp_path / "again") == contents(tmp_path / "store")


def test_an_older_commit(tmp_path, engine):
    fill(tmp_path / "store", engine)
    export(tmp_path / "store", tmp_path / "export", at=1)
    import_(tmp_path / "export", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "store", at=1)


def test_an_open_store_exports_itself(tmp_path, engine):
    with open_store(tmp_path / "store", engine, TABLES, CAP) as store:
        assert store.export(tmp_path / "empty") == 0
        put(store, 1, range(10))
        store.commit(b"here")
        with pytest.raises(StoreLockedError):
            open_store(tmp_path / "store", read_only=True)
        seen = []
        assert store.export(tmp_path / "export", lambda done, total: seen.append((done, total))) == 10
        assert seen == [(10, 10)]
    import_(tmp_path / "export", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "store")
    import_(tmp_path / "empty", tmp_path / "nothing")
    assert stored_ids(open_store(tmp_path / "nothing", read_only=True), 1) == []


def test_many_files_and_batches(tmp_path):
    fill(tmp_path / "store", "native")
    with open_store(tmp_path / "store", read_only=True) as store:
        export_rows(store, tmp_path / "export", store.commits()[-1], None, shard_bytes=50_000)
    assert len(list((tmp_path / "export").glob("00001-*.safetensors"))) == 4
    import_(tmp_path / "export", tmp_path / "again", "memory")
    assert contents(tmp_path / "again") == contents(tmp_path / "store")


# Rows of the first table, whose tensors and their buffers end before, at and behind blocks of 4,096 bytes.
@pytest.mark.parametrize("count", [1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 3000])
@pytest.mark.parametrize("buffer_bytes", [1, 4096, 70_000, 16 << 20])
def test_sizes_of_files_and_buffers(tmp_path, monkeypatch, count, buffer_bytes):
    monkeypatch.setattr(portable, "_BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(portable, "_OPEN_TABLES", 3)  # of four
    ids = {0: range(min(count, 1000)), 1: range(count), 7: range(0, 2 * count, 2), 65535: range(count // 2)}
    with open_store(tmp_path / "store", "native", TABLES, CAP) as store:
        for table, own in ids.items():
            put(store, table, own, 1)
        store.commit()
        export_rows(store, tmp_path / "export", store.commits()[-1], None, shard_bytes=300_000)
    tables, shards, _ = read_description(tmp_path / "export")
    for spec in tables:
        seen: list[int] = []
        for shard in shards[spec.index]:
            assert 0 < shard["rows"] <= 300_000 // spec.row_bytes
            file = tmp_path / "export" / shard["file"]
            for own, rows in read_shard(file, ShardLayout(spec, shard["rows"]), shard["crc32"]):
                assert np.array_equal(rows, make_rows(make_keys(spec.index, own), spec.row_bytes, 1))
                seen += own.tolist()
        assert sorted(seen) == list(ids[spec.index])


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EINVAL])
@pytest.mark.parametrize("nth", range(1, 12, 2))
def test_writes_that_fail(tmp_path, monkeypatch, error, nth):
    """In the thread that writes, too. Direct IO that is refused goes through the page cache."""
    fill(tmp_path / "store", "native")
    monkeypatch.setattr(portable, "_BUFFER_BYTES", 70_000)
    calls, pwrite = itertools.count(1), os.pwrite

    def fail(fd: int, data: memoryview, offset: int) -> int:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        if next(calls) == nth and (direct or error != errno.EINVAL):
            raise OSError(error, os.strerror(error))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    with open_store(tmp_path / "store", read_only=True) as store:
        if error == errno.EINVAL:
            store.export(tmp_path / "export")
            assert next(calls) > nth
        else:
            with pytest.raises(StoreFullError if error == errno.ENOSPC else StoreIOError):
                store.export(tmp_path / "export")
    assert (tmp_path / "export").exists() == (error == errno.EINVAL)
    assert sorted(os.listdir(tmp_path))[-1] == "store"
    if error == errno.EINVAL:
        import_(tmp_path / "export", tmp_path / "again")
        assert contents(tmp_path / "again") == contents(tmp_path / "store")


@pytest.mark.parametrize("change", [-1, 1])
def test_rows_that_are_stored_meanwhile(tmp_path, monkeypatch, change):
    """The files' sizes are chosen before the rows come."""
    fill(tmp_path / "store", "native")
    with open_store(tmp_path / "store", read_only=True) as store:
        count = store.count
        monkeypatch.setattr(store, "count", lambda table: count(table) + change * (table == 1))
        with pytest.raises(InputError, match="rows of table 'wide' were stored while it was exported"):
            store.export(tmp_path / "export")
    assert os.listdir(tmp_path) == ["store"]


def test_the_files_are_safetensors(exported):
    """Read as the format says, with nothing of ours."""
    data = (exported / "00001-00000.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"table": "wide"}
    dtypes = {"I64": "<i8", "F32": "<u4"}
    tensors = {}
    end = 0
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        assert first == end
        end = last
        raw = data[8 + length + first : 8 + length + last]
        tensors[name] = np.frombuffer(raw, dtypes[entry["dtype"]]).reshape(entry["shape"])
    assert 8 + length + end == len(data)
    place = tensors["ids"].tolist().index(5)
    assert tensors["weights"].shape == (702, 64)
    assert tensors["weights"][place].tolist() == [0x7FC00001, 0xFFFFFFFF, 0x80000000, 1] * 16
    assert tensors["state"][place].tolist() == [0x7FC00001, 0xFFFFFFFF, 0x80000000, 1]
    description = json.loads((exported / "EXPORT.json").read_text())
    assert base64.b64decode(description["commit"]["meta"]) == b"\0meta\xff"


def test_existing_targets_are_left_alone(tmp_path, exported):
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "link").symlink_to("elsewhere")
    fill(tmp_path / "store", "memory")
    for name in ("notes", "folder", "link", "store"):
        with pytest.raises(ConfigError, match="exists already"):
            export(tmp_path / "store", tmp_path / name)
        with pytest.raises(ConfigError, match="exists already"):
            import_(exported, tmp_path / name)
    with pytest.raises(ConfigError, match="make it first"):
        import_(exported, tmp_path / "none" / "store")
    (tmp_path / "free").mkdir()
    import_(exported, tmp_path / "free")
    assert sorted(os.listdir(tmp_path)) == ["folder", "free", "link", "notes", "store"]


def test_a_mount_point_is_refused_at_once(tmp_path, exported, monkeypatch):
    """A finished folder cannot take its place, and the rows would go to the disk around it."""
    fill(tmp_path / "store", "native")
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "disk")
    for make in (lambda to: export(tmp_path / "store", to), lambda to: import_(exported, to)):
        with pytest.raises(ConfigError, match="disk is where a disk is mounted"):
            make(tmp_path / "disk")
        make(tmp_path / "disk" / "made")
        shutil.rmtree(tmp_path / "disk" / "made")


def test_interrupted_export_and_import_leave_nothing(tmp_path, exported):
    fill(tmp_path / "store", "native")

    def interrupt(done: int, total: int) -> None:
        if done > 500:
            raise KeyboardInterrupt

    with open_store(tmp_path / "store", read_only=True) as store, pytest.raises(KeyboardInterrupt):
        store.export(tmp_path / "export", interrupt)
    with pytest.raises(KeyboardInterrupt):
        import_(exported, tmp_path / "again", progress=interrupt)
    assert os.listdir(tmp_path) == ["store"]


def test_killed_while_exporting(tmp_path):
    """Nothing under the final name; the next export clears what is left, and is whole."""
    fill(tmp_path / "store", "native")
    code = (
        "import sys, time; from tierstore.store import open_store\n"
        "def wait(done, total):\n    print(done, flush=True); time.sleep(60)\n"
        "open_store(sys.argv[1], read_only=True).export(sys.argv[2], wait)"
    )
    with run_child(code, tmp_path / "store", tmp_path / "export") as child:
        child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    assert not (tmp_path / "export").exists()
    assert (tmp_path / ".export.tierstore-partial").is_dir()
    export(tmp_path / "store", tmp_path / "export")
    assert sorted(os.listdir(tmp_path)) == ["export", "store"]
    import_(tmp_path / "export", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "store")


def test_two_at_once_to_one_target(tmp_path, exported):
    """The second is refused and touches nothing, whatever the first one is doing."""
    fill(tmp_path / "store", "native")
    refused = []

    def another(done: int, total: int) -> None:
        for make in (lambda to: export(tmp_path / "store", to), lambda to: import_(exported, to)):
            with pytest.raises(StoreLockedError, match="target is in use by another object") as error:
                make(tmp_path / "target")
            refused.append(error)

    with open_store(tmp_path / "store", read_only=True) as store:
        store.export(tmp_path / "target", another)
    assert refused
    import_(tmp_path / "target", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "store")
    assert sorted(os.listdir(tmp_path)) == ["again", "store", "target"]


def test_no_room(tmp_path, exported):
    fill(tmp_path / "store", "native")
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size in (0, 4096, 8192, 61_440):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            with open_store(tmp_path / "store", read_only=True) as store:
                with pytest.raises(StoreFullError) as failed:
                    store.export(tmp_path / "export")
                assert failed.value.errno in (errno.EFBIG, errno.ENOSPC)
            with pytest.raises(StoreFullError):
                import_(exported, tmp_path / "again")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert os.listdir(tmp_path) == ["store"]
    with pytest.raises(StoreFullError, match="cap"):
        import_(exported, tmp_path / "again", ssd_bytes=100_000)
    assert os.listdir(tmp_path) == ["store"]


def test_memory_stays_small(tmp_path):
    """100 MB of rows pass through a process that may have little more than it began with."""
    with open_store(tmp_path / "store", "native", TABLES, CAP) as store:
        for start in range(0, 350_000, 50_000):
            put(store, 1, range(start, start + 50_000))
        store.commit(b"")
    code = (
        "import sys, resource; from tierstore.store import open_store, import_\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "with open_store(sys.argv[1], read_only=True) as store:\n"
        "    before = peak(); store.export(sys.argv[2]); print(peak() - before)\n"
        "before = peak(); import_(sys.argv[2], sys.argv[3]); print(peak() - before)"
    )
    child = run_child(code, tmp_path / "store", tmp_path / "export", tmp_path / "again")
    output, _ = child.communicate()
    assert child.returncode == 0
    assert all(int(line) < 90 for line in output.split()), output
    with open_store(tmp_path / "again", read_only=True) as store:
        assert_holds(store, 1, range(0, 350_000, 97))
