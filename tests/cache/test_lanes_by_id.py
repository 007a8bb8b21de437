"""Lanes of tiers that hold all rows: every row has a place in its lane, and nothing depends on the lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_policies import simulate
from cache_policies.hashing import mix
from cache_policies.lanes import lane_slots
from tests.bags import SGD, Bags, budget, build, everything, random_batches, train
from tests.cache_policies.test_live_equals_simulated import assert_equal, keys_of, skewed_batches
from tests.cache_policies.test_live_equals_simulated import train as trained
from tierstore import TierConfig, _core, optim, prefetch
from tierstore.cache import budget as budgets
from tierstore.cache.budget import GroupDemand, TableDemand, host_tiers
from tierstore.cache.engine import Engine, Table
from tierstore.cache.keys_only import KeysEngine
from tierstore.cache.tiers.memory import MemoryTier
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.initializers import uniform
from tierstore.keys import make_keys

LANES = (2, 4, 8, 16)


def lane_of(keys: np.ndarray, lanes: int) -> np.ndarray:
    """The lane of each key, as csrc/cache/lane_ids.h says."""
    with np.errstate(over="ignore"):
        hashes = mix.py_func(keys >> np.uint64(lanes.bit_length() - 1))
    return ((keys ^ hashes) & np.uint64(lanes - 1)).astype(np.int64)


def slots_for(rows: list[int], lanes: int) -> int:
    return sum(-(-n // lanes) for n in rows)


def tier_of(rows: list[int], lanes: int, *, slots: int | None = None) -> _core.Tier:
    share = _core.ShareConfig(slots=slots_for(rows, lanes) if slots is None else slots)
    return _core.Tier(lanes=[[share]] * lanes, grows=True, share_of=[0] * len(rows))


def add(tier: _core.Tier, keys: np.ndarray, now: int = 0) -> np.ndarray:
    plan = tier.begin(keys, None, now)
    assert plan.needed == plan.refused == 0
    assert tier.prepare(False, plan) == tier.committed
    tier.assign(keys, False, plan)
    return plan.slots.copy()


# -- the native tier -------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(
    "rows",
    [[1], [2, 3, 15], [16], [17, 31, 33], [4096], [997, 16, 5003], [1] * 40, [12_289, 64, 7, 100_003]],
)
def test_every_row_of_every_table_fits(rows: list[int], lanes: int) -> None:
    """In any order, in lookups of any size."""
    random = np.random.default_rng(sum(rows))
    tier = tier_of(rows, lanes)
    keys = random.permutation(np.concatenate([make_keys(t, np.arange(n)) for t, n in enumerate(rows)]))
    slots = []
    for now, part in enumerate(np.array_split(keys, 5)):
        slots.append(add(tier, part, now))
    found = np.concatenate(slots)
    assert len(np.unique(found)) == len(tier) == len(keys)
    assert found.min() >= 0
    assert found.max() < tier.capacity == lanes * slots_for(rows, lanes) < len(keys) + lanes * len(rows)
    assert (found % lanes).tolist() == lane_of(keys, lanes).tolist()
    for lane in range(lanes):  # each lane numbers its rows in the order in which they came
        own = found[found % lanes == lane] // lanes
        assert own.tolist() == list(range(len(own)))
    assert tier.find(keys).tolist() == found.tolist()
    assert tier.keys_of(found).tolist() == keys.tolist()
    assert tier.table_rows() == rows
    assert tier.resident_slots(False, 0, len(keys) + 1).tolist() == sorted(found.tolist())


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("step", [*range(1, 40), 64, 255, 256, 257, 272, 4096, 65_536, 1 << 20])
def test_ids_with_a_pattern_spread_over_the_lanes(step: int, lanes: int) -> None:
    """So the memory of a table that is used in part is little more than its rows'."""
    count = 8192
    ids = np.arange(count) * step
    tier = tier_of([int(ids[-1]) + 1], lanes, slots=count)
    slots = add(tier, make_keys(0, ids))
    assert slots.max() < 1.25 * count
    assert np.bincount(lane_of(make_keys(0, ids), lanes), minlength=lanes).max() * lanes > slots.max()


def test_the_first_rows_of_many_tables_spread_over_the_lanes() -> None:
    keys = np.concatenate([make_keys(table, [0]) for table in range(4096)])
    assert add(tier_of([100] * 4096, 16), keys).max() < 1.3 * 4096


def test_memory_grows_with_the_fullest_lane() -> None:
    lanes, rows = 16, 1 << 18
    tier, before = tier_of([rows], lanes), 0
    assert tier.committed == 0
    for part in np.array_split(make_keys(0, np.random.default_rng(0).permutation(rows)), 30):
        slots = add(tier, part)
        assert slots.max() < tier.committed <= tier.capacity
        assert before <= tier.committed < max(before, int(slots.max())) + lanes + 4096 + lanes
        before = tier.committed
    assert tier.committed == tier.capacity == rows
    # Keys of one lane alone take as much memory as the same number of keys in all lanes: up to the capacity.
    keys = make_keys(0, np.arange(rows))
    own = keys[lane_of(keys, lanes) == 5]
    tier = tier_of([rows], lanes)
    add(tier, own)
    assert len(own) == rows // lanes
    assert tier.committed == tier.capacity


def test_the_index_of_a_dense_table_is_an_array_in_every_lane() -> None:
    """Together the lanes take what one lane takes."""
    for rows in (1 << 18, 200_000):
        sizes = []
        for lanes in (1, 16):
            tier = tier_of([rows], lanes)
            for part in np.array_split(make_keys(0, np.random.default_rng(0).permutation(rows)), 64):
                add(tier, part)
            sizes.append(tier.metadata_bytes)
            assert tier.find(make_keys(0, np.arange(rows + 99)))[rows:].tolist() == [-1] * 99
        assert sizes[1] <= sizes[0] + 16 * 1024


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_do_the_same_as_in_one_lane(seed: int) -> None:
    random = np.random.default_rng(seed)
    lanes, tables = int(random.choice(LANES)), int(random.integers(1, 5))
    rows = random.choice([5, 16, 1023, 5000], tables).tolist()
    tier, one = tier_of(rows, lanes), tier_of(rows, 1)
    here: dict[int, int] = {}  # slots by key
    dirty: set[int] = set()
    before = _core.num_threads()
    try:
        for now in range(60):
            _core.set_num_threads(int(random.integers(1, 4)))
            table = int(random.integers(tables))
            keys = random.permutation(
                make_keys(table, random.choice(rows[table], random.integers(1, rows[table] + 1), False))
            )
            if random.random() < 0.7:
                plan, other = tier.begin(keys, None, now), one.begin(keys, None, now)
                assert sorted(plan.misses) == sorted(other.misses)
                assert (plan.table_rows, plan.table_hits) == (other.table_rows, other.table_hits)
                if random.random() < 0.2:
                    tier.abort(plan)
                    one.abort(other)
                    continue
                for native, its in ((tier, plan), (one, other)):
                    native.prepare(False, its)
                    native.assign(keys, False, its)
                here |= dict(zip(keys.tolist(), plan.slots.tolist(), strict=True))
                dirty -= set(keys[plan.misses].tolist())
                marked = plan.slots[random.random(len(keys)) < 0.5]
                tier.mark_dirty(marked)
                one.mark_dirty(one.find(tier.keys_of(marked)))
                dirty |= set(tier.keys_of(marked).tolist())
            elif here:
                gone = random.choice(list(here), min(len(here), 400), replace=False).astype(np.uint64)
                tier.remove(tier.find(gone))
                one.remove(one.find(gone))
                for key in gone.tolist():
                    del here[key]
                    dirty.discard(key)
                slots = tier.find(np.array(list(here), np.uint64))
                cleaned = slots[random.random(len(slots)) < 0.3]
                tier.mark_clean(cleaned)
                one.mark_clean(one.find(tier.keys_of(cleaned)))
                dirty -= set(tier.keys_of(cleaned).tolist())
            assert len(tier) == len(one) == len(here)
            assert tier.table_rows() == one.table_rows()
            asked = np.array(list(here), np.uint64)
            assert tier.find(asked).tolist() == list(here.values())
            assert set(asked[tier.dirty_of(tier.find(asked)) != 0].tolist()) == dirty
            assert tier.announce(keys, now + 1, now).size == len(keys) - sum(k in here for k in keys.tolist())
            for only_dirty, expected in ((False, set(here)), (True, dirty)):
                slots = paged(tier, only_dirty, int(random.integers(1, 300)))
                assert slots == sorted(here[key] for key in expected)
                assert len(paged(one, only_dirty, 100)) == len(expected)
    finally:
        _core.set_num_threads(before)


def paged(tier: _core.Tier, only_dirty: bool, limit: int) -> list[int]:
    """All slots that have rows, as MemoryTier goes through them."""
    found: list[int] = []
    while len(slots := tier.resident_slots(only_dirty, found[-1] + 1 if found else 0, limit)):
        assert len(slots) <= limit
        found += slots.tolist()
    return found


@pytest.mark.parametrize("lanes", [3, 5, 17, 32])
def test_numbers_of_lanes_that_do_not_divide_ids(lanes: int) -> None:
    with pytest.raises(ValueError, match="16"):
        tier_of([100], lanes)


def test_lanes_by_id_have_equally_many_slots() -> None:
    shares = [[_core.ShareConfig(slots=slots)] for slots in (5, 6)]
    with pytest.raises(ValueError, match="equally many"):
        _core.Tier(lanes=shares, grows=True)


# -- budgets -----------------------------------------------------------------------------------


@pytest.fixture
def least_slots(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let small tiers have lanes."""
    monkeypatch.setattr("cache_policies.lanes.LEAST_SLOTS", 16)
    return 16


def uvm_plan(uvm: int, tables: list[TableDemand], row_bytes: int) -> Any:
    demands = [GroupDemand("dim8", row_bytes, tuple(tables))]
    config = TierConfig(hbm=uvm, uvm=uvm, ssd=0, policy="lru")
    fast = budgets.divide(bytes_for(16, row_bytes, "lru"), demands, "lru", "hbm")
    (plan,) = host_tiers(config, demands, "lru", fast)
    return plan


@pytest.mark.parametrize("sizes", [[600], [1024, 16], [997, 16, 5003], [40] * 30, [3] * 400, [1] * 1000])
@pytest.mark.parametrize("row_bytes", [32, 272, 4096])
def test_lanes_never_take_more_than_the_budget(sizes: list[int], row_bytes: int, least_slots: int) -> None:
    """A tier holds all rows from their bytes on, and has lanes from the bytes of their slots on."""
    tables = [TableDemand(i, f"t{i}", rows) for i, rows in enumerate(sizes)]
    rows, lanes = sum(sizes), len(lane_slots(sum(sizes)))
    slots = lanes * slots_for(sizes, lanes)
    assert rows <= slots < rows + lanes * len(sizes)
    assert lanes == 16
    whole, enough = (bytes_for(count, row_bytes, None) for count in (rows, slots))
    for uvm in (whole - 1, whole, enough - 1, enough, 2 * enough):
        plan = uvm_plan(uvm, tables, row_bytes)
        assert plan.holds_all == (uvm >= whole)
        if uvm >= enough:
            assert (plan.slots, plan.lanes_by_id) == (slots, lanes)
        else:
            assert plan.lanes_by_id == 1
            assert plan.slots == rows or not plan.holds_all
        if plan.holds_all:
            assert bytes_for(plan.slots, row_bytes, None) <= uvm


def test_lanes_take_no_bytes_that_rows_of_another_layout_need(least_slots: int) -> None:
    tables = [TableDemand(i, f"t{i}", 33) for i in range(20)]
    demands = [GroupDemand("dim8", 32, tuple(tables)), GroupDemand("dim16", 64, tuple(tables))]
    rows = 20 * 33
    slots = len(lane_slots(rows)) * slots_for([33] * 20, len(lane_slots(rows)))
    whole = [bytes_for(rows, size, None) for size in (32, 64)]
    enough = [bytes_for(slots, size, None) for size in (32, 64)]
    for budget_, lanes in ((sum(whole), [1, 1]), (sum(enough) - 1, None), (sum(enough), [16, 16])):
        plans = budgets.divide(budget_, demands, "lru", "uvm", by_id=True)
        assert [plan.holds_all for plan in plans] == [True, True]
        assert lanes is None or [plan.lanes_by_id for plan in plans] == lanes
        taken = [bytes_for(plan.slots, size, None) for plan, size in zip(plans, (32, 64), strict=True)]
        assert sum(taken) <= budget_


def test_a_shard_has_one_lane_since_its_ids_are_any(least_slots: int) -> None:
    for rows, lanes in ((1000, 16), (500, 1)):
        table = Table("t", 1000, 8, uniform(-1, 1), rows=rows)
        config = TierConfig(hbm="8KiB", uvm="1MiB", ssd=0)
        engine = Engine([table], config, optim.SGD(lr=0.1))
        assert engine.groups[0].stack.tiers[1].native.lanes == lanes
        engine.close()


@pytest.mark.parametrize(
    ("config", "lanes", "of_keys"),
    [
        (TierConfig(hbm="all"), [1], [16]),  # on the CPU a lookup is one native call on one lane
        (TierConfig(hbm="1MiB", ssd=0), [1], [16]),
        (TierConfig(hbm=budget(600), uvm="1MiB", ssd=0), [16, 16], [16, 16]),
        (TierConfig(hbm=budget(600), uvm="1MiB", engine="memory"), [16, 16], [16, 16]),
        (TierConfig(hbm=budget(600), uvm=budget(600), engine="memory"), [16, 16], [16, 16]),
        (TierConfig(hbm=budget(600), uvm=budget(600), ssd=0), [1, 1], [1, 1]),
    ],
)
def test_the_lanes_of_tiers(
    config: TierConfig, lanes: list[int], of_keys: list[int], least_slots: int
) -> None:
    with build(config, SGD, (5, 5)) as module:
        assert lanes_of(module.engine) == lanes
    engine = KeysEngine([Table(f"t{i}", 2000, 5, uniform(-0.5, 0.5)) for i in range(2)], config, SGD)
    assert lanes_of(engine) == of_keys
    engine.close()


def lanes_of(engine: Engine) -> list[int]:
    (group,) = engine.groups
    return [tier.native.lanes for tier in group.stack.exclusive if isinstance(tier, MemoryTier)]


# -- trainings ---------------------------------------------------------------------------------

ADAM = optim.Adam(lr=0.1)
IN_MEMORY = TierConfig(hbm="all")
CONFIGS = {
    "two tiers": TierConfig(hbm=budget(100, ADAM), uvm="2MiB", ssd=0),
    "two tiers, lru": TierConfig(hbm=budget(100, ADAM, policy="lru"), uvm="2MiB", ssd=0, policy="lru"),
    "three tiers": TierConfig(hbm=budget(100, ADAM), uvm="2MiB", engine="memory"),
    "overflow": TierConfig(hbm=budget(20, ADAM), uvm="2MiB", ssd=0),
}


def steps(module: Bags, batches: list[Any], ahead: bool) -> list[torch.Tensor]:
    if not ahead:
        return train(module, batches)
    loader = prefetch(batches, module, depth=2, window=5, inputs={"": lambda batch: (batch,)})
    return [out for ids in loader for out in train(module, [ids])]


def same(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "prefetch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_training_is_that_of_memory(name: str, ahead: bool, least_slots: int) -> None:
    batches = random_batches(4, 30, 2, 16, 3)
    with build(IN_MEMORY, ADAM, (5, 5)) as expected, build(CONFIGS[name], ADAM, (5, 5)) as module:
        reference = train(expected, batches)
        tiers = module.engine.groups[0].stack.exclusive
        assert lanes_of(module.engine)[1] == 16
        assert same(steps(module, batches, ahead), reference)
        assert len(tiers[1]) > 100  # type: ignore[arg-type]
        with torch.no_grad():
            assert same([module(ids) for ids in batches], [expected(ids) for ids in batches])
        assert same(everything(module), everything(expected))
        for table in ("t0", "t1"):
            touched = torch.cat(list(module.touched_ids(table)))
            assert sorted(touched.tolist()) == torch.cat(list(expected.touched_ids(table))).sort()[0].tolist()
        module.flush()
        assert same(everything(module), everything(expected))
        for bags in (module, expected):
            bags.engine.reset_rows(1)
        assert same(everything(module), everything(expected))
        assert same(steps(module, batches[:9], ahead), train(expected, batches[:9]))


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "prefetch"])
def test_commits_have_the_rows_of_all_lanes(ahead: bool, tmp_path: Path, least_slots: int) -> None:
    batches = random_batches(7, 30, 2, 16, 3)
    config = TierConfig(hbm=budget(100, ADAM), uvm="2MiB", ssd="64MiB", path=tmp_path / "rows")
    with build(IN_MEMORY, ADAM, (5, 5)) as expected:
        for part in (batches[:15], batches[15:]):
            train(expected, part[:10])
            with build(config, ADAM, (5, 5)) as module:
                assert lanes_of(module.engine)[1] == 16
                steps(module, part[:10], ahead)
                commit = module.commit({"step": 10})
                committed = everything(expected)
                steps(module, part[10:], ahead)
                module.engine.go_to(commit)
                assert same(everything(module), committed)
                module.close(commit=False)


def test_a_full_first_tier_evicts_into_one_that_holds_all_rows(least_slots: int) -> None:
    """Whatever rows come, in whatever order, no lane is too full to take them."""
    random = np.random.default_rng(0)
    with build(CONFIGS["two tiers"], ADAM, (5, 5)) as module:
        hbm, uvm = module.engine.groups[0].stack.exclusive
        assert isinstance(hbm, MemoryTier)
        assert isinstance(uvm, MemoryTier)
        rows = 2000
        for _ in range(3):
            order = [torch.from_numpy(random.permutation(rows)) for _ in range(2)]
            for begin in range(0, rows, 40):
                train(module, [[ids[begin : begin + 40].view(4, 10) for ids in order]])
        assert len(hbm) + len(uvm) == 2 * rows
        assert hbm.native.lanes > 1
        assert len(uvm) <= uvm.native.committed <= uvm.capacity


@pytest.mark.parametrize("lanes", [16, 1 << 16])
@pytest.mark.parametrize("policy", ["lookahead", "lru", "s3_fifo"])
def test_hits_are_simulated_without_a_store_too(
    policy: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_policies.lanes.LEAST_SLOTS", lanes)
    batches = skewed_batches(tables=2, count=40, bags=24, hotness=3)
    config = TierConfig(hbm=80_000, uvm="2MiB", ssd=0, policy=policy)
    group, module = trained(config, batches, depth=2, window=6)
    result = simulate([keys_of(batch) for batch in batches], policy, group.fast.capacity, depth=2, window=6)
    assert_equal(group, result)
    assert 0.05 < result.unique_miss_ratio < 0.95
    module.close()
