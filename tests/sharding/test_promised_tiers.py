"""What constraints promise a table, a rank's tiers keep: bytes of hbm, and tables that stay in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.bags import Bags
from tierstore import EmbeddingBagCollection, EmbeddingBagConfig, TierConfig, optim
from tierstore.cache.engine import Engine, Table
from tierstore.cache.tiers.sizes import bytes_for, slots_for
from tierstore.initializers import uniform
from tierstore.placement import ShardingPlan
from tierstore.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from tierstore.sharding.planning import tiers_of_rank

ROWS = {"a": 2000, "b": 200_000, "c": 200_000}
DIM = 16


@pytest.mark.parametrize(
    ("demand", "resident"),
    [
        (ParameterConstraints(tiers=["hbm"]), True),
        (ParameterConstraints(tiers=["hbm", "uvm"]), False),
        (ParameterConstraints(min_hbm_bytes="60KiB"), False),
        (ParameterConstraints(hbm_load_factor=0.5), False),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_rank_keeps_what_constraints_promise(
    demand: ParameterConstraints, resident: bool, dtype: str
) -> None:
    configs = [EmbeddingBagConfig(rows, DIM, name, feature_names=[name]) for name, rows in ROWS.items()]
    spec = optim.RowWiseAdagrad(lr=0.1)
    module = EmbeddingBagCollection(tables=configs, config=TierConfig(hbm="all"), optimizer=spec)
    machine = Topology(1, 1, "1MiB", "46MiB", "1GiB", device="cpu")
    planner = EmbeddingShardingPlanner(machine, constraints={"a": demand}, batch_size=64, search_seconds=0.1)
    plan = planner.plan(module)
    module.close()
    assert ShardingPlan.from_dict(plan.to_dict()) == plan
    assert [shard.own for table in plan.tables for shard in table.shards] == [1, 0, 0]
    (promised,) = plan.table("a").shards

    tables = [Table(name, rows, DIM, uniform(-1, 1)) for name, rows in ROWS.items()]
    base = TierConfig(ssd="1GiB", engine="memory", policy="lru", ssd_dtype=dtype, uvm_dtype=dtype)
    fields = tiers_of_rank(plan.tables, 0, tables, base, spec)
    config = TierConfig(**{**vars(base), **fields})
    with Bags(Engine(tables, config, spec), range(3), spec) as bags:
        rng = np.random.default_rng(0)
        for begin in range(0, 2000, 40):
            ids = [torch.arange(begin, begin + 40).view(20, 2)]
            ids += [torch.from_numpy(rng.integers(0, 200_000, (20, 2))) for _ in range(2)]
            bags(ids).sum().backward()
        for _ in range(40):
            ids = [torch.from_numpy(rng.integers(0, rows, (20, 2))) for rows in ROWS.values()]
            bags(ids).sum().backward()
        tiers = bags.stats()["tables"]["a"]["tiers"]
        if resident:
            assert tiers["hbm"]["resident_rows"] == tiers["hbm"]["row_misses"] == 2000
        else:
            assert tiers["hbm"]["resident_rows"] >= min(promised.hbm_rows, 2000)
            assert promised.hbm_rows >= demand.hbm_load_factor * 2000
        if demand.stays_in_memory and not resident:
            assert tiers["hbm"]["resident_rows"] + tiers["uvm"]["resident_rows"] == 2000
        if demand.stays_in_memory:
            assert "ssd" not in tiers or tiers["ssd"]["row_hits"] == 0


def test_tables_beside_one_that_hbm_holds_whole_have_the_rows_of_the_plan() -> None:
    configs = [EmbeddingBagConfig(rows, DIM, name, feature_names=[name]) for name, rows in ROWS.items()]
    spec = optim.RowWiseAdagrad(lr=0.1)
    demands = {"a": ParameterConstraints(["table_wise"]), "b": ParameterConstraints(["table_wise"])}
    machine = Topology(1, 1, "32MiB", "200MiB", "1GiB", device="cpu")
    planner = EmbeddingShardingPlanner(machine, constraints=demands, batch_size=64, search_seconds=0.1)
    plan = planner.plan(configs)
    whole = {table.name: shard.hbm_rows for table in plan.tables for shard in table.shards if shard.own}
    cached = [shard.hbm_rows for table in plan.tables for shard in table.shards if not shard.own]
    assert whole.items() < ROWS.items()
    assert cached
    tables = [Table(name, rows, DIM, uniform(-1, 1)) for name, rows in ROWS.items()]
    fields = tiers_of_rank(plan.tables, 0, tables, TierConfig(ssd="1GiB"), spec)
    own = sum(fields["tables"][name].hbm for name in whole)
    assert own == sum(bytes_for(rows, spec.row_bytes(DIM), None) for rows in whole.values())
    rest = slots_for(fields["hbm"] - own, spec.row_bytes(DIM), "lookahead")
    assert sum(cached) <= rest <= sum(cached) + 200
