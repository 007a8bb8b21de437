"""Limits that only large stores meet, made small: long locations, large segments, reads of many keys."""

from __future__ import annotations

import numpy as np
import pytest

from tests.store.native.test_limits import holds, open_on, put, rows_of, table_of
from tierstore import _core
from tierstore.keys import make_keys
from tierstore.store.native import NativeConfig, NativeLimits, NativeStore

MANY_SEGMENTS = NativeLimits(chunk_bytes=16_384, slot_bits=22)
"""For segments of 42 rows of 272 bytes, with locations as if a segment had 1 GiB."""
SHORT = 1024 * 42
"""Rows whose locations have at most 32 bits."""


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
