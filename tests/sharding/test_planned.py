"""DistributedModelParallel without a plan asks the planner, and its ranks keep the plan's budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tests.sharding.test_parallel import Model, train_both
from tierstore import EmbeddingBagConfig, TierConfig, optim
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.default_planner import register_default_planner
from tierstore.errors import InfeasiblePlanError
from tierstore.placement import Job
from tierstore.planner import EmbeddingShardingPlanner, Topology
from tierstore.planner.costs import EXCHANGES
from tierstore.planner.planner import plan_job
from tierstore.sharding import (
    DistributedModelParallel,
    ShardedEmbeddingBagCollection,
    ShardingEnv,
    ShardingOptions,
    ShardingPlan,
    construct_plan,
    row_wise,
)

TIERS = {
    "all": TierConfig(hbm="all"),
    "tiers": TierConfig(hbm="3MiB", uvm="256KiB", ssd="64MiB", engine="memory"),
}


def configs() -> list[tierstore.EmbeddingBagConfig]:
    """Tables of which a rank's tiers hold a part; batches use few of their rows."""
    return [replace(config, num_embeddings=40_000) for config in cases.tables()]


def trains_as_one_process(tiers: str) -> None:
    one, many = Model(configs()), Model(configs())
    dmp = DistributedModelParallel(many, config=TIERS[tiers])
    assert isinstance(dmp.plan, ShardingPlan)
    assert [table.name for table in dmp.plan.tables] == [config.name for config in configs()]
    assert dmp.plan.plan.keys() == {"sparse"}
    train_both(one, dmp, steps=3)
    torch.testing.assert_close(dmp.state_dict(), one.state_dict(), rtol=1e-6, atol=1e-6)
    keeps_its_budgets(dmp)
    dmp.close()
    one.sparse.close()


def keeps_its_budgets(dmp: DistributedModelParallel) -> None:
    """Slots of every row layout are those that the plan gives its tables, or a few more."""
    collection = dmp.sharded["sparse"]
    planned: dict[int, int] = {}
    for _, shard in dmp.plan.on_rank(collection.env.rank):
        planned[shard.columns] = planned.get(shard.columns, 0) + shard.hbm_rows
    ahead = sum(shard.read_ahead_bytes for _, shard in dmp.plan.on_rank(collection.env.rank))
    assert collection.engine.config.read_ahead == (ahead or "auto")
    groups = collection.engine.groups
    for group in groups:
        rows = planned.get(group.layout.dim, 0)
        assert rows <= group.fast.capacity
        if collection.tiers.hbm != "all":
            spare = len(groups) * bytes_for(64, group.layout.row_bytes, collection.engine.policy)
            assert (group.fast.capacity - rows) * group.layout.row_bytes <= spare


def too_small() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"the tables do not fit: .* is short of") as caught:
        DistributedModelParallel(Model(configs()), config=TierConfig(hbm="1MiB", uvm=0, ssd=0))
    assert caught.value.missing_bytes > 0


def larger_batches_take_more_memory() -> None:
    budgets = TierConfig(hbm="2MiB", uvm=0, ssd="1GiB", depth=1)
    for size, fits in ((8, True), (1 << 20, False)):
        model = Model(configs())
        if fits:
            DistributedModelParallel(model, config=budgets, batch_size=size).close()
            continue
        with pytest.raises(InfeasiblePlanError, match="lower batch_size"):
            DistributedModelParallel(model, config=budgets, batch_size=size)
    plan = ShardingPlan((), 2, 2, "cpu", {})
    with pytest.raises(
        tierstore.ConfigError, match="batch_size is for the planner, and a plan is given: leave one out"
    ):
        DistributedModelParallel(Model(configs()), plan=plan, batch_size=8)


def a_module_without_tables() -> None:
    with pytest.raises(tierstore.ConfigError, match="no embedding collection"):
        DistributedModelParallel(torch.nn.Linear(3, 3))


def commits_fit_beside_one_another(folder: str, hbm: str) -> None:
    """All rows change between one commit and the next, and more than once."""
    table = tierstore.EmbeddingBagConfig(600_000, 64, "t", feature_names=["f"])
    machines = Topology(1, 1, hbm, "128MiB", "2GiB", device="cpu")
    plan = EmbeddingShardingPlanner(machines, search_seconds=0.1).plan(Model([table]))
    dmp = DistributedModelParallel(Model([table]), plan=plan, config=TierConfig(path=folder))
    ids = torch.arange(table.num_embeddings)
    for value in range(5):
        dmp.sharded["sparse"].load_rows(ids, torch.full((len(ids), 64), float(value)), None, "t")
        if value % 2 == 0:
            dmp.commit()
    assert (dmp.sharded["sparse"].rows(ids[::1000], "t")[0] == 4).all()
    dmp.close()


def another_planner_is_asked() -> None:
    asked = []

    def planner(module: Any, job: Job, group: Any) -> ShardingPlan:
        asked.append((module, job.hosts * job.ranks_per_host, group))
        return construct_plan(configs(), {config.name: row_wise() for config in configs()}, 2)

    model = Model(configs())
    register_default_planner(planner)
    try:
        dmp = DistributedModelParallel(model, config=TIERS["all"])
    finally:
        register_default_planner(plan_job)
    assert asked == [(model, 2, dmp.env.process_group)]
    assert all(len(table.shards) == 2 for table in dmp.plan.tables)
    dmp.close()


def everything() -> None:
    for tiers in TIERS:
        trains_as_one_process(tiers)
    too_small()
    larger_batches_take_more_memory()
    a_module_without_tables()
    another_planner_is_asked()


def test_without_a_plan_the_planner_makes_one() -> None:
    run(2, everything)


@pytest.mark.parametrize("hbm", ["32MiB", "256MiB"])
def test_commits_of_all_rows_fit_the_plan(tmp_path: Path, hbm: str) -> None:
    run(1, commits_fit_beside_one_another, str(tmp_path), hbm)


def counts_collectives() -> None:
    calls = []
    original = {name: getattr(ShardingEnv, name) for name in ("gather", "all_to_all")}
    plan = construct_plan(configs(), {config.name: row_wise() for config in configs()}, 2)
    options = ShardingOptions(config=TierConfig(hbm="all"), optimizer=optim.SGD(lr=0.1))
    bags = ShardedEmbeddingBagCollection(configs(), plan, ShardingEnv.of(None), options=options)
    for name, call in original.items():

        def counted(*args: Any, _call: Any = call, **more: Any) -> Any:
            calls.append(_call)
            return _call(*args, **more)

        setattr(ShardingEnv, name, counted)
    try:
        (batch,) = cases.batches(2, 1)
        bags(batch.of([bags.env.rank])).values().sum().backward()
    finally:
        for name, call in original.items():
            setattr(ShardingEnv, name, call)
    assert len(calls) == EXCHANGES
    bags.close()


def test_a_step_has_as_many_collectives_as_the_planner_counts() -> None:
    run(2, counts_collectives)


def not_all_in_memory() -> None:
    tables = [EmbeddingBagConfig(20_000, 16, f"t{n}", feature_names=[f"f{n}"]) for n in range(4)]
    tiers = TierConfig(hbm="2MiB", uvm="256KiB", ssd="256MiB")
    module = tierstore.EmbeddingBagCollection(tables, config=tiers, optimizer=optim.SGD(lr=0.1))
    with DistributedModelParallel(nn.Sequential(module), config=tiers, batch_size=8) as dmp:
        engine = dmp.sharded["0"].engine
        rows = sum(shard.rows for _, shard in dmp.plan.on_rank(dmp.env.rank))
        held = sum(s.hbm_rows + s.uvm_rows for _, s in dmp.plan.on_rank(dmp.env.rank))
        assert held < rows, "the budgets have room for some of the rows alone"
        assert engine.config.ssd > 0
        every = torch.arange(20_000)
        for n in range(4):
            dmp.sharded["0"].load_rows(every, torch.ones(20_000, 16), table=f"t{n}")


def test_rows_that_memory_has_no_room_for_have_a_store() -> None:
    run(1, not_all_in_memory)
