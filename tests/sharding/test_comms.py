"""How the ranks talk: what they send, rounding on request, ids without repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import (
    ConfigError,
    EmbeddingConfig,
    GradientError,
    KeyedJaggedTensor,
    PoolingType,
    TierConfig,
    optim,
)
from tierstore.sharding import (
    CommsConfig,
    ShardedCollection,
    ShardingEnv,
    ShardingType,
    column_wise,
    construct_plan,
    data_parallel,
    row_wise,
    shard,
    table_wise,
)
from tierstore.sharding.table_sharding import TableSharding

DEDUP = CommsConfig(dedup=True)


def kinds(world: int) -> dict[str, dict[str, TableSharding]]:
    last = world - 1
    names = ["t0", "t1", "t2", "t3"]
    return {
        "table_wise": {name: table_wise(at % world) for at, name in enumerate(names)},
        "row_wise": dict.fromkeys(names, row_wise()),
        "column_wise": dict.fromkeys(names, column_wise([last, 0], None)),
        "mixed": {
            "t0": row_wise(),
            "t1": column_wise([0, last]),
            "t2": data_parallel(),
            "t3": table_wise(last),
        },
    }


def sequences() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(t.num_embeddings, t.embedding_dim, t.name, feature_names=t.feature_names)
        for t in cases.tables()
    ]


# -- bytes ---------------------------------------------------------------------------------


def expected_bytes(collection: ShardedCollection, batch: cases.Batch, pooled: bool) -> int:
    """The table of docs/sharding.md, from the plan and the batch alone."""
    rank, world, comms = collection.env.rank, collection.env.world_size, collection.comms
    wire = {"fp32": 4, "bf16": 2, "fp16": 2}
    total = 0
    for table in collection.configs:
        placement = collection.plan.table(table.name)
        replica = placement.sharding_type is ShardingType.DATA_PARALLEL
        for feature in table.feature_names:
            ids = batch.ids[feature]
            if comms.dedup:
                ids = [of_rank.unique() for of_rank in ids]
            bags = [len(lengths) for lengths in batch.lengths[feature]]
            for part in placement.shards:
                held = [((i >= part.row_start) & (i < part.row_start + part.rows)).sum() for i in ids]
                vectors = bags if pooled else [int(count) for count in held]
                lengths = bags[rank] if pooled else 1
                if part.rank != rank:
                    total += 4 * (lengths + int(held[rank]))
                    total += wire[comms.backward_precision] * part.columns * vectors[rank]
                elif not replica:
                    others = sum(vectors) - vectors[rank]
                    total += wire[comms.forward_precision] * part.columns * others
        used = torch.cat(
            [of_rank for feature in table.feature_names for of_rank in batch.ids[feature]]
        ).unique()
        for mine in placement.shards:
            for part in placement.shards:
                if mine.rank == rank != part.rank and mine.column_start != part.column_start:
                    begin = max(mine.row_start, part.row_start)
                    end = min(mine.row_start + mine.rows, part.row_start + part.rows)
                    total += 4 * int(((used >= begin) & (used < end)).sum())
    return total if world > 1 else 0


def count_bytes(world: int) -> None:
    env = ShardingEnv.from_process_group()
    batch = cases.batches(world, 1)[0]
    half = CommsConfig(forward_precision="fp16", backward_precision="bf16")
    for cuts in kinds(world).values():
        for comms in (CommsConfig(), half, DEDUP):
            for configs in (cases.tables(), sequences()):
                parts = sharded(configs, cuts, env, comms)
                pooled = isinstance(configs[0], tierstore.EmbeddingBagConfig)
                before = env.traffic.bytes_sent
                output = parts(batch.of([env.rank]))
                values = [output] if pooled else output.values()
                sum(part.values().sum() for part in values).backward()
                sent = env.traffic.bytes_sent - before
                assert sent == expected_bytes(parts, batch, pooled and not comms.dedup)
                parts.close()


def sharded(configs: list[Any], cuts: dict[str, TableSharding], env: ShardingEnv, comms: CommsConfig) -> Any:
    kind: Callable[..., Any] = tierstore.EmbeddingCollection
    if isinstance(configs[0], tierstore.EmbeddingBagConfig):
        kind = tierstore.EmbeddingBagCollection
    whole = kind(configs, config=cases.MEMORY, optimizer=optim.RowWiseAdagrad(lr=0.1))
    return shard(whole, construct_plan(configs, cuts, env.world_size), env, comms=comms)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_exchanged_are_those_of_the_documentation(world: int) -> None:
    run(world, count_bytes, world)


# -- rounding ------------------------------------------------------------------------------


def rounded() -> None:
    env = ShardingEnv.from_process_group()
    data = cases.batches(2, 2, empty=1)
    for precision, limit in (("bf16", 2e-2), ("fp16", 2e-3)):
        comms = CommsConfig(precision, precision)
        for cuts in kinds(2).values():
            cases.check(env, cuts, cases.tables(), data, optim.SGD(lr=0.1), tolerance=limit, comms=comms)
        cases.check(
            env, kinds(2)["mixed"], sequences(), data, optim.SGD(lr=0.1), tolerance=limit, comms=comms
        )
    exactly_rounded(env, data[0])
    overflowing(env, data[0])


def overflowing(env: ShardingEnv, batch: cases.Batch) -> None:
    """Every rank has rows whose gradients fp16 does not hold: they stay as they are."""
    tiers = TierConfig(hbm="all", check_gradients=True)
    whole = tierstore.EmbeddingBagCollection(cases.tables(), config=cases.MEMORY, optimizer=optim.SGD(lr=0.1))
    plan = construct_plan(whole, kinds(2)["table_wise"], 2)
    expected = whole.state_dict()
    parts = shard(whole, plan, env, config=tiers, comms=CommsConfig(backward_precision="fp16"))
    loss = parts(batch.of([env.rank])).values().sum() * 1e6
    with pytest.raises(GradientError, match="they were not updated"):
        loss.backward()
    torch.testing.assert_close(parts.state_dict(), expected, rtol=0, atol=0)


def exactly_rounded(env: ShardingEnv, batch: cases.Batch) -> None:
    """Whoever has a row; and replicas stay equal."""
    cuts = {"t0": table_wise(0), "t1": table_wise(1), "t2": data_parallel(), "t3": table_wise(0)}
    comms = CommsConfig("bf16", "bf16")
    whole = tierstore.EmbeddingBagCollection(cases.tables(), config=cases.MEMORY)
    expected = whole(batch.of([env.rank])).values().to(torch.bfloat16).to(torch.float32)
    parts = sharded(cases.tables(), cuts, env, comms)
    found = parts(batch.of([env.rank])).values()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found.square().sum().backward()
    (local,) = parts.shards.of("t2")
    values = torch.from_numpy(parts.engine.read_rows(local.local, torch.arange(64).numpy())[0].copy())
    of_first = values.clone()
    dist.broadcast(of_first, 0)
    torch.testing.assert_close(values, of_first, rtol=0, atol=0)


def test_rounding_on_request() -> None:
    run(2, rounded)
    with pytest.raises(ConfigError, match="forward_precision is 'int8'; use one of fp32, bf16, fp16"):
        CommsConfig("int8")


# -- ids without repeats -------------------------------------------------------------------


def asked_once(world: int) -> None:
    env = ShardingEnv.from_process_group()
    data = cases.batches(world, 2, empty=world - 1)
    shared = cases.batches(world, 2, shared=True)
    options: dict[str, Any] = {"tiers": cases.TIGHT, "tolerance": 2e-6, "comms": DEDUP}
    sgd = optim.SGD(lr=0.1)
    poolings = cases.tables(PoolingType.SUM, PoolingType.MEAN, PoolingType.MAX, PoolingType.SUM)
    weighted = cases.tables(PoolingType.SUM, PoolingType.MEAN)
    for cuts in kinds(world).values():
        cases.check(env, cuts, poolings, data, sgd, **options)
        cases.check(env, cuts, weighted, data, sgd, weighted=True, **options)
        cases.check(env, cuts, sequences(), data, sgd, **options)
    cases.check(env, kinds(world)["mixed"], weighted, shared, sgd, weighted=True, **options)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ids_are_asked_for_once(world: int) -> None:
    run(world, asked_once, world)


def prefetched() -> None:
    env = ShardingEnv.from_process_group()
    data = [batch.of([env.rank]) for batch in cases.batches(2, 5)]
    ends = []
    for ahead in (False, True):
        parts = sharded(cases.tables(), kinds(2)["mixed"], env, DEDUP)
        loader: Any = tierstore.prefetch(data, parts, depth=1, window=2) if ahead else data
        for features in loader:
            assert isinstance(features, KeyedJaggedTensor)
            parts(features).values().square().sum().backward()
        ends.append(parts.state_dict())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_prefetch_asks_once_too() -> None:
    run(2, prefetched)
