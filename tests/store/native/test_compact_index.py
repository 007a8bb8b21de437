"""The compact form of the index: ranges of ids of which many are stored, beside a hash for other ids."""

from __future__ import annotations

import numpy as np
import pytest

from tests.store.native.test_limits import holds, open_on, put
from tierstore import _core
from tierstore.errors import ConfigError, InputError
from tierstore.keys import MAX_ID, make_keys
from tierstore.planner.costs import COMPACT_INDEX_ROWS, index_bytes
from tierstore.store.native import NativeConfig, NativeLimits

RANGE = 64
"""Ids of a range here."""
DENSE = 24
"""Of them, so many rows make a range dense."""
SMALL = NativeLimits(chunk_bytes=16_384, range_bits=6)


def open_small(env, index: str = "compact", **options):
    return open_on(env, 16, index=index, limits=SMALL, snapshot_min_rows=1, segment_bytes=65_536, **options)


def stored(store) -> np.ndarray:
    return np.sort(np.concatenate([*store.keys(0), np.empty(0, np.uint64)]))


def check(store, ids, version: int) -> None:
    keys = np.sort(make_keys(0, ids))
    assert np.array_equal(stored(store), keys)
    assert store.count(0) == store.stats().rows == len(ids)
    assert holds(store, ids, version, 16)
    scanned = [keys for keys, _ in store.scan()]
    assert np.array_equal(np.sort(np.concatenate(scanned)), keys)


@pytest.mark.parametrize("first", [0, RANGE, 7 * RANGE, 2**47, 2**48 - 3 * RANGE])
@pytest.mark.parametrize("rows", [1, DENSE - 1, DENSE, RANGE - 1, RANGE, RANGE + 1, 3 * RANGE])
def test_ids_at_the_borders_of_ranges(first, rows):
    """A range is dense from 3/8 of its ids on, wherever it begins, and holds no row of its neighbours."""
    env, ids = _core.MemoryEnv(), np.arange(first, first + rows)
    with open_small(env) as store:
        put(store, ids, 1, 16)
        for _ in range(4):  # a range becomes dense per call
            put(store, ids[::3], 1, 16)
        whole, rest = divmod(rows, RANGE)
        dense = whole * RANGE + (rest if rest >= DENSE else 0)
        assert store.counters()["dense_rows"] == dense
        check(store, ids, 1)
        around = [i for i in (first - 1, first + rows) if 0 <= i <= MAX_ID]
        assert not store.read(make_keys(0, around), np.zeros((len(around), 16), np.uint8)).any()
        store.commit(b"")
    with open_small(env) as store:
        assert store.counters()["dense_rows"] == dense
        assert store.counters()["rebuilt_rows"] == 0
        check(store, ids, 1)


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("forms", [("hash", "compact"), ("compact", "hash"), ("compact", "compact")])
def test_each_opening_chooses_the_form(forms, with_index):
    """Also from a saved index of the other form, and after a crash that lost it."""
    env, random = _core.MemoryEnv(), np.random.default_rng(3)
    sparse = np.unique(random.integers(10_000, 2**48, 500))
    ids = np.concatenate([random.permutation(5000), sparse])
    with open_small(env, forms[0]) as store:
        put(store, ids, 1, 16)
        store.commit(b"")
        put(store, ids[:3000], 2, 16)
        store.commit(b"")
    with open_small(env, forms[0]) as store:
        put(store, ids, 9, 16)  # lost
    env = env.after_crash(env.operations(), "lost", 0)
    if not with_index:
        env.remove("disk/INDEX")
    for form in forms[::-1]:
        with open_small(env, form) as store:
            assert (store.counters()["rebuilt_rows"] == 0) == with_index
            assert np.array_equal(stored(store), np.sort(make_keys(0, ids)))
            assert holds(store, ids[:3000], 2, 16)
            assert holds(store, ids[3000:], 1, 16)
            put(store, [2**48 - 1], 5, 16)  # a range is made dense by a call that writes
    assert _core.verify_store("disk", {0: 16}, None, env).findings == []


def test_a_sparse_table_that_becomes_dense():
    """Ids in random order beside ids anywhere; the bytes per row fall below those of the hash index."""
    random = np.random.default_rng(5)
    limits = NativeLimits(range_bits=10)
    ids = random.permutation(1 << 18)
    elsewhere = np.unique(random.integers(1 << 20, 2**48, 3000))
    figures = {}
    for form in ("hash", "compact"):
        with open_on(_core.MemoryEnv(), 16, index=form, limits=limits) as store:
            put(store, elsewhere, 1, 16)
            for part in np.split(ids, 64):
                put(store, part, 1, 16)
                if len(part) and form == "compact":
                    assert holds(store, part[:100], 1, 16)
            put(store, ids[:50_000], 2, 16)
            figures[form] = store.counters()
            assert holds(store, ids[:50_000], 2, 16)
            assert holds(store, np.concatenate([ids[50_000:], elsewhere]), 1, 16)
    assert figures["hash"]["dense_rows"] == 0
    assert figures["compact"]["dense_rows"] == len(ids)
    assert figures["compact"]["index_bytes"] < 0.5 * figures["hash"]["index_bytes"]


def test_compaction_and_longer_locations():
    """Rows move while their ranges' locations grow by bits; a commit of before can be opened."""
    env, ids = _core.MemoryEnv(), np.arange(20_000)
    with open_small(env, keep=2) as store:
        for version in range(1, 8):
            put(store, np.random.default_rng(version).permutation(ids), version, 16)
            store.commit(b"%d" % version)
            store.compact()
            check(store, ids, version)
    with open_small(env, keep=2, at=6) as store:
        check(store, ids, 6)
        put(store, ids[:100], 20, 16)
        store.commit(b"another")
    with open_small(env, keep=2) as store:
        assert holds(store, ids[:100], 20, 16)
        assert holds(store, ids[100:], 6, 16)


@pytest.mark.parametrize("written", [1 << 16, 1 << 17, 1 << 18])
def test_keys_are_listed_once_while_rows_are_written(written):
    """However many: ranges become dense before the list comes to them, or behind it."""
    first = np.arange(0, 1_600_000, 4)  # too few of each range to make it dense
    random = np.random.default_rng(written)
    with open_small(_core.MemoryEnv()) as store:
        put(store, first, 1, 16)
        listed, dense = [], []
        for chunk in store.keys(0):
            listed.append(chunk)
            for _ in range(written >> 16):
                put(store, random.integers(0, 1_600_000, 1 << 16), 2, 16)
            dense.append(store.counters()["dense_rows"])
        keys = np.concatenate(listed)
        assert len(listed) > 5
        assert 0 < dense[len(dense) // 2] < dense[-1]
        assert len(np.unique(keys)) == len(keys)
        assert np.isin(make_keys(0, first), keys).all()


@pytest.mark.parametrize("at", [0.3, 0.6, 0.9])
def test_a_damaged_saved_index_is_not_used(at):
    env, ids = _core.MemoryEnv(), np.arange(5000)
    with open_small(env) as store:
        put(store, ids, 1, 16)
        store.commit(b"")
    image = bytearray(env.contents("disk/INDEX"))
    image[int(at * len(image))] ^= 1
    env.set_contents("disk/INDEX", bytes(image))
    assert any(item.file == "INDEX" for item in _core.verify_store("disk", {0: 16}, None, env).findings)
    with open_small(env) as store:
        assert store.counters()["rebuilt_rows"] == len(ids)
        check(store, ids, 1)


def test_wrong_forms_are_named():
    with pytest.raises(ConfigError, match="index is 'tree'; it must be 'auto', 'hash' or 'compact'"):
        NativeConfig(1 << 30, index="tree")
    for bits in (5, 17):
        with pytest.raises(InputError, match=f"range_bits is {bits}; it must be from 6 to 16"):
            open_on(_core.MemoryEnv(), limits=NativeLimits(range_bits=bits))


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_an_automatic_index_is_compact_from_65536_rows_on(off):
    count = 65_536 + off
    ids = np.random.default_rng(0).permutation(count)
    with open_on(_core.MemoryEnv(), 16, segment_bytes=1 << 22) as store:
        put(store, ids, 1, 16)
        for _ in range(8):  # a range becomes dense per call, and then the hash becomes smaller
            put(store, ids[:1], 2, 16)
        assert (store.counters()["dense_rows"] > 0) == (off >= 0)
        assert (store.counters()["index_bytes"] < 4 * count) == (off >= 0)
        assert holds(store, ids[1:], 1, 16)


@pytest.mark.parametrize("count", [COMPACT_INDEX_ROWS, 3 * COMPACT_INDEX_ROWS // 2, 1_000_000])
def test_an_index_that_fills_takes_what_the_planner_reckons_with(count):
    ids = np.random.default_rng(0).permutation(count)
    with open_on(_core.MemoryEnv(), 16, segment_bytes=1 << 24) as store:
        for first in range(0, count, 4096):
            put(store, ids[first : first + 4096], 1, 16)
            assert store.counters()["index_bytes"] <= index_bytes(count) == 8 * count
        assert store.counters()["index_bytes"] <= 4 * count
