"""How many rows a tier has of each table, and how many are dirty, without a look at every row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.bags import SGD, build, train
from tests.cache.test_planning_threads import Tier, lookup
from tierstore import TierConfig, _core
from tierstore.cache.tiers.memory import MemoryTier
from tierstore.keys import make_keys, split

ALL = 1 << 20


def assert_counts(tier: _core.Tier) -> None:
    """Compare the counts with the rows that the tier lists. No row is at an overflow slot while its own slot
    waits for it."""
    slots = tier.resident_slots(False, 0, ALL)
    tables = split(tier.keys_of(slots[slots < tier.capacity]))[0]
    assert tier.table_rows() == np.bincount(tables, minlength=3).tolist()
    assert tier.dirty_rows() == len(tier.resident_slots(True, 0, ALL))


@pytest.mark.parametrize("lanes", [1, 5])
@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_the_rows(lanes: int, stays: bool, seed: int) -> None:
    """Rows come, are evicted, stay as a plan is aborted, pass through overflow slots, and are removed."""
    random = np.random.default_rng(seed)
    tier = Tier(lanes, stays=stays, overflow=30_000)
    native = tier.native
    assert native.table_rows() == [0, 0, 0]
    assert native.dirty_rows() == 0
    dirty = 0
    for now in range(2, 24):
        keys = lookup(random, int(random.integers(1, 12_000)))
        next_use = random.integers(now + 1, now + 5, len(keys))
        if random.random() < 0.3:
            before = native.table_rows()
            plan = native.begin(keys, next_use, now)
            native.evict(now, plan)
            victims = np.bincount(split(plan.victims[1])[0], minlength=3)
            assert native.table_rows() == (np.array(before) - victims).tolist()
            native.abort(plan)
            assert native.table_rows() == before
        plan = tier.plan(keys, next_use, now)
        native.mark_dirty(plan.slots[random.random(len(keys)) < 0.4])
        native.release(plan.slots)
        native.drained(native.drainable()[0])
        assert not native.overflow_in_use
        slots = native.resident_slots(False, 0, ALL)
        native.mark_clean(slots[random.random(len(slots)) < 0.1])
        native.remove(slots[random.random(len(slots)) < 0.1])
        assert_counts(native)
        dirty += native.dirty_rows()
    assert dirty


def test_rows_at_overflow_slots_are_dirty_rows_of_no_table() -> None:
    """Until their lookup is released."""
    tier = Tier(1, overflow=ALL)
    keys = make_keys(1, np.arange(3500))
    plan = tier.plan(keys, np.full(len(keys), 9), 2)
    assert tier.native.overflow_in_use == 500
    tier.native.mark_dirty(plan.slots)
    assert tier.native.table_rows() == [0, 3000, 0]
    assert tier.native.dirty_rows() == 3500
    tier.native.release(plan.slots)
    tier.native.drained(tier.native.drainable()[0])
    assert tier.native.dirty_rows() == 3000


@pytest.mark.parametrize("rows", [(1 << 19) - 1, 1 << 19, (1 << 20) + 1])
def test_threads_count_the_dirty_rows_of_one_lane(rows: int) -> None:
    tier = _core.Tier(lanes=[[_core.ShareConfig(slots=rows)]], grows=True, share_of=[0])
    plan = tier.begin(make_keys(0, np.arange(rows)), None, 0, absent=True)
    tier.prepare(False, plan)
    tier.assign(make_keys(0, np.arange(rows)), False, plan)
    dirty = plan.slots[np.random.default_rng(rows).random(rows) < 0.3]
    tier.mark_dirty(dirty)
    assert tier.dirty_rows() == len(dirty)
    assert tier.table_rows() == [rows]


def test_statistics_and_the_warning_of_loss_list_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [torch.arange(40).view(4, 10), torch.arange(7).view(1, 7).repeat(4, 1)]
    with build(TierConfig(hbm="64KiB", uvm="1MiB", engine="memory"), SGD, (5, 5)) as module:
        train(module, [ids])
        listed = sum(len(keys) for keys in module.engine.groups[0].fast.keys(only_dirty=True))
        assert listed == 47

        def fails(*_: object, **__: object) -> Iterator[np.ndarray]:
            raise AssertionError("a tier lists its rows")

        with monkeypatch.context() as patched:
            patched.setattr(MemoryTier, "keys", fails)
            assert module.engine.groups[0].uncommitted_rows() == 47
            tables = module.stats()["tables"]
        assert [tables[name]["tiers"]["hbm"]["resident_rows"] for name in ("t0", "t1")] == [40, 7]
