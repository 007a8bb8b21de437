"""Lanes of a large cache: their sizes, which rows are in them, and what their division costs in hits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_policies import simulate
from cache_policies.lanes import LEAST_SLOTS, MOST_LANES, lane_slots, lanes_of
from tierstore import TierConfig, TieredEmbedding, _core, optim
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.keys import make_keys


@pytest.mark.parametrize(
    ("slots", "lanes"),
    [
        (1, 1),
        (2 * LEAST_SLOTS - 1, 1),
        (2 * LEAST_SLOTS, 2),
        (4 * LEAST_SLOTS - 1, 2),
        (4 * LEAST_SLOTS, 4),
        (16 * LEAST_SLOTS + 5, 16),
        (1 << 30, MOST_LANES),
    ],
)
def test_the_number_of_lanes(slots: int, lanes: int) -> None:
    sizes = lane_slots(slots)
    assert len(sizes) == lanes
    assert sum(sizes) == slots
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("lanes", [1, 2, 3, 16])
def test_the_core_puts_rows_into_the_same_lanes(lanes: int) -> None:
    each = 12_000
    keys = np.concatenate([make_keys(table, np.arange(300)) for table in range(40)])
    tier = _core.Tier(lanes=[[_core.ShareConfig(slots=each)] for _ in range(lanes)], share_of=[0] * 40)
    plan = tier.begin(keys, None, 0)
    assert plan.needed == 0
    tier.assign(keys, True, plan)
    assert (plan.slots // each).tolist() == lanes_of(keys, lanes).tolist()
    assert tier.find(keys).tolist() == plan.slots.tolist()
    assert tier.keys_of(plan.slots).tolist() == keys.tolist()
    assert np.bincount(lanes_of(keys, lanes)).min() > 0.8 * len(keys) / lanes


@pytest.mark.parametrize("policy", ["lru", "lookahead", "lfu", "s3_fifo"])
def test_lanes_cost_next_to_no_hits(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of a 64th of the real size lose more than real ones would, and lose little."""
    rng = np.random.default_rng(0)
    keys = (rng.zipf(1.2, (60, 20_000)) % 200_000).astype(np.uint64)
    one = simulate(list(keys), policy, 16_384, depth=1, window=8)
    monkeypatch.setattr("cache_policies.lanes.LEAST_SLOTS", 1024)
    many = simulate(list(keys), policy, 16_384, depth=1, window=8)
    assert many.uniques == one.uniques
    assert many.compulsory == one.compulsory
    assert many.misses == pytest.approx(one.misses, rel=0.01)
    assert many.misses != one.misses


def test_a_tier_whose_rows_cannot_leave_has_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot is filled, whatever the hashes of the keys."""
    monkeypatch.setattr("cache_policies.lanes.LEAST_SLOTS", 16)
    for config in (
        TierConfig(hbm=bytes_for(600, 32, "lru"), policy="lru", ssd=0),
        TierConfig(hbm=bytes_for(300, 32, "lru"), uvm=bytes_for(300, 32, "lru"), policy="lru", ssd=0),
    ):
        with TieredEmbedding(10_000, 8, config=config, optimizer=optim.SGD(lr=0.1)) as table:
            tiers = table.engine.groups[0].stack.tiers
            full = sum(tier.capacity for tier in tiers)
            for begin in range(0, full, 50):
                table(torch.arange(begin, min(begin + 50, full))).sum().backward()
            assert sum(map(len, tiers)) == full
            assert {tier.native.lanes for tier in tiers} == {1}
    with TieredEmbedding(10_000, 8, config=TierConfig(hbm="60KiB", engine="memory")) as table:
        assert table.engine.groups[0].fast.native.lanes > 1
