"""Stages of a plan that threads share: the same for any number of threads, and by the rules of one lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import cache_policies
from cache_policies.lanes import lanes_of
from tierstore import _core
from tierstore.keys import make_keys

SLOTS = 3000  # of a lane
POLICY = "lookahead"


class Tier:
    """A native tier of lanes, each with a policy, and of a lane for the last table, whose rows stay."""

    def __init__(self, lanes: int, *, stays: bool = False, overflow: int = 0) -> None:
        self.policies = [cache_policies.get(POLICY).compile(SLOTS) for _ in range(lanes)]
        shares = [
            [_core.ShareConfig(slots=SLOTS, policy_state=policy.state_address, policy_hooks=policy.hooks)]
            for policy in self.policies
        ]
        spans = [(0, lanes)] * 3
        if stays:
            shares.append([_core.ShareConfig(slots=1 << 15)])
            spans[2] = (lanes, 1)
        self.native = _core.Tier(
            lanes=shares, share_of=[0] * 3, lanes_of=spans, overflow_slots=overflow * len(shares)
        )

    def plan(self, keys: np.ndarray, next_use: np.ndarray, now: int) -> _core.Plan:
        """Plan a lookup while the last one is in flight."""
        plan = self.native.begin(keys, next_use, now)
        for since in (now - 1, now):
            if self.native.evict(since, plan):
                continue
            break
        self.native.prepare(True, plan)
        self.native.assign(keys, True, plan)
        return plan


def told(plan: _core.Plan) -> list[object]:
    slots, keys, dirty, next_use = plan.victims
    return [
        *(a.tolist() for a in (plan.slots, plan.misses, plan.absent, slots, keys, dirty, next_use)),
        plan.table_rows,
        plan.table_hits,
        plan.needed,
        plan.refused,
        plan.unplaced().tolist(),
    ]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = _core.num_threads()
    yield _core.set_num_threads
    _core.set_num_threads(before)


def lookup(random: np.random.Generator, rows: int) -> np.ndarray:
    """Unique keys of three tables, one table after the other."""
    sizes = np.bincount(random.integers(0, 3, rows), minlength=3).tolist()
    ids = [random.choice(20_000, size, replace=False) for size in sizes]
    return np.concatenate([make_keys(table, own) for table, own in enumerate(ids)])


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("rows", [1, 4095, 4096, 4097, 16_383, 16_384, 16_385, 30_000])
def test_plans_are_the_same_for_any_number_of_threads(
    rows: int, stays: bool, threads: Callable[[int], None]
) -> None:
    counts, random = (1, 2, 3, 16), np.random.default_rng(rows)
    tiers = [Tier(5, stays=stays, overflow=8000) for _ in counts]
    for now in range(2, 9):
        keys = lookup(random, max(1, rows - now * (now % 2)))
        next_use = random.integers(now + 1, now + 5, len(keys))
        announced = lookup(random, rows)
        plans = []
        for count, tier in zip(counts, tiers, strict=True):
            threads(count)
            absent = tier.native.announce(announced, now + 1, now - 1)
            plan = tier.plan(keys, next_use, now)
            dirty = plan.slots[:: now + 1]
            tier.native.mark_dirty(dirty)
            released = tier.native.release(plan.slots)
            drained = [part.tolist() for part in tier.native.drainable()]
            tier.native.drained(np.array(drained[0], np.int32))
            found = tier.native.find(keys)
            rest = [absent, *released, found]
            plans.append([told(plan), drained, [part.tolist() for part in rest], len(tier.native)])
        assert all(plan == plans[0] for plan in plans)


@pytest.mark.parametrize("rows", [4095, 4096, 9000])
def test_lanes_plan_as_tiers_of_their_own(rows: int, threads: Callable[[int], None]) -> None:
    lanes, random = 4, np.random.default_rng(rows)
    tier, own = Tier(lanes), [Tier(1) for _ in range(lanes)]
    threads(2)
    for now in range(2, 12):
        keys = lookup(random, rows)
        next_use = random.integers(now + 1, now + 5, len(keys))
        announced, lane = lookup(random, rows), lanes_of(keys, lanes)
        absent = tier.native.announce(announced, now + 1, now - 1)
        plan = tier.plan(keys, next_use, now)
        misses, missing, victims, lacked = [], [], [], []
        for number, alone in enumerate(own):
            at = np.flatnonzero(lane == number)
            part = announced[lanes_of(announced, lanes) == number]
            lacked += alone.native.announce(part, now + 1, now - 1).tolist()
            one = alone.plan(keys[at], next_use[at], now)
            assert (plan.slots[at] - SLOTS * number).tolist() == one.slots.tolist()
            misses += at[one.misses].tolist()
            missing += at[one.absent].tolist()
            victims += [
                (slot + SLOTS * number, key, flag, use)
                for slot, key, flag, use in zip(*(part.tolist() for part in one.victims), strict=True)
            ]
        assert plan.misses.tolist() == misses
        assert plan.absent.tolist() == missing
        # Of several searches for victims the first one's come first.
        found = list(zip(*(part.tolist() for part in plan.victims), strict=True))
        assert sorted(found) == sorted(victims)
        assert absent.tolist() == lacked
    assert sum(len(alone.native) for alone in own) == len(tier.native)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("n", [(1 << 13) - 1, 1 << 13, (1 << 13) + 1, 1 << 16])
def test_many_slots_are_worked_on_as_few_are(n: int, lanes: int) -> None:
    """From 8,192 slots on the interpreter's lock is free meanwhile, and threads share the work."""
    tier = _core.Tier(lanes=[[_core.ShareConfig(slots=n)] for _ in range(lanes)], share_of=[0], grows=True)
    keys, rng = make_keys(0, np.arange(n)), np.random.default_rng(n)
    plan = tier.begin(keys, None, 0)
    tier.prepare(False, plan)
    tier.assign(keys, False, plan)
    slots = plan.slots.copy()
    assert sorted(tier.keys_of(slots).tolist()) == keys.tolist()
    dirty = rng.integers(0, 2, n).astype(np.uint8)
    tier.set_dirty(slots, dirty)
    assert tier.dirty_of(slots).tolist() == dirty.tolist()
    tier.mark_dirty(slots)
    assert tier.dirty_of(slots).all()
    for moves in tier.release(slots):
        assert not len(moves)
    tier.remove(slots)
    assert len(tier) == 0
    assert (tier.find(keys) == -1).all()
