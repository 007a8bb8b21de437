"""Row-wise Adagrad of tables cut by columns: its one number per row is that of the whole row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    GradientError,
    TierConfig,
    optim,
)
from tierstore.sharding import (
    CommsConfig,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    ShardPlacement,
    TablePlacement,
    column_wise,
    construct_plan,
    data_parallel,
    grid_shard,
    row_wise,
    shard,
    table_column_wise,
    table_wise,
)

ADAGRAD = optim.RowWiseAdagrad(lr=0.1)
ADAM = optim.PartialRowWiseAdam(lr=0.05, eps=1e-3)
GLOBAL = optim.RowWiseAdagrad(lr=0.1, weight_decay=0.1, weight_decay_mode="decoupled_global")
DECAYED = optim.RowWiseAdagrad(lr=0.1, weight_decay=0.01, weight_decay_mode="l2")
LIMIT = 2e-6


def any_cut_of_columns(world: int) -> None:
    env = ShardingEnv.from_process_group()
    last = world - 1
    cuts = {
        "t0": column_wise([last, 0], [5, 1]),
        "t1": column_wise([0, last, 0]),
        "t2": column_wise([last, 0]),
        "t3": row_wise() if world > 1 else table_wise(0),  # in one tier group with a cut table
    }
    for optimizer, tiers in (
        (ADAGRAD, cases.TIGHT),
        (DECAYED, cases.MEMORY),
        (ADAM, cases.TIGHT),
        (GLOBAL, cases.MEMORY),
    ):
        data = cases.batches(world, 3, empty=last)
        cases.check(env, cuts, cases.tables(), data, optimizer, tiers=tiers, tolerance=LIMIT)
    dedup = CommsConfig(dedup=True)
    cases.check(env, cuts, cases.tables(), data, ADAGRAD, tolerance=LIMIT, comms=dedup)
    sequences = [
        EmbeddingConfig(t.num_embeddings, t.embedding_dim, t.name, feature_names=t.feature_names)
        for t in cases.tables()
    ]
    cases.check(env, cuts, sequences, data, ADAGRAD, tiers=cases.TIGHT, tolerance=LIMIT)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_cut_of_columns_is_the_single_process(world: int) -> None:
    run(world, any_cut_of_columns, world)


def cuts_of_hosts() -> None:
    env = ShardingEnv.from_process_group()
    cuts = {
        "t0": table_column_wise(1),
        "t1": grid_shard([1, 0]),
        "t2": data_parallel(),
        "t3": grid_shard([0]),
    }
    data = cases.batches(4, 3, empty=1)
    cases.check(env, cuts, cases.tables(), data, ADAGRAD, tolerance=LIMIT, ranks_per_host=2)


def test_cuts_within_and_over_hosts_are_the_single_process() -> None:
    run(4, cuts_of_hosts)


def ranges_of_columns_with_other_rows() -> None:
    """Columns 0 to 3 cut after row 20, columns 4 to 9 after row 40; one rank has none of it."""
    env = ShardingEnv.from_process_group()
    config = EmbeddingBagConfig(57, 10, "t1", feature_names=["c"])
    shards = [(0, 0, 20, 0, 4), (1, 20, 37, 0, 4), (1, 0, 40, 4, 6), (0, 40, 17, 4, 6)]
    placed = tuple(ShardPlacement(*place, 0, 0, 0) for place in shards)
    table = TablePlacement("t1", ShardingType.GRID_SHARD, placed, num_embeddings=57, embedding_dim=10)
    plan = ShardingPlan((table,), 3, 3)
    whole, twin = (EmbeddingBagCollection([config], config=cases.MEMORY, optimizer=ADAGRAD) for _ in range(2))
    parts = shard(twin, plan, env)
    for batch in cases.batches(3, 3):
        everyone = whole(batch.of([0, 1, 2])).values()
        (everyone.square().sum() / 3).backward()
        parts(batch.of([env.rank])).values().square().sum().backward()
    ids = torch.arange(57)
    torch.testing.assert_close(parts.rows(ids), whole.rows(ids), rtol=LIMIT, atol=LIMIT)
    state: Tensor = parts.optimizer_rows(ids)["sum"]
    torch.testing.assert_close(state, whole.optimizer_rows(ids)["sum"], rtol=LIMIT, atol=LIMIT)
    parts.close()


def test_ranges_of_columns_may_have_other_cuts_of_rows() -> None:
    run(3, ranges_of_columns_with_other_rows)


def beside_clipped_norms() -> None:
    """t1 is cut into columns of the dim of t0 and t3, whose clipped norms it does not have."""
    env = ShardingEnv.from_process_group()
    cuts = {
        "t0": table_wise(0),
        "t1": column_wise([0, 1], [6, 4]),
        "t2": table_wise(1),
        "t3": row_wise(),
    }
    for kind in (optim.RowWiseAdagrad, optim.PartialRowWiseAdam):
        optimizers = {"t1": kind(lr=0.1), "*": kind(lr=0.1, clip_grad_norm=0.05)}
        cases.check(env, cuts, cases.tables(), cases.batches(2, 3), optimizers, tolerance=1e-5)


def test_rows_with_clipped_norms_beside_cut_ones() -> None:
    run(2, beside_clipped_norms)


def a_bad_gradient(optimizer: optim.OptimizerSpec) -> None:
    """NaN in one column: as in one process no column of the row is updated, on any rank."""
    env = ShardingEnv.from_process_group()
    configs = cases.tables()[1:2]
    whole = EmbeddingBagCollection(configs, config=cases.MEMORY, optimizer=optimizer)
    plan = construct_plan(configs, {"t1": column_wise([0, 1])}, 2)
    parts = shard(whole, plan, env, config=TierConfig(hbm="all", check_gradients=True))
    batch = cases.batches(2, 1)[0]
    used = torch.cat(batch.ids["c"]).unique()
    before = parts.rows(used)
    values = parts(batch.of([env.rank])).values()
    gradient = torch.ones_like(values)
    gradient[:, 7] = torch.nan
    with pytest.raises(GradientError, match=f"the gradient of {len(used)} row"):
        values.backward(gradient)
    assert torch.equal(parts.rows(used), before)
    assert not any(state.any() for state in parts.optimizer_rows(used).values())
    parts.close()


@pytest.mark.parametrize("optimizer", [ADAGRAD, ADAM, optim.SGD(lr=0.1), optim.Adagrad(lr=0.1)])
def test_a_bad_gradient_of_one_column_leaves_the_whole_row(optimizer: optim.OptimizerSpec) -> None:
    run(2, a_bad_gradient, optimizer)
