"""What tables are promised of a budget: small ones are resident, own bytes hold; rows train as in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_policies import simulate
from cache_policies.lanes import lane_slots
from tests.bags import Bags
from tierstore import TableOverride, TierConfig, optim, prefetch
from tierstore.cache.budget import (
    RESIDENT_SHARE,
    RESIDENT_SHARE_OF_NEIGHBOURS,
    SMALL,
    GroupDemand,
    TableDemand,
    divide,
)
from tierstore.cache.engine import Engine, Table
from tierstore.cache.tiers.sizes import MIN_SLOTS, bytes_for
from tierstore.errors import ConfigError
from tierstore.initializers import uniform
from tierstore.keys import make_keys

OPTIMIZER = optim.RowWiseAdagrad(lr=0.1)


def build(config: TierConfig, rows: list[int], dims: list[int]) -> Bags:
    tables = [
        Table(f"t{i}", count, dim, uniform(-0.5, 0.5))
        for i, (count, dim) in enumerate(zip(rows, dims, strict=True))
    ]
    return Bags(Engine(tables, config, OPTIMIZER, seed=3), range(len(tables)), OPTIMIZER)


def batches_of(seed: int, rows: list[int], count: int, bags: int) -> list[list[torch.Tensor]]:
    rng = np.random.default_rng(seed)
    return [
        [torch.from_numpy((n * rng.random((bags, 2)) ** 2).astype(np.int64)) for n in rows]
        for _ in range(count)
    ]


def row_bytes(dim: int) -> int:
    return OPTIMIZER.row_bytes(dim)


def everything(module: Bags) -> list[torch.Tensor]:
    return [module.rows(torch.arange(table.num_embeddings), table.name) for table in module.engine.tables]


def whole(rows: int, dim: int) -> int:
    return bytes_for(rows, row_bytes(dim), None)


def test_a_small_table_beside_a_large_one_is_resident() -> None:
    """By its part of the bytes it would get a few dozen slots, and overflow at every batch."""
    rows, dims = [1000, 20_000], [8, 64]
    config = TierConfig(hbm="1MiB", ssd="1GiB", engine="memory")
    with build(config, rows, dims) as module:
        for ids in batches_of(0, rows, 8, 100):
            module(ids).sum().backward()
        stats = module.stats()
        small, large = (stats["tables"][name]["tiers"]["hbm"] for name in ("t0", "t1"))
        assert small["holds_all"]
        assert not large["holds_all"]
        touched = len(torch.cat(list(module.touched_ids("t0"))))
        assert small["resident_rows"] == touched == small["row_misses"]
        assert stats["groups"]["dim8"]["overflow_rows"] == stats["groups"]["dim8"]["evicted_rows"] == 0


def test_what_a_table_is_promised_it_has() -> None:
    """200 of 220 KiB held 126 of 2,000 rows of a table once: it shared them with the table beside it."""
    rows, dims = [2000, 20_000], [16, 16]
    own = whole(2000, 16)
    tables = {"t0": TableOverride(hbm=own)}
    config = TierConfig(hbm=own + (100 << 10), ssd="1GiB", engine="memory", tables=tables)
    with build(config, rows, dims) as module:
        for begin in range(0, 2000, 100):
            ids = [torch.arange(begin, begin + 100).view(50, 2), torch.randint(20_000, (50, 2))]
            module(ids).sum().backward()
        for ids in batches_of(1, [2000, 20_000], 20, 100):
            module(ids).sum().backward()
        table = module.stats()["tables"]["t0"]["tiers"]["hbm"]
        assert table["resident_rows"] == table["row_misses"] == 2000


def test_rows_are_loaded_within_the_slots_of_their_table() -> None:
    """Half of all slots at a time is more than a table beside larger ones has; the rest overflowed."""
    rows = [3000, 20_000]
    tables = {"t0": TableOverride(hbm=bytes_for(100, row_bytes(8), "lookahead"))}
    with build(TierConfig(hbm="1MiB", engine="memory", tables=tables), rows, [8, 8]) as module:
        values = torch.rand(3000, 8)
        module.load_rows(torch.arange(3000), values, table="t0")
        assert module.stats()["tables"]["t0"]["tiers"]["hbm"]["slots"] == 100
        assert module.stats()["overflow_rows"] == 0
        assert torch.equal(module.rows(torch.arange(3000), "t0"), values)


@pytest.mark.parametrize("policy", ["lookahead", "lru", "s3_fifo"])
@pytest.mark.parametrize(("depth", "window"), [(0, 0), (2, 6)])
@pytest.mark.parametrize("least_slots_of_a_lane", [1 << 16, 100, 16])
def test_each_share_is_what_the_simulator_says_of_its_tables_alone(
    policy, depth, window, least_slots_of_a_lane, monkeypatch
) -> None:
    """No share has lanes, or one of them has (it shares no lane with others), or both have."""
    monkeypatch.setattr("cache_policies.lanes.LEAST_SLOTS", least_slots_of_a_lane)
    rows = [25, 2000, 2000, 2000]  # resident, with slots of its own, and two that share
    own = bytes_for(150, row_bytes(8), policy)
    config = TierConfig(
        hbm=100_000,
        ssd="1GiB",
        engine="memory",
        policy=policy,
        tables={"t1": TableOverride(hbm=own)},
    )
    batches = batches_of(7, rows, 50, 24)
    module = build(config, rows, [8] * 4)
    for ids in prefetch(batches, module, inputs={module: lambda ids: (ids,)}, depth=depth, window=window):
        module(ids).sum().backward()
    (group,) = module.engine.groups
    stats = module.stats()["tables"]
    hbm = [stats[f"t{i}"]["tiers"]["hbm"] for i in range(4)]
    assert hbm[0]["row_misses"] == hbm[0]["resident_rows"] <= 25
    assert hbm[1]["slots"] == 150
    counts = [len(lane_slots(slots)) for slots in (150, group.fast.plan.slots)]
    assert group.fast.native.lanes == 1 + sum(count for count in counts if count > 1)  # residents have one
    for tables, slots in (([1], 150), ([2, 3], group.fast.plan.slots)):
        keys = [np.concatenate([make_keys(t, ids[t].numpy().reshape(-1)) for t in tables]) for ids in batches]
        result = simulate(keys, policy, slots, depth=depth, window=window)
        assert sum(hbm[t]["rows"] for t in tables) == result.uniques
        assert sum(hbm[t]["row_misses"] for t in tables) == result.misses
    tier = group.stats.tiers["hbm"]
    assert sum(table["rows"] for table in hbm) == tier.rows
    assert sum(table["row_hits"] for table in hbm) == tier.row_hits
    ssd = [stats[f"t{i}"]["tiers"]["ssd"] for i in range(4)]
    assert sum(table["row_hits"] for table in ssd) == group.stats.tiers["ssd"].row_hits
    module.close()


@st.composite
def promises(draw: st.DrawFn) -> tuple[list[int], list[int], dict[str, TableOverride], int, int]:
    count = draw(st.integers(1, 5))
    rows = draw(st.lists(st.sampled_from([1, 2, 15, 16, 17, 60, 400, 3000]), min_size=count, max_size=count))
    dims = draw(st.lists(st.sampled_from([4, 8]), min_size=count, max_size=count))
    overrides, owned = {}, {"hbm": 0, "uvm": 0}
    for index, (n, dim) in enumerate(zip(rows, dims, strict=True)):
        fields = {}
        for tier in ("hbm", "uvm"):
            if draw(st.integers(0, 2)) == 0:
                least = bytes_for(min(MIN_SLOTS, n), row_bytes(dim), "lru")
                size = draw(
                    st.sampled_from(
                        [least, least + 1, whole(n, dim) - 1, whole(n, dim), whole(n, dim) + 999, 2 * least]
                    )
                )
                fields[tier] = max(least, size)
                owned[tier] += fields[tier]
        overrides[f"t{index}"] = TableOverride(**fields)
    least = 2 * bytes_for(MIN_SLOTS, row_bytes(8), "lru")
    hbm = owned["hbm"] + least + draw(st.sampled_from([0, 1, 5_000, 40_000, 400_000]))
    uvm = draw(st.sampled_from([0, owned["uvm"] + least, owned["uvm"] + least + 20_000]))
    return rows, dims, overrides, hbm, uvm


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    given=promises(),
    seed=st.integers(0, 1000),
    bags=st.sampled_from([1, 8, 60]),
    prefetched=st.booleans(),
)
def test_promises_hold_whatever_is_looked_up(given, seed, bags, prefetched) -> None:
    rows, dims, overrides, hbm, uvm = given
    config = TierConfig(hbm=hbm, uvm=uvm, ssd="1GiB", engine="memory", policy="lru", tables=overrides)
    batches = batches_of(seed, rows, 6, bags)
    with build(TierConfig(hbm="all"), rows, dims) as memory, build(config, rows, dims) as module:
        loop = (
            prefetch(batches, module, inputs={module: lambda ids: (ids,)}, depth=2, window=3)
            if prefetched
            else batches
        )
        for ids in loop:
            for each in (module, memory):
                (each(ids) * 0.5).sin().sum().backward()
            check(module, rows, dims, overrides, planning=prefetched)
        check(module, rows, dims, overrides, planning=False)
        for got, want in zip(everything(module), everything(memory), strict=True):
            assert torch.equal(got, want)
        stats = module.stats()
        if not stats["overflow_rows"]:  # those rows are outside the budget
            smallest = 512 * len(module.engine.groups)  # of an index
            assert stats["memory"]["hbm"] <= hbm + smallest
            assert stats["memory"]["uvm"] <= uvm + smallest


def check(
    module: Bags, rows: list[int], dims: list[int], overrides: dict[str, TableOverride], *, planning: bool
) -> None:
    """``planning``: lookups are planned meanwhile."""
    stats = module.stats()
    for index, (n, dim) in enumerate(zip(rows, dims, strict=True)):
        tiers = stats["tables"][f"t{index}"]["tiers"]
        hbm, own = tiers["hbm"], overrides[f"t{index}"].hbm
        if own is not None and own >= whole(n, dim):
            assert hbm["holds_all"]
        if own is not None and not hbm["holds_all"]:
            assert bytes_for(hbm["slots"], row_bytes(dim), "lru") <= own
            assert hbm["slots"] >= min(MIN_SLOTS, n)
            assert hbm["resident_rows"] <= hbm["slots"]
        if hbm["holds_all"]:
            touched = sum(len(ids) for ids in module.touched_ids(f"t{index}"))
            assert hbm["resident_rows"] == touched or planning
            assert "uvm" not in tiers or tiers["uvm"]["resident_rows"] == 0
        if "uvm" in tiers and tiers["uvm"]["slots"] is not None:
            assert tiers["uvm"]["resident_rows"] <= tiers["uvm"]["slots"]


def test_promises_beyond_the_budget_are_refused() -> None:
    tables = {"t0": TableOverride(hbm="64KiB"), "t1": TableOverride(hbm="64KiB")}
    config = TierConfig(hbm="128KiB", ssd="1GiB", engine="memory", tables=tables)
    with pytest.raises(ConfigError, match=r"bytes that tables have to themselves"):
        build(config, [5000, 5000, 5000], [8, 8, 8])
    tables = {"t0": TableOverride(hbm=10)}
    config = TierConfig(hbm="128KiB", ssd="1GiB", engine="memory", tables=tables)
    with pytest.raises(ConfigError, match=r"table 't0': hbm is 10 bytes; raise it to at least \d+ bytes"):
        build(config, [5000], [8])


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("small", [1, 10, 1000])
def test_small_tables_take_a_bounded_share_of_the_budget(small: int, alone: bool) -> None:
    """Half where their whole row layout is small; else little, for they share the slots of larger tables."""
    tables = [TableDemand(i, f"t{i}", 10 + i) for i in range(small)]
    large = [TableDemand(small + i, f"big{i}", 10**6) for i in range(2)]
    if alone:
        demands = [GroupDemand("dim8", row_bytes(8), tuple(tables))]
        demands.append(GroupDemand("dim16", row_bytes(16), tuple(large)))
    else:
        demands = [GroupDemand("dim8", row_bytes(8), (*tables, *large))]
    budget = 1 << 20
    plan, *others = divide(budget, demands, "lru", "hbm")
    (kept,) = plan.own
    size = bytes_for(kept.slots, row_bytes(8), None)
    limit = budget * (RESIDENT_SHARE if alone else RESIDENT_SHARE_OF_NEIGHBOURS)
    assert kept.tables == tuple(range(len(kept.tables)))  # the smallest ones
    assert size <= limit
    if len(kept.tables) < small:
        assert size + bytes_for(10 + len(kept.tables), row_bytes(8), None) > limit
    shared = zip([plan, *others], demands, strict=True)
    assert size + sum(bytes_for(p.slots, d.row_bytes, "lru") for p, d in shared if p.slots) <= budget


def test_tables_of_one_size_share() -> None:
    for count in (2, 8, 100):
        tables = tuple(TableDemand(i, f"t{i}", 10_000) for i in range(count))
        (plan,) = divide(1 << 20, [GroupDemand("dim8", row_bytes(8), tables)], "lru", "hbm")
        assert plan.own == ()
    large = tuple(TableDemand(1 + i, f"t{1 + i}", 4_800) for i in range(5))
    exact = (TableDemand(0, "t0", int(4_800 * SMALL)), *large)
    (plan,) = divide(1 << 20, [GroupDemand("dim8", row_bytes(8), exact)], "lru", "hbm")
    assert [share.tables for share in plan.own] == [(0,)]
    past = (TableDemand(0, "t0", int(4_800 * SMALL) + 1), *large)
    (plan,) = divide(1 << 20, [GroupDemand("dim8", row_bytes(8), past)], "lru", "hbm")
    assert plan.own == ()
