"""Lanes of a large cache: their sizes, which rows are in them, and what their division costs in hits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache_policies import simulate
from cache_policies.lanes import LEAST_SLOTS, MOST_LANES, lane_slots, lanes_of
from tierstore import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    TableOverride,
    TierConfig,
    TieredEmbedding,
    _core,
    optim,
)
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


@pytest.mark.parametrize("lanes", [255, 256, 257, 640])
def test_as_many_lanes_as_many_tables_have(lanes: int) -> None:
    """Every table has lanes of its own, up to 16; a tier has the sum of them."""
    tables = -(-lanes // MOST_LANES)
    spans = [(MOST_LANES * table, min(MOST_LANES, lanes - MOST_LANES * table)) for table in range(tables)]
    keys = np.concatenate([make_keys(table, np.arange(400)) for table in range(tables)])
    tier = _core.Tier(
        lanes=[[_core.ShareConfig(slots=401)] for _ in range(lanes)],
        share_of=[0] * tables,
        lanes_of=spans,
        overflow_slots=2 * lanes,
    )
    plan = tier.begin(keys, None, 0)
    tier.assign(keys, True, plan)
    own = np.concatenate(
        [
            spans[table][0] + lanes_of(make_keys(table, np.arange(400)), spans[table][1]).astype(int)
            for table in range(tables)
        ]
    )
    assert (plan.slots // 401).tolist() == own.tolist()
    assert tier.find(keys).tolist() == plan.slots.tolist()


def test_lanes_that_a_tier_cannot_have() -> None:
    shares = [_core.ShareConfig(slots=1)]
    with pytest.raises(ValueError, match="do not exist"):
        _core.Tier(lanes=[shares] * 2, share_of=[0], lanes_of=[(1, 2)])


@pytest.mark.parametrize(("tables", "most"), [(15, 4096), (16, 4096), (17, 4096), (40, 4096), (20, 100)])
def test_many_tables_with_lanes_of_their_own_train(
    tables: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_policies.lanes.MOST_LANES_IN_TIER", most)
    monkeypatch.setattr("cache_policies.lanes.LEAST_SLOTS", 16)
    rows, dim = 2_000, 8
    own = TableOverride(hbm=bytes_for(300, optim.SGD(lr=0.1).row_bytes(dim), "lru"))
    names = [f"t{table}" for table in range(tables)]
    config = TierConfig(hbm="16MiB", policy="lru", engine="memory", tables=dict.fromkeys(names, own))
    specs = [EmbeddingBagConfig(rows, dim, name, feature_names=[name]) for name in names]
    names, specs = [*names, "wide"], [*specs, EmbeddingBagConfig(rows, 16, "wide", feature_names=["wide"])]
    rng = np.random.default_rng(tables)
    batches = [
        KeyedJaggedTensor(
            names,
            torch.from_numpy(rng.integers(0, rows, 64 * len(names))),
            lengths=torch.ones(64 * len(names), dtype=torch.int64),
        )
        for _ in range(6)
    ]
    outputs = []
    for chosen in (config, TierConfig(hbm="all")):
        bags = EmbeddingBagCollection(tables=specs, config=chosen, optimizer=optim.SGD(lr=0.1))
        lookups = []
        for batch in batches:
            lookups.append(bags(batch).values())
            lookups[-1].square().sum().backward()
        if chosen is config:
            native = bags.engine.groups[0].fast.native  # every table of this group has slots of its own
            lanes = min(MOST_LANES * tables, most // MOST_LANES * MOST_LANES)
            assert native.lanes == lanes + (lanes < MOST_LANES * tables)  # the last one for all other tables
        outputs.append(torch.cat(lookups))
        bags.engine.close()
    assert torch.equal(*outputs)
