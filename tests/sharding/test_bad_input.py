"""What users get wrong: said as tierstore's error, on every rank, and before anything has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import TIMEOUT, run
from tierstore import (
    ConfigError,
    EmbeddingBagConfig,
    InputError,
    KeyedJaggedTensor,
    PoolingType,
    StoreCorruptError,
    StoreMismatchError,
    TierConfig,
    optim,
)
from tierstore.sharding import (
    DistributedModelParallel,
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardingEnv,
    column_wise,
    construct_plan,
    grid_shard,
    row_wise,
    shard,
    table_wise,
)

CUTS = {"a": row_wise(), "b": table_wise(1)}
OTHERS = {"a": table_wise(0), "b": row_wise()}


def tables(rows: int = 50) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(rows, 8, "a", feature_names=["a"]),
        EmbeddingBagConfig(50, 8, "b", feature_names=["b"]),
    ]


def bags(configs: list[EmbeddingBagConfig] | None = None, **options: Any) -> Any:
    options = {"config": cases.MEMORY, "optimizer": optim.SGD(lr=0.1), **options}
    return tierstore.EmbeddingBagCollection(tables() if configs is None else configs, **options)


def sharded(whole: Any = None, cuts: Any = CUTS, **options: Any) -> ShardedCollection:
    whole = bags() if whole is None else whole
    return shard(whole, construct_plan(whole, cuts, 2), **options)


def features(*keys: str) -> KeyedJaggedTensor:
    count = 3 * len(keys)
    return KeyedJaggedTensor(
        list(keys), torch.arange(count) % 50, lengths=torch.ones(count, dtype=torch.int64)
    )


# -- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda: table_wise("0"), r"ranks must be a list of integers, got \['0'\]"),
        (lambda: column_wise([]), r"ranks must be a list of integers, got \[\]"),
        (lambda: column_wise(0), "ranks must be a list of integers, got 0"),
        (lambda: row_wise(25), "sizes must be a list of integers, got 25"),
        (lambda: row_wise([25.0, 25.0]), "sizes must be a list of integers"),
        (lambda: grid_shard("01"), "hosts must be a list of integers"),
        (lambda: "row_wise", r"the cut of table 'a' is 'row_wise'; use row_wise\(\)"),
    ],
)
def test_cuts_that_are_none(cut: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        construct_plan(tables(), {"a": cut(), "b": table_wise(0)}, 2)


@pytest.mark.parametrize(("ranks", "per_host"), [(0, None), ("2", None), (4, 3), (2, 0), (2, 1.0)])
def test_numbers_of_ranks_that_are_none(ranks: Any, per_host: Any) -> None:
    with pytest.raises(ConfigError, match=r"ranks, .* per host: give integers"):
        construct_plan(tables(), CUTS, ranks, per_host)


def arguments() -> None:
    from torchrec.distributed.types import ShardingEnv as TheirEnv
    from torchrec.distributed.types import ShardingPlan as TheirPlan

    whole = bags()
    plan = construct_plan(whole, CUTS, 2)
    with pytest.raises(ConfigError, match=r"plan is a torchrec.*ShardingPlan; use a tierstore"):
        DistributedModelParallel(nn.Sequential(whole), plan=TheirPlan({}))
    with pytest.raises(ConfigError, match=r"plan is a builtins.NoneType"):
        shard(whole, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"config is {'hbm': 1}; use a TierConfig"):
        shard(whole, plan, config={"hbm": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="comms is 'bf16'; use a CommsConfig"):
        shard(whole, plan, comms="bf16")  # type: ignore[arg-type]
    by_columns = construct_plan(whole, {"a": column_wise([0, 1]), "b": table_wise(1)}, 2)
    with pytest.raises(ConfigError, match="table 'a': lamb needs the norms of whole rows"):
        shard(bags(optimizer=optim.LAMB()), by_columns)
    with pytest.raises(ConfigError, match="env is 5; use None, or ShardingEnv"):
        shard(whole, plan, 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Linear cannot be sharded; build an EmbeddingBagCollection"):
        shard(nn.Linear(1, 1), plan)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the model has no collection to shard; build"):
        DistributedModelParallel(nn.Linear(1, 1), plan=plan)
    only_one = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ConfigError, match="this rank is not in the group"):
            ShardingEnv.from_process_group(only_one)
    for env in (dist.group.WORLD, TheirEnv.from_process_group(dist.group.WORLD)):
        found = shard(bags(), plan, env)  # type: ignore[arg-type]
        assert found(features("a", "b")).values().shape == (3, 16)


def test_arguments_of_the_wrong_kind() -> None:
    run(2, arguments)


def arguments_of_one_rank() -> None:
    """Every rank says so, and none waits."""
    rank = dist.get_rank()
    env = ShardingEnv.from_process_group()
    for group in (env.inputs, env.outputs):  # torch's own default is half an hour
        assert group._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
    assert ShardingEnv.of(None) is ShardingEnv.of(
        dist.group.WORLD
    )  # whose sockets are for each pair of ranks
    plan = construct_plan(tables(), CUTS, 2)
    with pytest.raises(ConfigError, match=r"rank 0: plan is a builtins\.NoneType"):
        shard(bags(), plan if rank else None, env)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^plan is a builtins\.NoneType"):  # once, and not for each rank
        shard(bags(), None, env)  # type: ignore[arg-type]
    for other, what in (
        (bags(is_weighted=True), "tables"),
        (bags([replace(table, pooling=PoolingType.MEAN) for table in tables()]), "tables"),
        (bags(optimizer=optim.Adam(), seed=1), "optimizer, seed"),
    ):
        with pytest.raises(ConfigError, match=f"rank 1 was given other {what} than rank 0"):
            shard(other if rank else bags(), plan, env)
    with pytest.raises(ConfigError, match="rank 1 was given other path or engine than"):
        shard(bags(), plan, env, config=TierConfig(hbm="1MiB", path="anywhere") if rank else cases.MEMORY)
    second = bags([EmbeddingBagConfig(9, 4, "x", feature_names=["a"])])
    with pytest.raises(ConfigError, match="rank 1 was given other collections than"):
        DistributedModelParallel(nn.Sequential(bags(), *[second] * rank), env, plan=plan)
    with pytest.raises(ConfigError, match="rank 1 was given other plan than"):
        DistributedModelParallel(nn.Sequential(bags()), env, plan=None if rank else plan)
    with pytest.raises(
        ConfigError, match="0 is sharded already; give DistributedModelParallel the unsharded"
    ):
        DistributedModelParallel(nn.Sequential(shard(bags(), plan, env)), env, plan=plan)


def test_arguments_of_one_rank() -> None:
    run(2, arguments_of_one_rank)


# -- models --------------------------------------------------------------------------------


class Twice(nn.Module):
    """One collection under two names, and perhaps a table that is no collection."""

    def __init__(self, single: nn.Module | None = None) -> None:
        super().__init__()
        self.first = bags()
        self.second = nn.ModuleList([self.first])
        self.single = single

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.first(batch).values() + self.second[0](batch).values()


def models() -> None:
    model = Twice()
    dmp = DistributedModelParallel(model, plan=construct_plan(model.first, CUTS, 2))
    assert isinstance(model.first, ShardedEmbeddingBagCollection)
    assert model.second[0] is model.first
    dmp(features("a", "b")).sum().backward()
    one = Twice()
    rows = one.state_dict()
    assert list(dmp.state_dict()) == list(rows)

    plan = construct_plan(one.first, CUTS, 2)
    table = {"config": cases.MEMORY, "name": "own"}
    alone = Twice(tierstore.TieredEmbedding(9, 4, **table))
    with pytest.raises(ConfigError, match="single is a TieredEmbedding, which every rank would train"):
        DistributedModelParallel(alone, plan=plan)
    assert isinstance(alone.first, tierstore.EmbeddingBagCollection)
    assert not isinstance(alone.first, ShardedCollection)
    alone.single = tierstore.TieredEmbedding(9, 4, optimizer=None, **table)
    DistributedModelParallel(alone, plan=plan)


def test_models_with_a_collection_twice_and_with_other_tables() -> None:
    run(2, models)


# -- ids -----------------------------------------------------------------------------------


def ids() -> None:
    rank = dist.get_rank()
    parts = sharded()
    with pytest.raises(InputError, match=r"rank 1: KeyedJaggedTensor: keys must be unique, but \['a'\]"):
        parts(features("a", "a", "b") if rank else features("a", "b"))
    different: list[tuple[Any, str]] = [
        ([7 + rank], "a"),
        ([7] * (1 + rank), "a"),
        ([7], "ab"[rank]),
        (["x", [7]][rank], "a"),
    ]
    for found, table in different:
        with pytest.raises(ConfigError, match="rank 1 was given other table or ids than rank 0"):
            parts.rows(found, table)

    def load(found: Any, table: str) -> None:
        parts.load_rows(found, torch.ones(2, 8), None, table)

    for call in (parts.rows, parts.optimizer_rows, load):
        with pytest.raises(InputError, match=r"table 'a': id 50 at position 1 is out of range \[0, 50\)"):
            call([3, 50], "a")
        with pytest.raises(InputError, match="there is no table 'zz'"):
            call([3, 4], "zz")
    with pytest.raises(InputError, match=r"keys must be unique, but \['b'\] are repeated"):
        bags()(features("a", "b", "b"))


def test_ids_of_one_rank() -> None:
    run(2, ids)


# -- commits -------------------------------------------------------------------------------


def committed(path: str) -> None:
    tiers = TierConfig(hbm="24KiB", path=path)
    first = sharded(config=tiers)
    first(features("a", "b")).values().sum().backward()
    first.commit({"step": 1 + dist.get_rank()})
    assert first.committed_extra() == {"step": 1}  # rank 0's
    for extra, message in (
        ([1], r"extra is \[1\]; give a dictionary"),
        ({"step": torch.ones(1)}, "extra must be plain JSON values: Object of type Tensor"),
        ({"step": float("nan")}, "extra must be plain JSON values"),
    ):
        with pytest.raises(ConfigError, match=f"^rank 1: {message}"):
            first.commit(extra if dist.get_rank() else {})  # type: ignore[arg-type]
    first.close()
    for whole, message in (
        (bags(tables(60)), r"table 'a' is \(60, 8\), but \(50, 8\) in the commit in"),
        (bags(tables()[:1]), "has rows of table 'b', which is not among"),
        (bags(seed=5), "the initial rows of table 'a' were committed with seed"),
    ):
        for cuts in (CUTS, OTHERS):
            own = {config.name: cuts[config.name] for config in whole.embedding_bag_configs()}
            with pytest.raises((StoreMismatchError, ConfigError), match=f"{message}|does not fit"):
                sharded(whole, own, config=tiers)
    again = sharded(cuts=OTHERS, config=tiers)
    assert again.committed_extra() == {"step": 1}
    again.close(commit=False)


def not_a_file(path: str) -> None:
    with pytest.raises(StoreCorruptError, match=r"COMMIT.json is not a regular file"):
        sharded(config=TierConfig(hbm="24KiB", path=path))
    # what rank 0 has opened is closed when rank 1 fails
    for tiers in (TierConfig(hbm=64 if dist.get_rank() else "24KiB", path=f"{path}/twice"),) * 2:
        with pytest.raises(ConfigError, match="rank 1: the hbm budget of 64 bytes"):
            sharded(config=tiers)


def damaged(path: str, text: str) -> None:
    if dist.get_rank() == 0:
        Path(path, "COMMIT.json").write_text(text)
    dist.barrier()
    with pytest.raises(StoreCorruptError, match=r"COMMIT.json is damaged"):
        sharded(config=TierConfig(hbm="24KiB", path=path))


def test_commits_of_other_tables_and_damaged_ones(tmp_path: Path) -> None:
    (tmp_path / "COMMIT.json").mkdir()
    run(2, not_a_file, str(tmp_path))
    (tmp_path / "COMMIT.json").rmdir()
    run(2, committed, str(tmp_path))
    record = json.loads((tmp_path / "COMMIT.json").read_text())
    entry = record["collections"][""]
    for changed in (
        [],
        "[" * 100_000,
        {**record, "number": "1"},
        {**record, "format": 2},
        {**record, "collections": {"": {**entry, "ranks": [1]}}},
        {**record, "collections": {"": {**entry, "folder": "../elsewhere"}}},
        {**record, "collections": {"": {**entry, "plan": {}}}},
        {**record, "collections": {"": 5}},
        {**record, "collections": {}},
        {key: value for key, value in record.items() if key != "extra"},
    ):
        run(2, damaged, str(tmp_path), changed if isinstance(changed, str) else json.dumps(changed))
