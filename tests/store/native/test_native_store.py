"""What only the native engine has: two ways of IO, commits to go back to, compaction, named damage."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.store.store_model import wait_for_saved_index
from tierstore.errors import ConfigError, InputError, StoreCorruptError
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeStore

TABLES = (
    StoredTable("a", 0, 1 << 40, 4, 16),
    StoredTable("b", 1, 1 << 40, 64, 272),
    StoredTable("c", 2, 1 << 40, 520, 2080),
)
ROW_BYTES = {spec.index: spec.row_bytes for spec in TABLES}
CAP = 64 << 20


def rows_of(keys: np.ndarray, version: int, row_bytes: int) -> np.ndarray:
    words = np.arange(row_bytes // 8, dtype=np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed = (keys[:, None] * np.uint64(0x9E3779B97F4A7C15) + np.uint64(version)) ^ words
    return np.ascontiguousarray(mixed).view(np.uint8).reshape(len(keys), row_bytes)


def put(store: NativeStore, table: int, ids, version: int) -> None:
    keys = make_keys(table, ids)
    store.write(keys, rows_of(keys, version, ROW_BYTES[table]))


def holds(store: NativeStore, table: int, ids, version: int) -> bool:
    keys = make_keys(table, ids)
    out = np.empty((len(keys), ROW_BYTES[table]), np.uint8)
    return store.read(keys, out).all() and np.array_equal(out, rows_of(keys, version, ROW_BYTES[table]))


def absent(store: NativeStore, table: int, ids) -> bool:
    keys = make_keys(table, ids)
    return not store.read(keys, np.empty((len(keys), ROW_BYTES[table]), np.uint8)).any()


def bytes_on_disk(folder: Path) -> int:
    total = 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # compaction removes files meanwhile
            total += file.stat().st_size
    return total


@pytest.fixture
def opened(tmp_path):
    stores = []

    def make(**options):
        stores.append(NativeStore(tmp_path, TABLES, config=NativeConfig(**{"cap_bytes": CAP, **options})))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.mark.parametrize("io", ["auto", "pread"])
@pytest.mark.parametrize("direct", [True, False])
def test_reads_from_files(opened, io, direct):
    store = opened(io=io, direct=direct)
    for table, count in ((0, 30_000), (1, 20_000), (2, 1_000)):
        put(store, table, range(count), 1)
        put(store, table, range(0, count, 3), 2)
    store.commit(b"")
    store.close()
    store = opened(io=io, direct=direct)
    for table, count in ((0, 30_000), (1, 20_000), (2, 1_000)):
        ids = np.random.default_rng(table).permutation(count)
        assert holds(store, table, ids[ids % 3 != 0], 1)
        assert holds(store, table, ids[ids % 3 == 0], 2)
        assert absent(store, table, [count, count + 1])
    assert store.stats().io in (["pread"] if io == "pread" else ["uring", "pread"])
    assert store.stats().read_requests > 0


def test_rows_in_one_block_are_read_once(opened):
    store = opened()
    put(store, 1, range(14 * 10), 1)
    store.commit(b"")
    store.close()
    store = opened()
    assert holds(store, 1, range(14 * 10), 1)
    assert store.stats().read_bytes == 10 * 4096
    assert store.stats().read_requests == 1


def test_commits_are_kept_opened_and_dropped(opened):
    store = opened(keep=3)
    ids = range(5000)
    numbers = []
    for version in range(1, 5):
        put(store, 1, ids, version)
        put(store, 0, range(version), version)
        numbers.append(store.commit(b"v%d" % version, tag=f"tag {version}" if version > 1 else ""))
    assert [(c.id, c.tag, c.meta) for c in store.commits()] == [
        (number, f"tag {version}", b"v%d" % version) for version, number in enumerate(numbers, 1)
    ][1:]
    store.close()
    for version in (2, 3, 4):
        store = opened(keep=3, at=numbers[version - 1])
        assert store.meta() == b"v%d" % version
        assert holds(store, 1, ids, version)
        assert absent(store, 0, [version])
        store.close()
    store = opened(keep=3, at=numbers[1])
    put(store, 0, [77], 9)
    branched = store.commit(b"branch")
    assert branched > numbers[3]
    with pytest.raises(InputError, match="newest"):
        store.drop_commit(branched)
    store.drop_commit(numbers[2])
    with pytest.raises(InputError, match="not kept"):
        store.drop_commit(numbers[2])
    store.close()
    store = opened(keep=3)
    assert holds(store, 1, ids, 2)
    assert holds(store, 0, [77], 9)
    store.close()
    assert holds(opened(keep=3, at=numbers[3]), 1, ids, 4)
    with pytest.raises(InputError, match="not kept"):
        opened(at=numbers[0])


def test_overwriting_stays_within_the_cap(opened, tmp_path):
    """Every step rewrites rows and none commits: dead versions are compacted away."""
    cap = 12 << 20
    store = opened(cap_bytes=cap)
    rng = np.random.default_rng(0)
    versions = np.zeros(20_000, np.int64)
    put(store, 1, range(20_000), 0)
    for version in range(1, 60):
        ids = rng.choice(20_000, 4_000, replace=False)
        put(store, 1, ids, version)
        versions[ids] = version
        assert bytes_on_disk(tmp_path) <= cap
    for version in range(60):
        assert holds(store, 1, np.flatnonzero(versions == version), version)
    assert store.counters()["relocated_rows"] > 0
    store.commit(b"")
    store.close()
    store = opened(cap_bytes=cap)
    for version in range(60):
        assert holds(store, 1, np.flatnonzero(versions == version), version)


def test_damage_is_named(opened, tmp_path):
    store = opened()
    put(store, 1, range(100), 1)
    store.commit(b"")
    store.close()
    (segment,) = tmp_path.glob("*.seg")
    data = bytearray(segment.read_bytes())
    offset = 4096 + 4096 + 3 * 288  # slot 17
    data[offset + 100] ^= 1
    store = opened()
    segment.write_bytes(data)
    assert holds(store, 1, [i for i in range(100) if i != 17], 1)
    with pytest.raises(StoreCorruptError, match=rf"{segment.name}.*offset {offset} .*table 1, id 17"):
        holds(store, 1, [17], 1)
    assert holds(store, 1, [16, 18], 1)


def test_segments_without_manifest_are_left_alone(opened, tmp_path):
    store = opened()
    put(store, 1, range(100), 1)
    store.commit(b"")
    store.close()
    (tmp_path / "MANIFEST").unlink()
    with pytest.raises(StoreCorruptError, match="MANIFEST: the file is missing"):
        opened()
    assert list(tmp_path.glob("*.seg"))


def test_the_index_is_saved_and_taken_back(opened, tmp_path):
    options = {"snapshot_min_rows": 1, "segment_bytes": 1 << 16}
    store = opened(**options)
    put(store, 0, range(500), 1)
    put(store, 1, range(5000), 1)
    store.commit(b"")  # much has been written: with a snapshot
    wait_for_saved_index(store)
    assert store.counters()["snapshot_failures"] == 0
    put(store, 1, range(100), 2)
    store.commit(b"")  # little has been written: without
    put(store, 1, range(100), 3)
    store.close()
    assert (tmp_path / "INDEX").exists()
    for _ in range(2):
        store = opened(**options)
        assert store.counters()["rebuilt_rows"] == 100
        assert store.stats().rows == 5500
        assert holds(store, 0, range(500), 1)
        assert holds(store, 1, range(100), 2)
        assert holds(store, 1, range(100, 5000), 1)
        store.close()
    (tmp_path / "INDEX").unlink()
    store = opened(**options)
    assert store.counters()["rebuilt_rows"] == 5600
    assert holds(store, 1, range(100), 2)
    store.close()  # a good moment to save it
    assert opened(**options).counters()["rebuilt_rows"] == 0


def test_old_versions_do_not_come_back_with_a_snapshot(opened):
    """A relocated segment is without newest versions when the index is saved, and gets new ones later."""
    options = {"snapshot_min_rows": 1, "segment_bytes": 1 << 16}
    store = opened(**options)
    moving = np.arange(420) % 42 < 10
    put(store, 1, range(1000, 2470), 1)  # whole segments of 210 rows
    put(store, 1, range(420), 1)
    put(store, 1, np.flatnonzero(~moving), 2)
    store.compact()
    relocated = store.counters()["relocated_rows"]
    assert 0 < relocated < 200  # in one segment, which is not full
    put(store, 1, range(420), 3)
    store.commit(b"")  # saves the index
    wait_for_saved_index(store)
    put(store, 1, 1000 + np.flatnonzero(~moving), 4)
    store.compact()
    assert store.counters()["relocated_rows"] > relocated
    store.commit(b"")
    put(store, 0, [0], 1)  # so that closing does not save the index
    store.close()
    store = opened(**options)
    assert 0 < store.counters()["rebuilt_rows"] < 600
    assert holds(store, 1, range(420), 3)
    assert holds(store, 1, 1000 + np.flatnonzero(moving), 1)
    assert holds(store, 1, 1000 + np.flatnonzero(~moving), 4)


def test_a_snapshot_of_another_history_is_not_used(opened):
    options = {"snapshot_min_rows": 1, "keep": 3}
    store = opened(**options)
    put(store, 1, range(1000), 1)
    first = store.commit(b"")
    put(store, 1, range(1000), 2)
    store.commit(b"")
    store.close()  # saves the index of the second commit
    store = opened(**options, at=first)
    put(store, 1, range(10), 3)
    store.commit(b"")
    store.close()
    store = opened(**options)
    assert holds(store, 1, range(10), 3)
    assert holds(store, 1, range(10, 1000), 1)


def test_index_memory(opened):
    store = opened(cap_bytes=1 << 30)
    rng = np.random.default_rng(0)
    total = 0
    while total < 300_000:
        keys = make_keys(0, np.unique(rng.integers(0, 1 << 40, 20_000)))
        store.write(keys, np.zeros((len(keys), 16), np.uint8))
        total += len(keys)
        if total > 100_000:
            counters = store.counters()
            assert counters["index_bytes"] - 3 * 4096 <= 12 * counters["rows"]


def test_config_is_checked():
    for wrong in ({"io": "aio"}, {"keep": 0}, {"queue_depth": 0}, {"cap_bytes": -1}):
        with pytest.raises(ConfigError):
            NativeConfig(**{"cap_bytes": CAP, **wrong})


def test_keys_of_one_store_in_their_order_fill_another_fast(opened, tmp_path):
    """In the order of the index they would pile up at one end of it: 50 times slower."""
    source = opened()
    source.write(make_keys(0, np.arange(400_000)), np.zeros((400_000, 16), np.uint8))
    keys = np.concatenate(list(source.keys(0)))
    assert np.array_equal(np.sort(keys), make_keys(0, np.arange(400_000)))
    (tmp_path / "other").mkdir()
    seconds = {}
    for name, order in (("shuffled", np.random.default_rng(0).permutation(400_000)), ("listed", slice(None))):
        (tmp_path / "other" / name).mkdir()
        with NativeStore(tmp_path / "other" / name, TABLES, config=NativeConfig(1 << 30)) as store:
            started = time.process_time()
            store.write(np.ascontiguousarray(keys[order]), np.zeros((400_000, 16), np.uint8))
            seconds[name] = time.process_time() - started
            assert store.stats().rows == 400_000
    assert seconds["listed"] < 5 * seconds["shuffled"]
