"""Ids that somebody chose to crowd the indexes: they cost about what others do, and nothing depends on it."""

from __future__ import annotations

import numpy as np
import pytest

import tierstore
from tests.in_memory import tmp_path as in_memory  # noqa: F401  (a fixture)
from tests.store.store_model import CAP, TABLES, assert_holds, put, stored_ids
from tierstore.keys import make_keys
from tierstore.store.native import NativeConfig, NativeStore

# With the quadratic time of a crowded index the tests below would take many minutes.
pytestmark = pytest.mark.timeout(120)
MASK = (1 << 48) - 1
FACTORS = (0xD9E4A5C3B12F, 0x9C3F27E1AD5B)  # of csrc/store/index.cc


def crowding(count: int, first: int = 0x7777AAAA0000) -> np.ndarray:
    """Ids that the index's common order makes neighbours: its inverse of consecutive numbers."""
    inverses = [np.uint64(pow(factor, -1, 1 << 48)) for factor in FACTORS]
    mask, half = np.uint64(MASK), np.uint64(24)
    h = np.arange(first, first + count, dtype=np.uint64)
    for inverse in reversed(inverses):
        h ^= h >> half
        h = h * inverse & mask
    return (h ^ h >> half) & mask


@pytest.fixture
def tmp_path(in_memory):  # noqa: F811
    """In memory: half a gibibyte is written, of which no test needs a disk."""
    return in_memory


@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
def test_the_store(tmp_path, order):
    ids = crowding(500_000)
    if order == "descending":
        ids = ids[::-1].copy()
    elif order == "random":
        ids = np.random.default_rng(1).permutation(ids)
    config = NativeConfig(CAP, snapshot_min_rows=1)
    with NativeStore(tmp_path, TABLES, config=config) as store:
        put(store, 1, range(1000))
        for start in range(0, len(ids), 50_000):
            put(store, 1, ids[start : start + 50_000])
        store.commit(b"1")
        assert_holds(store, 1, ids)
        assert stored_ids(store, 1) == sorted([*range(1000), *ids.tolist()])
        put(store, 1, ids[:1000], 2)
        store.commit(b"2")
    with NativeStore(tmp_path, TABLES, config=config) as store:
        assert_holds(store, 1, ids[:1000], 2)
        assert_holds(store, 1, ids[1000:])
        assert_holds(store, 1, range(1000))
        assert len(stored_ids(store, 1)) == len(ids) + 1000
    with NativeStore(tmp_path, TABLES, config=NativeConfig(CAP, at=2, read_only=True)) as store:
        assert store.stats().rows == len(ids) + 1000


def test_a_snapshot_of_before_still_serves(tmp_path):
    """Saved in the common order; what came after crowds the index."""
    ids = crowding(60_000)
    config = NativeConfig(CAP, snapshot_min_rows=1)
    with NativeStore(tmp_path, TABLES, config=config) as store:
        put(store, 1, range(200_000))
        store.commit(b"1")
    assert (tmp_path / "INDEX").exists()
    with NativeStore(tmp_path, TABLES, config=config) as store:
        put(store, 1, ids, 3)
        store.commit(b"2")
    with NativeStore(tmp_path, TABLES, config=config) as store:
        assert store.counters()["rebuilt_rows"] == len(ids)
        assert_holds(store, 1, ids, 3)
        assert_holds(store, 1, range(200_000))


def test_a_listing_that_the_ids_come_into(tmp_path):
    """The index takes another order meanwhile: the list goes on in it, without the keys that it had."""
    with NativeStore(tmp_path, TABLES, config=NativeConfig(CAP)) as store:
        put(store, 1, range(200_000))
        chunks = store.keys(1)
        listed = [next(chunks)]
        put(store, 1, crowding(60_000))
        listed += list(chunks)
        keys = np.concatenate(listed)
        assert len(np.unique(keys)) == len(keys)
        assert np.isin(make_keys(1, range(200_000)), keys).all()
        again = np.concatenate(list(store.keys(1)))
        assert len(np.unique(again)) == len(again) == 260_000
        assert np.isin(keys, again).all()


def test_other_ids_keep_the_common_order(tmp_path):
    """Two stores of the same rows list them alike and save the same index, in whatever order they came."""
    ids = np.random.default_rng(1).choice(1 << 40, 300_000, replace=False)
    listed = []
    for name, order in (("a", ids), ("b", ids[::-1].copy())):
        (tmp_path / name).mkdir()
        with NativeStore(tmp_path / name, TABLES, config=NativeConfig(CAP)) as store:
            put(store, 1, order)
            store.commit(b"")
            listed.append(np.concatenate(list(store.keys(1))))
        assert (tmp_path / name / "INDEX").exists()
    assert np.array_equal(*listed)


def hashing_alike(count: int) -> np.ndarray:
    """Ids of table 0 whose unkeyed hash (MurmurHash3's finaliser) has eleven leading zero bits."""
    found: list[np.ndarray] = []
    start, size = 0, 1 << 22
    while sum(map(len, found)) < count:
        h = ids = np.arange(start, start + size, dtype=np.uint64)
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            h = (h ^ h >> np.uint64(33)) * np.uint64(factor)
        h ^= h >> np.uint64(33)
        found.append(ids[h >> np.uint64(53) == 0])
        start += size
    return np.concatenate(found)[:count].astype(np.int64)


def test_the_tables_in_memory():
    """A batch's deduplication, the memory tier's index and the window hash the same keys."""
    import torch

    ids = torch.from_numpy(hashing_alike(120_000))
    config = tierstore.TierConfig(hbm="64MiB", ssd=0)
    table = tierstore.TieredEmbedding(1 << 40, 4, config=config)
    try:
        for _ in range(3):
            rows = table(ids)
        assert torch.equal(rows[:100], table(ids[:100]))
    finally:
        table.close()
