"""Plans count the rows that training uses: as the user says, or twice those that the last commit has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import ConfigError, EmbeddingBagConfig, KeyedJaggedTensor, TierConfig, optim
from tierstore import torchrec as mirror
from tierstore.errors import InfeasiblePlanError
from tierstore.placement import ShardingType
from tierstore.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from tierstore.sharding import (
    DistributedModelParallel,
    ShardingEnv,
    column_wise,
    construct_plan,
    data_parallel,
    row_wise,
    shard,
    table_wise,
)
from tierstore.sharding.touched_rows import twice_held

TABLES, ROWS, DIM, BATCH = 26, 10**9, 16, 8
TOUCHED = {f"t{n}": 20_000 for n in range(TABLES)}
CUTS = {"t0": row_wise(), "t1": column_wise([1, 0], [3, 7]), "t2": data_parallel(), "t3": table_wise(1)}


def many() -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(ROWS, DIM, f"t{n}", feature_names=[f"f{n}"]) for n in range(TABLES)]


class Model(nn.Module):
    def __init__(self, kind: Any = tierstore.EmbeddingBagCollection) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = kind(many(), device=torch.device("meta"), optimizer=optim.SGD(lr=0.1))
        self.over = nn.Linear(TABLES * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.sparse(features).values())


def batch(rank: int, step: int) -> KeyedJaggedTensor:
    """Ids of the whole table, of which each rank and step has its own."""
    ids = torch.arange(TABLES * BATCH) * 1_000_003 % (ROWS // 100) * 100 + 10 * rank + step
    return KeyedJaggedTensor(
        [f"f{n}" for n in range(TABLES)], ids, lengths=torch.ones(TABLES * BATCH, dtype=torch.int64)
    )


def tiers(path: str | None) -> TierConfig:
    return TierConfig(hbm="8MiB", uvm="8MiB", ssd="1GiB", path=path)


def first_training(path: str) -> None:
    rank = torch.distributed.get_rank()
    with pytest.raises(InfeasiblePlanError, match="the tables do not fit"):
        DistributedModelParallel(Model(), config=tiers(path), batch_size=BATCH)
    model = DistributedModelParallel(Model(), config=tiers(path), batch_size=BATCH, touched_rows=TOUCHED)
    for step in range(3):
        model(batch(rank, step)).sum().backward()
    model.commit()
    total = sum(s.ssd_bytes for _, s in model.plan.on_rank(rank))
    assert total <= model.sharded["sparse"].engine.config.ssd_cap <= 1.1 * (1 << 30)
    torch.save(model.sharded["sparse"].rows(ids_of("t3"), "t3"), f"{path}/t3.{rank}")
    model.close()


def ids_of(table: str) -> Tensor:
    every = [batch(rank, step)[f"f{table[1:]}"].values() for rank in range(2) for step in range(3)]
    return torch.cat(every).unique()


def second_training(path: str) -> None:
    rank = torch.distributed.get_rank()
    model = DistributedModelParallel(Model(), config=tiers(path), batch_size=BATCH)
    rows = model.sharded["sparse"].rows(ids_of("t3"), "t3")
    torch.testing.assert_close(rows, torch.load(f"{path}/t3.0"), rtol=0, atol=0)
    model(batch(rank, 3)).sum().backward()
    model.close()


def test_a_billion_rows_each_of_which_few_are_touched_fit(tmp_path: Path) -> None:
    run(2, first_training, str(tmp_path))
    run(2, second_training, str(tmp_path))
    run(1, second_training, str(tmp_path))


def of_the_mirror() -> None:
    kind, parallel = mirror.EmbeddingBagCollection, mirror.distributed.DistributedModelParallel
    tierstore.set_default_config(tiers(None))
    try:
        with pytest.raises(InfeasiblePlanError):
            parallel(Model(kind))
        with pytest.raises(ConfigError, match=r"touched_rows names 'x'"):
            parallel(Model(kind), touched_rows={"x": 3})
        model = parallel(Model(kind), touched_rows=TOUCHED)
        model(batch(torch.distributed.get_rank(), 0)).sum().backward()
        model.close()
    finally:
        tierstore.set_default_config(None)


def test_the_mirror_counts_touched_rows() -> None:
    run(2, of_the_mirror)


def commits(path: str) -> None:
    env = ShardingEnv.from_process_group()
    whole = tierstore.EmbeddingBagCollection(cases.tables(), config=cases.MEMORY, optimizer=optim.SGD(lr=0.1))
    config = TierConfig(hbm="24KiB", ssd="64MiB", path=path)
    collection = shard(whole, construct_plan(whole, CUTS, 2), env, config=config)
    for one in cases.batches(2, 2):
        collection(one.of([env.rank])).values().sum().backward()
    collection.commit()
    collection.close()


def used() -> Mapping[str, int]:
    features = {table.name: table.feature_names for table in cases.tables()}
    data = cases.batches(2, 2)
    return {
        name: len(torch.cat([ids for one in data for key in keys for ids in one.ids[key]]).unique())
        for name, keys in features.items()
    }


def counts(path: str) -> None:
    env = ShardingEnv.from_process_group()
    sizes = {table.name: table.num_embeddings for table in cases.tables()}
    expected = {name: min(sizes[name], 2 * rows) for name, rows in used().items()}
    with tierstore.EmbeddingBagCollection(
        cases.tables(), config=cases.MEMORY, optimizer=optim.SGD(lr=0.1)
    ) as whole:
        assert twice_held({"": whole}, env, path) == expected
        assert twice_held({"": whole}, env, None) == {}
        whole(cases.batches(2, 2)[0].of([0])).values().sum().backward()
        some = twice_held({"": whole}, env, None)
        assert 0 < some["t1"] < expected["t1"]
        assert twice_held({"": whole}, env, path) == expected


def test_rows_of_the_last_commit_are_counted_once(tmp_path: Path) -> None:
    rows = used()
    assert any(2 * rows[table.name] < table.num_embeddings for table in cases.tables())
    run(2, commits, str(tmp_path))
    for ranks in (1, 2, 3):
        run(ranks, counts, str(tmp_path))


WRONG: list[tuple[Any, str]] = [
    (3, "touched_rows is 3; give a mapping"),
    ({"x": 1}, "touched_rows names 'x', and the tables are"),
    ({"t0": 0}, "touched_rows of 't0' is 0; it must be an integer from 1 to num_embeddings, 1000000000"),
    ({"t0": ROWS + 1}, "touched_rows of 't0' is 1000000001"),
    ({"t0": True}, "touched_rows of 't0' is True"),
]


def refuses() -> None:
    for touched, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            DistributedModelParallel(Model(), config=tiers(None), touched_rows=touched)
    plan = construct_plan(many(), {name: table_wise(0) for name in TOUCHED}, 1, name="sparse")
    with pytest.raises(ConfigError, match="touched_rows is for the planner, and a plan is given"):
        DistributedModelParallel(Model(), plan=plan, config=tiers(None), touched_rows=TOUCHED)


def test_what_touched_rows_may_not_be() -> None:
    run(1, refuses)


def test_a_demand_says_touched_rows_and_the_store_keeps_room_for_more() -> None:
    (config,) = [EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"])]
    machines = Topology(1, 1, "8MiB", "512MiB", "4GiB", device="cpu")

    def plan(**demand: Any) -> Any:
        planner = EmbeddingShardingPlanner(
            machines, {"t": ParameterConstraints(**demand)}, search_seconds=0.1
        )
        return planner.plan([config]).table("t")

    with pytest.raises(InfeasiblePlanError):
        plan()
    found = plan(touched_rows=10_000_000, sharding_types=["table_wise"])
    assert found.sharding_type is ShardingType.TABLE_WISE
    assert found.shards[0].rows == ROWS
    assert found.shards[0].ssd_bytes > 3.9 * (1 << 30)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match=r"touched_rows is .*; it must be a positive integer"):
            ParameterConstraints(touched_rows=wrong)
    with pytest.raises(ConfigError, match="'t': touched_rows is 1000000001"):
        plan(touched_rows=ROWS + 1)
