"""Which slot holds a key: by entries, and by arrays where most ids of a table are there."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore import _core
from tierstore.keys import make_keys

PER_SLOT = _core.Tier.BYTES_PER_SLOT


def tier_of(tables: int, *, slots: int = 1 << 20, grows: bool = True) -> _core.Tier:
    return _core.Tier(lanes=[[_core.ShareConfig(slots=slots)]], grows=grows, share_of=[0] * tables)


def add(tier: _core.Tier, keys: np.ndarray, now: int = 0) -> np.ndarray:
    plan = tier.begin(keys, None, now)
    tier.prepare(False, plan)
    tier.assign(keys, False, plan)
    return plan.slots.copy()


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_random_rows_come_and_go(seed: int, grows: bool) -> None:
    random = np.random.default_rng(seed)
    tables = int(random.integers(1, 5))
    # dense, sparse and skewed tables, and sizes around the first array's
    sizes = random.choice([30, 1023, 1024, 1025, 5000, 1 << 40], tables)
    tier, oracle = tier_of(tables, slots=1 << 16, grows=grows), {}
    for now in range(120):
        table = int(random.integers(tables))
        ids = random.integers(0, sizes[table], random.integers(1, 400))
        if random.random() < 0.5:
            ids = ids // random.integers(1, 50)
        keys = random.permutation(np.unique(make_keys(table, ids)))
        if random.random() < 0.75 or not oracle:
            slots = add(tier, keys, now)
            for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
                assert oracle.setdefault(key, slot) == slot
            assert len(set(oracle.values())) == len(oracle)
        else:
            gone = random.choice(list(oracle), min(len(oracle), int(random.integers(1, 800))), replace=False)
            tier.remove(np.array([oracle.pop(int(key)) for key in gone], np.int32))
        assert len(tier) == len(oracle)
        asked = np.concatenate([keys, random.permutation(np.array(list(oracle), np.uint64))])
        if random.random() < 0.5:
            asked = random.permutation(asked)
        assert tier.find(asked).tolist() == [oracle.get(int(key), -1) for key in asked]


def test_a_dense_table_is_kept_in_an_array_no_larger_than_entries() -> None:
    tier, entries = tier_of(1), tier_of(0)
    keys = make_keys(0, np.random.default_rng(0).permutation(1 << 18))
    for part in np.split(keys, 64):
        add(tier, part)
        add(entries, part)
        assert tier.metadata_bytes <= entries.metadata_bytes
    fixed = (8 + 8 + 8 + 1 + 1 + 4) * (1 << 18)
    assert tier.metadata_bytes - fixed <= 4 * (1 << 18) + 1024
    assert entries.metadata_bytes - fixed > 8 * (1 << 18)


def test_sparse_ids_take_no_array() -> None:
    tier = tier_of(2)
    ids = np.random.default_rng(0).choice(1 << 47, 1 << 16, replace=False)
    add(tier, make_keys(1, ids))
    assert tier.metadata_bytes < 64 * (1 << 16)


def test_a_tier_of_a_fixed_size_keeps_its_budget() -> None:
    slots = 1 << 17
    tier = tier_of(2, slots=slots, grows=False)
    random = np.random.default_rng(0)
    for table in (0, 1):
        for part in np.split(make_keys(table, random.permutation(slots // 2)), 32):
            add(tier, part)
            assert tier.metadata_bytes <= PER_SLOT * slots + 1024
