"""Bytes of memory tiers go to the row layouts that use them, at stated lookups, within the budget."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from cache_policies import prepare, simulate
from tests.bags import Bags
from tierstore import TableOverride, TierConfig, _core, optim, prefetch
from tierstore.cache import division
from tierstore.cache.division import Part, Use, divided
from tierstore.cache.engine import Engine, Table
from tierstore.cache.group import TierGroup
from tierstore.cache.tiers.memory import MemoryTier
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.errors import StoreIOError
from tierstore.initializers import uniform
from tierstore.keys import make_keys

SPEC = optim.RowWiseAdagrad(lr=0.1)
ROWS, DIMS = (9000, 3000, 4000), (8, 8, 16)
BUDGET = 300_000
CONFIG = TierConfig(hbm=BUDGET, uvm=0, ssd="64MiB", engine="memory", policy="lookahead", read_ahead=0)
DEPTH, WINDOW = 1, 4


def draws(count: int, used: tuple[float, ...], seed: int = 0) -> list[list[torch.Tensor]]:
    """Ids of three tables, of each of which batches use the first part only."""
    rng = np.random.default_rng(seed)
    return [
        [
            torch.from_numpy((rows * part * rng.random((40, 2)) ** 1.5).astype(np.int64))
            for rows, part in zip(ROWS, used, strict=True)
        ]
        for _ in range(count)
    ]


BATCHES = draws(300, (0.02, 0.02, 1.0))
"""The layout with most bytes uses few of its rows."""


def build(config: TierConfig) -> Bags:
    tables = [
        Table(f"t{i}", rows, dim, uniform(-0.5, 0.5))
        for i, (rows, dim) in enumerate(zip(ROWS, DIMS, strict=True))
    ]
    return Bags(Engine(tables, config, SPEC, seed=3), range(len(tables)), SPEC)


def everything(module: Bags) -> list[torch.Tensor]:
    found = []
    for table in module.engine.tables:
        ids = torch.arange(table.num_embeddings)
        found += [module.rows(ids, table.name), *module.optimizer_rows(ids, table.name).values()]
    return found


@dataclass
class Resized:
    """Sizes that a tier was given: the number of lookups before, its slots then, and misses of hbm so far."""

    seen: dict[tuple[str, str], list[tuple[int, int, int]]]


@pytest.fixture
def resized(monkeypatch: pytest.MonkeyPatch) -> Resized:
    found = Resized({})
    resize = division.UseDivision._resize

    def noted(self: Any, group: TierGroup, tier: MemoryTier, seq: int) -> None:
        resize(self, group, tier, seq)
        new = self._lookups[group.name], tier.capacity, misses_of(group)
        found.seen.setdefault((tier.name, group.name), []).append(new)

    monkeypatch.setattr(division.UseDivision, "_resize", noted)
    return found


def taken(module: Bags, tier: str) -> int:
    """Bytes of a tier's slots in all layouts, with their metadata and policies."""
    filter_ = module.engine.config.admission if tier == "hbm" else "always"
    return sum(
        bytes_for(one.plan.slots, one.row_bytes, module.engine.policy, filter_)
        + sum(bytes_for(own.slots, one.row_bytes, None) for own in one.plan.own)
        for group in module.engine.groups
        for one in group.stack.exclusive
        if isinstance(one, MemoryTier) and one.name == tier
    )


def train(module: Bags, batches: list[list[torch.Tensor]], ahead: bool) -> list[torch.Tensor]:
    outputs = []
    options: dict[str, Any] = {"inputs": {"": lambda batch: (batch,)}, "depth": DEPTH, "window": WINDOW}
    for ids in prefetch(batches, module, **options) if ahead else batches:
        out = module(ids)
        (out.sin() * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        outputs.append(out.detach().clone())
        for tier in ("hbm", "uvm"):
            budget = getattr(module.engine.config, tier)
            if budget != "all":
                assert taken(module, tier) <= budget
                if module.engine.config.admission == "always":  # refused rows have overflow slots
                    assert module.stats()["memory"][tier] <= budget
    return outputs


def trained(config: TierConfig, ahead: bool = True) -> tuple[list[torch.Tensor], dict[str, Any]]:
    with build(config) as module:
        outputs = train(module, BATCHES, ahead)
        stats = module.stats()
        sizes = {group.name: group.fast.capacity for group in module.engine.groups}
        # What the store is asked for depends on when overflow slots are free, which refused rows use.
        tiers = ["hbm"] if config.admission != "always" else [*stats["tiers"]]
        counted = {name: [table["tiers"][t] for t in tiers] for name, table in stats["tables"].items()}
        return [*outputs, *everything(module)], {"slots": sizes, "tables": counted}


IN_MEMORY = TierConfig(hbm="all")
TIERS = {
    "hbm": CONFIG,
    "uvm": replace(CONFIG, hbm=120_000, uvm=180_000),
    "narrow uvm": replace(CONFIG, hbm=120_000, uvm=180_000, ssd_dtype="bf16", uvm_dtype="bf16"),
    "admission": replace(CONFIG, admission="counter(2)"),
    "read ahead": replace(CONFIG, read_ahead="64KiB"),
}


@pytest.mark.parametrize(("tiers", "ahead"), [*((name, True) for name in TIERS), ("hbm", False)])
def test_bytes_go_where_they_are_used_and_rows_train_as_before(
    tiers: str, ahead: bool, resized: Resized
) -> None:
    config = TIERS[tiers]
    with build(config) as module:
        before = {group.name: group.fast.capacity for group in module.engine.groups}
        limit = taken(module, "hbm")
    rows, stats = trained(config, ahead)
    assert {name for tier, name in resized.seen if tier == ("uvm" if config.uvm else "hbm")} == set(before)
    if ("hbm", "dim8") in resized.seen:
        assert stats["slots"]["dim16"] > 1.5 * before["dim16"]
        assert stats["slots"]["dim8"] < before["dim8"]
    assert limit <= config.hbm  # type: ignore[operator]
    lookups = [count for sizes in resized.seen.values() for count, *_ in sizes]
    assert min(lookups) >= 64
    again, same = trained(config, ahead)
    assert same == stats
    assert all(map(torch.equal, rows, again))
    if config.lower_format.is_wide:
        whole, _ = trained(IN_MEMORY, ahead)
        assert all(map(torch.equal, rows, whole))


@pytest.mark.parametrize("policy", ["lru", "lookahead"])
def test_hits_are_those_of_the_simulator_begun_where_sizes_change(policy: str, resized: Resized) -> None:
    with build(replace(CONFIG, policy=policy)) as module:
        slots = {group.name: group.fast.capacity for group in module.engine.groups}
        train(module, BATCHES, ahead=True)
        missed = {group.name: misses_of(group) for group in module.engine.groups}
    for name, numbers in {"dim8": [0, 1], "dim16": [2]}.items():
        keys = [np.concatenate([make_keys(t, ids[t].numpy().ravel()) for t in numbers]) for ids in BATCHES]
        changes = [(0, slots[name], 0), *resized.seen["hbm", name]]
        ends = [*changes[1:], (len(keys), 0, missed[name])]
        for (begin, capacity, before), (end, _, after) in zip(changes, ends, strict=True):
            # a policy that looks ahead knows batches behind the end of a part
            if policy == "lru" or end == len(keys):
                part = prepare(keys[begin:end])
                assert simulate(part, policy, capacity, depth=DEPTH, window=WINDOW).misses == after - before
        assert len(changes) > 1


def misses_of(group: TierGroup) -> int:
    counted = group.stats.tiers["hbm"]
    return counted.rows - counted.row_hits


def test_a_store_that_fails_while_a_tier_is_emptied_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write of an emptied tier fails half-way, once; training goes on from there."""
    fails: list[int] = []
    empty = MemoryTier.empty

    def failing(self: MemoryTier, to: Any, room: Any, demote: Any) -> None:
        def demote_some(rows: Any) -> None:
            if not fails and len(self) < self.capacity // 2:
                fails.append(len(self))
                raise StoreIOError("the drive is gone for a moment")
            demote(rows)

        empty(self, to, room, demote_some)

    monkeypatch.setattr(MemoryTier, "empty", failing)
    monkeypatch.setattr("tierstore.cache.tiers.memory._PIECE", 64)
    with build(CONFIG) as module, build(IN_MEMORY) as whole:
        raised = 0
        for ids in BATCHES:
            try:
                module(ids).sum().backward()
            except StoreIOError:
                raised += 1
                module(ids).sum().backward()
            whole(ids).sum().backward()
        assert raised == len(fails) == 1
        assert all(map(torch.equal, everything(module), everything(whole)))
        assert taken(module, "hbm") <= BUDGET


@pytest.mark.parametrize("error", [_core.AddressSpaceError, MemoryError])
def test_without_memory_for_another_size_a_tier_keeps_its_size(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with build(CONFIG) as module, build(IN_MEMORY) as whole:
        before = {group.name: group.fast.capacity for group in module.engine.groups}

        def refused(*_: Any) -> Any:
            raise error("no address space")

        for group in module.engine.groups:
            monkeypatch.setattr(type(group.fast.plan.device), "allocate", refused)
        for ids in BATCHES:
            module(ids).sum().backward()
            whole(ids).sum().backward()
        assert {group.name: group.fast.capacity for group in module.engine.groups} == before
        assert "keeps its" in caplog.text
        monkeypatch.undo()
        assert all(map(torch.equal, everything(module), everything(whole)))


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, tables={"t2": TableOverride(hbm=40_000)}),
        replace(CONFIG, tables={"t0": TableOverride(hbm_share=1), "t1": TableOverride(hbm_share=1)}),
        replace(CONFIG, ssd=0, uvm="8MiB", engine="native"),
        replace(CONFIG, hbm="8MiB"),
        IN_MEMORY,
    ],
    ids=["own bytes", "shares", "no store", "room for all", "in memory"],
)
def test_what_has_its_bytes_keeps_them(config: TierConfig, resized: Resized) -> None:
    with build(config) as module:
        assert all(group.division is None for group in module.engine.groups)
        for ids in BATCHES[:130]:
            module(ids).sum().backward()
    assert not resized.seen


def test_a_division_that_saves_little_is_not_made(resized: Resized) -> None:
    with build(CONFIG) as module:
        for ids in draws(200, (1.0, 1.0, 1.0)):
            module(ids).sum().backward()
    assert not resized.seen


# -- the rule ------------------------------------------------------------------------------------


def part(misses: list[float], unique: float = 10.0, footprint: int = 100, **more: Any) -> Part:
    """A curve through 0, 100, 200 .. rows."""
    rows = np.arange(len(misses)) * 100.0
    values = {"above": 0, "min_slots": 10, "max_slots": int(rows[-1]), "row_bytes": 1, **more}
    return Part(Use(rows, np.array(misses), unique, footprint), **values)


def slots(count: int, row_bytes: int) -> int:
    return count * row_bytes


def test_bytes_go_where_they_save_most() -> None:
    steep, flat = part([100, 10, 5, 4, 3]), part([100, 90, 80, 70, 60])
    assert divided(200, [steep, flat], slots) == pytest.approx([100, 100], abs=1)
    assert divided(410, [steep, flat], slots) == pytest.approx([100, 310], abs=90)
    wide = replace(flat, row_bytes=100)
    few = divided(1200, [steep, wide], slots)
    assert few is not None
    assert few[0] >= 199


@pytest.mark.parametrize(("limit", "fits"), [(19, False), (20, True), (21, True)])
def test_every_layout_has_its_least(limit: int, fits: bool) -> None:
    found = divided(limit, [part([9, 8]), part([9, 8])], slots)
    assert (found is not None) == fits
    if found is not None:
        assert sum(found) <= limit
        assert min(found) >= 10


def test_a_closed_engine_leaves_nothing_to_the_garbage_collector() -> None:
    gc.disable()
    try:
        module = build(CONFIG)
        groups = module.engine.groups
        assert all(group.division is not None for group in groups)
        tiers = [weakref.ref(tier) for group in groups for tier in group.stack.tiers]
        module.engine.close()
        del module, groups
        assert [tier() for tier in tiers] == [None] * len(tiers)
    finally:
        gc.enable()


def test_bytes_that_no_curve_speaks_of_go_by_distinct_rows() -> None:
    used, unused = part([9, 1, 1, 1, 1], footprint=300), part([9, 1, 1, 1, 1], footprint=100)
    found = divided(600, [used, unused], slots)
    assert found == [400, 200]
    some = divided(300, [used, unused], slots)
    assert some is not None
    assert some[0] > 1.3 * some[1]


def test_rows_of_faster_tiers_need_no_slot() -> None:
    above = part([100, 10, 5, 4, 4], above=300, min_slots=0)
    below = part([100, 90, 80, 70, 60], min_slots=0)
    assert divided(200, [above, below], slots) == pytest.approx([0, 200], abs=2)


@pytest.mark.parametrize("seed", range(4))
def test_divisions_use_at_most_the_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        parts = [
            part(sorted(rng.random(6) * 100, reverse=True), row_bytes=int(rng.integers(16, 300)))
            for _ in range(int(rng.integers(1, 6)))
        ]

        def cost(count: int, row_bytes: int) -> int:
            return bytes_for(count, row_bytes, "lookahead")

        least = sum(cost(10, one.row_bytes) for one in parts)
        for limit in (least - 1, least, least + 1, int(least * rng.uniform(1, 60))):
            found = divided(limit, parts, cost)
            assert (found is None) == (limit < least)
            if found is not None:
                assert sum(found) <= limit
                assert all(cost(10, one.row_bytes) <= n for one, n in zip(parts, found, strict=True))
                assert all(
                    n <= cost(one.max_slots, one.row_bytes) for one, n in zip(parts, found, strict=True)
                )
