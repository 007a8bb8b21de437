"""INDEX is written beside calls: what changes meanwhile is left to the replay, and no call waits."""

from __future__ import annotations

import errno
import time

import numpy as np
import pytest

from tests.store.native.checksums import crc32c
from tests.store.native.test_chosen_ids import crowding
from tests.store.native.test_limits import holds, open_on, put
from tests.store.store_model import wait_for_saved_index
from tierstore import _core
from tierstore.keys import make_keys
from tierstore.store.native import NativeLimits, NativeStore

ROWS = 600_000
"""Their locations fill several of the writer's buffers of 1 MiB, in a hash, and more than one in ranges."""
SLOW = 0.1
"""Seconds of an operation of the device while INDEX is written."""


def open_rows(env, index: str = "hash", **options) -> NativeStore:
    limits = NativeLimits(replay_rows=1000)  # so the first commit saves the index, and later ones
    return open_on(env, 16, index=index, limits=limits, segment_bytes=4 << 20, **options)


class SlowSave:
    """A store that writes INDEX so slowly that calls come between."""

    def __init__(self, index: str) -> None:
        self.memory = _core.MemoryEnv()
        self.device = _core.FaultEnv(self.memory)
        self.store = open_rows(self.device, index)
        put(self.store, np.random.default_rng(0).permutation(ROWS), 1, 16)
        self.store.commit(b"1")
        wait_for_saved_index(self.store)
        put(self.store, range(ROWS // 4), 1, 16)
        self.device.slow_down(SLOW)
        self.store.commit(b"2")
        assert self.store.counters()["begun_snapshots"] == 2

    def is_under_way(self) -> bool:
        return self.store.counters()["saved_snapshots"] == 1


@pytest.mark.parametrize("index", ["hash", "compact"])
def test_no_call_waits(index):
    save = SlowSave(index)
    calls, longest, end = 0, 0.0, time.perf_counter() + 2 * SLOW
    while time.perf_counter() < end:
        begun = time.perf_counter()
        put(save.store, range(100), 2, 16)
        assert holds(save.store, range(100), 2, 16)
        assert save.store.count(0) == ROWS
        longest, calls = max(longest, time.perf_counter() - begun), calls + 1
    assert save.is_under_way()
    assert calls > 10
    assert longest < 1.8 * SLOW  # one may make a segment
    save.store.close()


@pytest.mark.parametrize("index", ["hash", "compact"])
def test_rows_that_change_meanwhile(index):
    """Overwritten, new and copied rows; the saved index serves the next commit and those behind it."""
    save, random = SlowSave(index), np.random.default_rng(1)
    versions = np.ones(ROWS + 5000, np.int64)
    for version in range(2, 6):
        ids = np.unique(random.integers(0, len(versions), 60_000))
        put(save.store, ids, version, 16)
        versions[ids] = version
    save.store.compact()
    assert save.is_under_way()  # rows have changed, so it waits for a commit
    save.device.heal()
    save.store.commit(b"3")
    wait_for_saved_index(save.store)
    check_after_crash(save, index, versions, b"3")
    put(save.store, [0], 9, 16)
    versions[0] = 9
    save.store.commit(b"4")
    put(save.store, range(1000), 10, 16)  # lost
    check_after_crash(save, index, versions, b"4")
    save.store.close()


def check_after_crash(save: SlowSave, index: str, versions: np.ndarray, meta: bytes) -> None:
    image = save.memory.after_crash(save.memory.operations(), "lost")
    stored = np.flatnonzero((versions > 1) | (np.arange(len(versions)) < ROWS))
    with open_rows(image, index) as store:
        assert store.counters()["rebuilt_rows"] < ROWS
        assert (store.counters()["rebuilt_rows"] > 0) or meta == b"4"  # which may have an index of its own
        assert store.count(0) == len(stored)
        for version in range(1, 10):
            assert holds(store, stored[versions[stored] == version], version, 16)
        assert store.meta() == meta
    report = _core.verify_store("disk", {0: 16}, None, image)
    assert [(item.file, item.what) for item in report.findings] == []
    assert report.index_entries > 0


@pytest.mark.parametrize("index", ["hash", "compact"])
def test_a_crash_at_any_time(index):
    """Between the operations of two saves and of the commits beside them."""
    save = SlowSave(index)
    begun = save.memory.operations()
    save.device.heal()
    versions = np.ones(ROWS, np.int64)
    done = {}
    for version in (2, 3, 4):
        ids = np.arange(version * 1000, version * 1000 + ROWS // 4)
        put(save.store, ids, version, 16)
        versions[ids] = version
        save.store.commit(b"v%d" % version)
        done[b"v%d" % version] = versions.copy()
    wait_for_saved_index(save.store)
    end = save.memory.operations()
    save.store.close()
    assert end - begun > 20
    for at in np.linspace(begun, end, 9).astype(int).tolist():
        image = save.memory.after_crash(at, ("lost", "random")[at % 2], at)
        with open_rows(image, index) as store:
            expected = done.get(store.meta(), np.ones(ROWS, np.int64))
            for version in np.unique(expected):
                assert holds(store, np.flatnonzero(expected == version)[::101], version, 16)
            assert store.count(0) == ROWS
        assert _core.verify_store("disk", {0: 16}, None, image).findings == []


def test_ids_that_crowd_the_index_meanwhile():
    """The index takes an order of its own, in which it cannot be saved: the old file stays."""
    save = SlowSave("hash")
    before = save.memory.contents("disk/INDEX")
    put(save.store, crowding(60_000), 2, 16)
    save.device.heal()
    for meta in (b"3", b"4"):
        save.store.commit(meta)
    counters = save.store.counters()
    save.store.close()
    assert (counters["saved_snapshots"], counters["snapshot_failures"]) == (1, 0)
    assert save.memory.contents("disk/INDEX") == before
    with open_rows(save.memory) as store:
        assert store.counters()["rebuilt_rows"] == ROWS // 4 + 60_000
        assert holds(store, range(ROWS), 1, 16)
        assert holds(store, crowding(60_000), 2, 16)


@pytest.mark.parametrize("kind", ["write", "sync", "rename"])
def test_a_device_that_fails_meanwhile(kind):
    """The failure is counted, the file removed, and the next commit begins another."""
    save = SlowSave("hash")
    save.device.fail(kind, 1, errno.EIO)
    end = time.perf_counter() + 30
    while save.store.counters()["snapshot_failures"] == 0:
        assert time.perf_counter() < end
        time.sleep(0.01)
    save.device.heal()
    put(save.store, [1], 2, 16)
    save.store.commit(b"3")
    wait_for_saved_index(save.store)
    assert save.store.counters()["saved_snapshots"] == 2
    save.store.close()
    assert "INDEX.tmp" not in save.memory.list("disk")
    with open_rows(save.memory) as store:
        assert store.counters()["rebuilt_rows"] <= 1
        assert holds(store, range(2, ROWS), 1, 16)


def test_the_file_counts_below_the_cap_while_it_is_written():
    save = SlowSave("hash")
    during = save.store.stats().disk_bytes
    save.device.heal()
    wait_for_saved_index(save.store)
    assert during - save.store.stats().disk_bytes == pytest.approx(11 * ROWS, rel=0.05)
    save.store.close()


def test_a_row_that_no_record_has_is_found():
    """An entry that leaves its row to a later record, of which there is none."""
    env, count = _core.MemoryEnv(), 3 << 16
    with open_rows(env, index="compact") as store:
        put(store, range(count), 1, 16)
        store.commit(b"1")
        wait_for_saved_index(store)
    data = bytearray(env.contents("disk/INDEX"))
    body = int.from_bytes(data[12:16], "little")
    bits = int.from_bytes(data[16 + body - 28 : 16 + body - 24], "little")  # of the first of three ranges
    size = bits << 13
    array = 16 + body + 4
    data[array : array + 8] = (int.from_bytes(data[array : array + 8], "little") | (1 << bits) - 1).to_bytes(
        8, "little"
    )
    crc = crc32c(bytes(data[array : array + size]))
    data[array + size : array + size + 4] = crc.to_bytes(4, "little")
    env.set_contents("disk/INDEX", bytes(data))
    findings = _core.verify_store("disk", {0: 16}, None, env).findings
    assert ["1 rows to later records" in item.what for item in findings] == [True]
    keys = make_keys(0, range(count))
    with open_rows(env) as store:
        assert store.read(keys, np.zeros((len(keys), 16), np.uint8)).sum() == len(keys) - 1
