"""Lookups of several lanes whose rows are all here and never leave: found without dividing them by lanes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tierstore import _core
from tierstore.keys import make_keys

LANES = 4
SIZES = [1, 31, 32, 33, 127, 128, 129, 4095, 4096, 4097, 8193]
APART = 1009  # between the ids of a sparse table, which is in no array of slots


@pytest.fixture(autouse=True, params=[1, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _core.num_threads()
    _core.set_num_threads(request.param)
    yield
    _core.set_num_threads(before)


def tier_of(slots: int, overflow: int = 0, *, grows: bool = True) -> _core.Tier:
    share = _core.ShareConfig(slots=slots)
    return _core.Tier(
        lanes=[[share]] * LANES, grows=grows, share_of=[0, 0, 0], overflow_slots=overflow * LANES
    )


def add(tier: _core.Tier, keys: np.ndarray, *, use_overflow: bool = False) -> _core.Plan:
    plan = tier.begin(keys, None, 0)
    tier.evict(1, plan)
    tier.prepare(use_overflow, plan)
    tier.assign(keys, use_overflow, plan)
    return plan


def keys_of(n: int) -> np.ndarray:
    """Dense ids of table 0, sparse ones of table 2, and ids of table 0 again."""
    dense, sparse = np.arange(n - n // 3), APART * np.arange(n // 3)
    half = len(dense) // 2
    parts = [make_keys(0, dense[:half]), make_keys(2, sparse), make_keys(0, dense[half:])]
    return np.concatenate(parts)


@pytest.mark.parametrize("n", SIZES)
def test_rows_that_are_all_here_are_the_whole_plan(n: int) -> None:
    keys, tier = keys_of(n), tier_of(2 * n)
    slots = add(tier, keys).slots.copy()
    assert sorted(set(slots.tolist())) == sorted(slots.tolist())
    assert tier.keys_of(slots).tolist() == keys.tolist()
    order = np.random.default_rng(n).permutation(n)
    for ends in (False, True):
        plan = tier.begin(keys[order], None, 1)
        assert plan.slots.tolist() == slots[order].tolist()
        assert len(plan.misses) == len(plan.absent) == plan.needed == plan.refused == 0
        assert plan.table_rows == plan.table_hits == [n - n // 3, 0, n // 3]
        assert tier.evict(2, plan) == 0
        assert len(plan.unplaced()) == 0
        assert [len(part) for part in plan.victims] == [0] * 4
        if ends:
            assert [len(part) for part in tier.abort(plan)] == [0, 0]
        else:
            assert tier.prepare(True, plan) == tier.committed
            tier.assign(keys[order], True, plan)
            assert plan.slots.tolist() == slots[order].tolist()
        assert tier.find(keys).tolist() == slots.tolist()
        assert len(tier.announce(keys[order], 3, 1)) == 0
        assert len(tier) == n


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_row_that_is_missing_is_a_miss(n: int, where: str) -> None:
    keys, tier = keys_of(n), tier_of(2 * n)
    at = {"first": 0, "middle": n // 2, "last": n - 1}[where]
    add(tier, np.delete(keys, at))
    assert tier.announce(keys, 2, 0).tolist() == [keys[at]]
    found = tier.find(keys)
    assert np.flatnonzero(found < 0).tolist() == [at]
    plan = tier.begin(keys, None, 1)
    assert plan.misses.tolist() == plan.absent.tolist() == [at]
    assert sum(plan.table_rows) - sum(plan.table_hits) == 1
    tier.prepare(False, plan)
    tier.assign(keys, False, plan)
    assert tier.find(keys).tolist() == plan.slots.tolist()
    assert np.delete(plan.slots, at).tolist() == np.delete(found, at).tolist()
    assert plan.slots.min() >= 0


def test_a_row_in_an_overflow_slot_is_a_miss_that_is_here() -> None:
    """The row will leave, so the lookup has to be counted there."""
    n = 4 * LANES
    keys, tier = make_keys(0, np.arange(4 * n)), tier_of(4, overflow=4 * n, grows=False)
    plan = add(tier, keys, use_overflow=True)
    past = np.flatnonzero(plan.slots >= n)
    assert len(past) == 3 * n
    for part in (keys, keys[past], keys[past[:1]]):
        again = tier.begin(part, None, 1)
        assert len(again.misses) == (tier.find(part) >= n).sum() > 0
        assert len(again.absent) == 0
        tier.abort(again)
    tier.release(plan.slots)
    assert sorted(tier.drainable()[1].tolist()) == sorted(keys[past].tolist())
    tier.drained(tier.drainable()[0])
    here = np.delete(keys, past)
    assert tier.begin(here, None, 2).table_hits == [n, 0, 0]
    assert np.flatnonzero(tier.find(keys) < 0).tolist() == past.tolist()
