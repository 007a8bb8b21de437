"""Limits that only large stores meet, made small: long locations, large segments, reads of many keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from tests.store.native.test_limits import holds, open_on, put, rows_of, table_of
from tests.store.store_model import wait_for_saved_index
from tierstore import _core
from tierstore.keys import make_keys
from tierstore.store.native import NativeConfig, NativeLimits, NativeStore

MANY_SEGMENTS = NativeLimits(chunk_bytes=16_384, slot_bits=22)
"""For segments of 42 rows of 272 bytes, with locations as if a segment had 1 GiB."""
SHORT = 1024 * 42
"""Rows whose locations have at most 32 bits."""


@contextmanager
def threads_of_the_core(count: int) -> Iterator[None]:
    before = _core.num_threads()
    _core.set_num_threads(count)
    try:
        yield
    finally:
        _core.set_num_threads(before)


def open_with_many_segments(env, **options) -> NativeStore:
    return open_on(env, segment_bytes=16_384, limits=MANY_SEGMENTS, snapshot_min_rows=1, **options)


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("off", [-1, 0, 1, 5000])
def test_locations_of_more_than_32_bits(off, with_index):
    """The first row beyond, and many: read, overwritten, committed, scanned, compacted, reopened."""
    env = _core.MemoryEnv()
    count = SHORT + off
    with open_with_many_segments(env) as store:
        put(store, range(count), 1)
        places = store.places(make_keys(0, range(count)))
        assert places.max() < count + 42  # no gaps, although locations have them
        assert len(np.unique(places)) == count
        assert holds(store, range(count), 1)
        store.commit(b"1")
        put(store, range(0, count, 2), 2)
        store.commit(b"2")
    env = env.after_crash(env.operations(), "lost")
    if not with_index:
        env.remove("disk/INDEX")
    with open_with_many_segments(env) as store:
        assert (store.counters()["rebuilt_rows"] == 0) == with_index
        store.compact()
        store.commit(b"3")
        assert store.stats().rows == count
        assert holds(store, range(0, count, 2), 2)
        assert holds(store, range(1, count, 2), 1)
        assert sum(len(keys) for keys, _ in store.scan()) == count
    assert _core.verify_store("disk", {0: 272}, None, env).findings == []


def test_segments_grow_with_what_is_in_use():
    """From 16 KiB here, to a 128th of the bytes in use."""
    env = _core.MemoryEnv()
    limits = NativeLimits(chunk_bytes=4096, small_segment_bytes=16_384)
    sizes = []
    with open_on(env, limits=limits) as store:
        for first in range(0, 24_000, 14):  # a block of rows each
            put(store, range(first, first + 14), 1)
            store.commit(b"")
        for name in sorted(env.list("disk")):
            if name.endswith(".seg"):
                sizes.append(len(env.contents(f"disk/{name}")))
        used = 0
        for size in sizes[:-1]:  # all but the one that is appended to
            assert size <= max(16_384, used // 128) + 3 * 4096  # the footer, and rows begun
            used += size
        assert max(sizes) > 45_000
        assert holds(store, range(24_000), 1)
    with open_on(env, limits=limits) as store:
        assert holds(store, range(24_000), 1)


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_the_slots_of_a_segment(tmp_path, off):
    """2^22 at most, whose keys wait in memory until the segment is full."""
    count, table = (1 << 22) + off, table_of(16)
    config = NativeConfig(1 << 33, segment_bytes=1 << 30)
    with NativeStore(tmp_path, [table], config=config) as store:
        for first in range(0, count, 1 << 20):
            ids = np.arange(first, min(count, first + (1 << 20)))
            put(store, ids, 1, 16)
        store.commit(b"")
        assert store.counters()["segments"] == 1 + (off > 0)
    with NativeStore(tmp_path, [table], config=config) as store:
        assert store.stats().rows == count
        assert holds(store, range(count - 1000, count), 1, 16)
        put(store, [count], 1, 16)
        store.commit(b"")
        assert store.counters()["segments"] == 2  # a void took the last slot
    assert _core.verify_store(str(tmp_path), {0: 16}, None).findings == []


@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 129, 1000])
def test_reads_of_more_keys_than_are_sorted_together(count):
    limits = NativeLimits(chunk_bytes=16_384, keys_at_once=64)
    with open_on(_core.MemoryEnv(), limits=limits) as store:
        ids = np.random.default_rng(count).permutation(count)
        put(store, ids, 1)
        store.commit(b"")
        assert holds(store, ids, 1)
        keys = make_keys(0, np.arange(2 * count))  # every second one is absent
        out = np.full((3 * count, 272), 7, np.uint8)
        slots = np.arange(2 * count, dtype=np.int32)[::-1].copy() + count
        found = store.read(keys, out, slots)
        assert np.array_equal(found, np.arange(2 * count) < count)
        assert np.array_equal(out[slots[:count]], rows_of(np.arange(count), 1))
        assert (out[: 2 * count] == 7).all()


GROUP = 1 << 15
"""Entries of INDEX with one checksum. A thread restores eight groups at once."""
ENTRY_BYTES = 11


def store_of(count: int) -> _core.MemoryEnv:
    env = _core.MemoryEnv()
    with open_on(env, 16, limits=None, index="hash") as store:
        put(store, range(count), 1, 16)
        store.commit(b"")
    return env


def rebuilt_of(env, count: int) -> int:
    """Rows of a store, each found where it should be, that did not come from INDEX, a hash."""
    with open_on(env, 16, limits=None, index="hash") as store:
        assert store.stats().rows == count
        assert holds(store, range(count), 1, 16)
        put(store, range(count, count + 1000), 1, 16)  # the index goes on
        assert holds(store, range(count + 1000), 1, 16)
        return store.counters()["rebuilt_rows"]


@pytest.mark.parametrize("count", [8 * GROUP - 1, 8 * GROUP, 8 * GROUP + 1, 16 * GROUP + 1, 20 * GROUP])
def test_an_index_of_several_pieces(count):
    assert rebuilt_of(store_of(count), count) == 0


def change_groups(data: bytearray, first: int, change: str) -> bytearray:
    """INDEX with other bytes in the groups from ``first`` on, whose checksums may be right."""
    group = GROUP * ENTRY_BYTES + 4
    begin = 16 + int.from_bytes(data[12:16], "little") + 4
    if change == "flipped":
        data[begin + first * group + 77] ^= 1
    elif change == "repeated":
        data[begin + first * group : begin + (first + 1) * group] = data[begin : begin + group]
    return data


@pytest.mark.parametrize("change", ["flipped", "repeated"])
@pytest.mark.parametrize("group", [1, 7, 8, 9, 15])
def test_an_index_with_a_damaged_piece_is_not_used(group, change):
    """Also where the groups are intact, but do not follow one another: within a piece, and between two."""
    count = 16 * GROUP
    env = store_of(count)
    env.set_contents("disk/INDEX", bytes(change_groups(bytearray(env.contents("disk/INDEX")), group, change)))
    assert rebuilt_of(env, count) == count


@pytest.mark.parametrize(("count", "is_saved"), [(999, False), (1000, True), (1001, True)])
def test_a_commit_saves_the_index_when_many_rows_would_be_replayed(count, is_saved):
    """After 1,000 rows here, or a quarter of all: an opening after a crash reads no more from footers."""
    env = _core.MemoryEnv()
    limits = NativeLimits(replay_rows=1000)

    def reopened() -> NativeStore:
        return open_on(env, 16, limits=limits, snapshot_min_rows=1)

    with reopened() as store:
        put(store, range(4000), 1, 16)
        store.commit(b"")
        wait_for_saved_index(store)
        before = env.contents("disk/INDEX")
        put(store, range(count), 2, 16)
        store.commit(b"")
        wait_for_saved_index(store)
        assert (env.contents("disk/INDEX") != before) == is_saved
        env = env.after_crash(env.operations(), "lost")
    with reopened() as store:
        assert store.counters()["rebuilt_rows"] == (0 if is_saved else count)
        assert holds(store, range(count), 2, 16)
        before = env.contents("disk/INDEX")
        put(store, [0], 3, 16)
        store.commit(b"")  # what was replayed counts, too
        wait_for_saved_index(store)
        assert (env.contents("disk/INDEX") != before) == (not is_saved)


@pytest.mark.parametrize("index", ["hash", "compact"])
def test_a_large_replay(tmp_path, index):
    """Threads change locations in parts of the index: also of rows written several times, copied, and new."""
    count, changed, table = 9_000_000, 1_000_000, table_of(16)
    config = NativeConfig(1 << 33, index=index, segment_bytes=8 << 20)
    random = np.random.default_rng(1)
    with NativeStore(tmp_path, [table], config=config) as store:
        for first in range(0, count, 1 << 20):
            ids = np.arange(first, min(count, first + (1 << 20)))
            put(store, ids, 1, 16)
        store.commit(b"")
    versions = np.ones(count + changed, np.int64)
    config = replace(config, snapshot_min_rows=1 << 40)  # so the saved index stays as it is
    with NativeStore(tmp_path, [table], config=config) as store:
        for version in (2, 3, 4):
            ids = random.integers(0, count + changed, changed)  # a seventh of them twice
            put(store, ids, version, 16)
            versions[ids] = version
        store.commit(b"")
        store.compact()
        store.commit(b"")
        rows = store.stats().rows
    for threads in (1, 2):
        with threads_of_the_core(threads), NativeStore(tmp_path, [table], config=config) as store:
            assert store.counters()["rebuilt_rows"] > 2 * changed
            assert store.counters()["dense_rows"] == (0 if index == "hash" else pytest.approx(rows, rel=0.1))
            assert store.stats().rows == rows
            for version in (2, 3, 4):
                assert holds(store, np.flatnonzero(versions == version), version, 16)
            old = np.flatnonzero(versions[:count] == 1)
            assert holds(store, old[::7], 1, 16)
            assert sum(len(keys) for keys, _ in store.scan()) == rows
