"""Sharded EmbeddingBagCollections against the single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import EmbeddingBagConfig, InputError, KeyedJaggedTensor, PoolingType, optim
from tierstore.sharding import (
    ShardingEnv,
    column_wise,
    construct_plan,
    data_parallel,
    grid_shard,
    row_wise,
    shard,
    table_column_wise,
    table_row_wise,
    table_wise,
)


def every_cut(world: int) -> None:
    env = ShardingEnv.from_process_group()
    last = world - 1
    rows = {1: [50], 2: [13, 37], 4: [20, 0, 25, 5]}[world]
    kinds = {
        "table_wise": {
            "t0": table_wise(last),
            "t1": table_wise(0),
            "t2": table_wise(last),
            "t3": table_wise(0),
        },
        "row_wise": {"t0": row_wise(rows), "t1": row_wise(), "t2": row_wise(), "t3": row_wise()},
        "column_wise": {
            "t0": column_wise([last, 0], [5, 1]),
            "t1": column_wise([0, last, 0]),
            "t2": column_wise([last, 0]),
            "t3": column_wise([0]),
        },
        "data_parallel": dict.fromkeys(["t0", "t1", "t2", "t3"], data_parallel()),
        "mixed": {
            "t0": row_wise(rows),
            "t1": column_wise([0, last]),
            "t2": data_parallel(),
            "t3": table_wise(last),
        },
    }
    single = cases.batches(world, 3, longest=1)
    several = cases.batches(world, 3, longest=4, empty=last)
    sums, means = cases.tables(), cases.tables(PoolingType.MEAN)
    adagrad, adam, sgd = optim.RowWiseAdagrad(lr=0.1), optim.Adam(lr=0.05), optim.SGD(lr=0.1)
    for name, cuts in kinds.items():
        # partial sums of a bag come from several ranks
        limit = 1e-6 if name in ("row_wise", "mixed") else 0.0
        cases.check(env, cuts, sums, single, adam if name in ("column_wise", "mixed") else adagrad)
        cases.check(env, cuts, sums, several, sgd, tiers=cases.TIGHT, weighted=True, tolerance=limit)
        cases.check(env, cuts, means, several, adam, tolerance=limit)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_cut_is_the_single_process(world: int) -> None:
    run(world, every_cut, world)


def batch_sizes_per_feature(world: int) -> None:
    """And poolings that differ between tables, under row-wise cuts too."""
    env = ShardingEnv.from_process_group()
    last = world - 1
    kinds = {
        "row_wise": dict.fromkeys(["t0", "t1", "t2", "t3"], row_wise()),
        "mixed": {
            "t0": row_wise(),
            "t1": table_wise(last),
            "t2": data_parallel(),
            "t3": column_wise([last, 0]),
        },
    }
    data = cases.batches(world, 2, empty=last, shared=True)
    for cuts in kinds.values():
        for weighted in (False, True):
            configs = cases.tables(PoolingType.MEAN, PoolingType.SUM)
            cases.check(
                env,
                cuts,
                configs,
                data,
                optim.SGD(lr=0.1),
                tiers=cases.TIGHT,
                weighted=weighted,
                tolerance=1e-6,
            )
    configs = cases.tables(PoolingType.MEAN, PoolingType.MAX, PoolingType.SUM, PoolingType.MAX)
    cases.check(env, kinds["mixed"], configs, cases.batches(world, 2), optim.SGD(lr=0.1), tolerance=1e-6)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_batch_sizes_and_poolings_may_differ(world: int) -> None:
    run(world, batch_sizes_per_feature, world)


def cuts_of_hosts() -> None:
    env = ShardingEnv.from_process_group()
    cuts = {"t0": table_row_wise(1), "t1": table_column_wise(1), "t2": grid_shard([1, 0]), "t3": row_wise()}
    data = cases.batches(4, 2, longest=1)
    cases.check(env, cuts, cases.tables(), data, optim.Adam(lr=0.05), tiers=cases.TIGHT, ranks_per_host=2)
    data = cases.batches(4, 2, empty=1)
    means = cases.tables(PoolingType.MEAN)
    cases.check(env, cuts, means, data, optim.SGD(lr=0.1), tolerance=1e-6, ranks_per_host=2)


def test_cuts_within_and_over_hosts() -> None:
    run(4, cuts_of_hosts)


def wrong_inputs() -> None:
    env = ShardingEnv.from_process_group()
    configs = cases.tables()
    whole = tierstore.EmbeddingBagCollection(configs, config=cases.MEMORY, optimizer=optim.SGD(lr=0.1))
    cuts = {"t0": row_wise(), "t1": table_wise(1), "t2": column_wise([0, 1]), "t3": data_parallel()}
    parts = shard(whole, construct_plan(configs, cuts, 2), env)
    batch = cases.batches(2, 1)[0].of([env.rank])
    wrong = cases.batches(2, 1)[0].of([env.rank])
    if env.rank == 1:
        wrong.values()[0] = 57
    with pytest.raises(
        InputError, match=r"rank 1: feature 'c': id 57 at position 0 is out of range \[0, 57\)"
    ):
        parts(wrong)
    missing = batch if env.rank == 0 else batch.permute([0, 1, 3])
    with pytest.raises(InputError, match="rank 1: feature 'd' of table 't3' is missing"):
        parts(missing)
    with pytest.raises(InputError, match="rank 0: "):
        parts(batch if env.rank else "nonsense")
    parts(batch).values().sum().backward()  # and it goes on
    with torch.no_grad():
        parts.eval()(batch)


def test_every_rank_raises_the_error_of_one() -> None:
    run(2, wrong_inputs)


def weights_of_one_rank() -> None:
    """That one's weights require gradients, those of the others do not, as when their batch is empty."""
    rank = torch.distributed.get_rank()
    cuts = {"t0": row_wise(), "t1": table_wise(1), "t2": column_wise([0, 1]), "t3": data_parallel()}
    for optimizer in (optim.SGD(lr=0.1), None):
        found = []
        for learn in ([0], [0, 1]):
            options: dict[str, Any] = {"config": cases.MEMORY, "optimizer": optimizer}
            whole = tierstore.EmbeddingBagCollection(cases.tables(), is_weighted=True, **options)
            parts = shard(whole, construct_plan(whole, cuts, 2))
            batch = cases.batches(2, 1)[0].of([rank], weighted=True)
            batch.weights().requires_grad_(rank in learn)
            parts(batch).values().square().sum().backward()
            found.append((batch.weights().grad, parts.state_dict()))
        assert (found[0][0] is None) == (rank == 1)
        if rank == 0:
            assert torch.equal(found[0][0], found[1][0])
        torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)


def test_weights_may_require_gradients_on_one_rank() -> None:
    run(2, weights_of_one_rank)


def huge() -> None:
    """10^12 rows: more than any memory, and ids of more than 32 bits on the wire."""
    env = ShardingEnv.from_process_group()
    rows = 10**12
    configs = [EmbeddingBagConfig(rows, 8, name, feature_names=[name]) for name in ("a", "b", "c")]
    cuts = {"a": row_wise(), "b": column_wise([1, 0]), "c": table_wise(1)}
    options: dict[str, Any] = {"optimizer": optim.Adagrad(lr=0.1), "seed": 3}
    whole, twin = (tierstore.EmbeddingBagCollection(configs, config=cases.TIGHT, **options) for _ in range(2))
    parts = shard(twin, construct_plan(configs, cuts, 2), env)
    ids = torch.randint(0, rows, (60,), generator=torch.Generator().manual_seed(0))
    batch = KeyedJaggedTensor(["a", "b", "c"], ids, lengths=torch.ones(60, dtype=torch.int64))
    own = KeyedJaggedTensor(
        ["a", "b", "c"],
        ids.view(3, 20)[:, 10 * env.rank : 10 * env.rank + 10].reshape(-1),
        lengths=torch.ones(30, dtype=torch.int64),
    )
    for _ in range(2):
        expected, found = whole(batch).values(), parts(own).values()
        torch.testing.assert_close(found, expected[10 * env.rank : 10 * env.rank + 10], rtol=0, atol=0)
        (expected.square().sum() / 2).backward()
        found.square().sum().backward()
    for number, name in enumerate(("a", "b", "c")):
        touched = ids.view(3, 20)[number]
        torch.testing.assert_close(parts.rows(touched, name), whole.rows(touched, name), rtol=0, atol=0)


def test_tables_beyond_any_memory() -> None:
    run(2, huge)


def several_calls() -> None:
    """Exchanges go through memory that is kept: no call may touch what another still needs."""
    env = ShardingEnv.from_process_group()
    configs = cases.tables()
    cuts = {"t0": row_wise(), "t1": table_wise(1), "t2": column_wise([0, 1]), "t3": data_parallel()}
    options: dict[str, Any] = {"config": cases.MEMORY, "optimizer": optim.SGD(lr=0.1), "seed": 3}
    whole, twin = (tierstore.EmbeddingBagCollection(configs, is_weighted=True, **options) for _ in range(2))
    parts = shard(twin, construct_plan(configs, cuts, 2), env)
    first, second, third = cases.batches(2, 3, longest=1)
    losses = []
    for model, ranks in ((whole, [0, 1]), (parts, [env.rank])):
        outputs = [model(batch.of(ranks, weighted=True)).values() for batch in (first, second)]
        with torch.no_grad():
            model(third.of(ranks, weighted=True))
        losses.append((outputs[0].square().sum() + outputs[1].square().sum()) / len(ranks))
        losses[-1].backward(retain_graph=True)
        losses[-1].backward()
    for table in configs:
        ids = torch.arange(table.num_embeddings)
        torch.testing.assert_close(
            parts.rows(ids, table.name), whole.rows(ids, table.name), rtol=1e-6, atol=1e-6
        )


def test_several_calls_before_one_backward_pass() -> None:
    run(2, several_calls)
