"""Optimizers by table in sharded collections: each table's bits in a single process, state dicts, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import ConfigError, TierConfig, optim
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

OPTIMIZERS: dict[str, Any] = {
    "t0": optim.PartialRowWiseAdam(lr=0.05, eps=1e-3),
    "t1": optim.Adam(lr=0.05),
    "t2": optim.SGD(lr=0.1, momentum=0.9),
    "*": optim.SGD(lr=0.2),
}
LIMIT = 2e-6
ROOMY = TierConfig(hbm="96KiB", uvm="64KiB", ssd="64MiB", engine="memory")


def every_cut(world: int) -> None:
    env, last = ShardingEnv.from_process_group(), world - 1
    whole = {"t1": table_wise(0), "t2": table_wise(last), "t3": data_parallel()}
    data = cases.batches(world, 3, empty=last)
    for tiers in (cases.MEMORY, ROOMY):
        cases.check(env, {"t0": table_wise(0), **whole}, cases.tables(), data, OPTIMIZERS, tiers=tiers)
    by_rows = {**whole, "t0": row_wise() if world > 1 else table_wise(0)}  # bags are added in another order
    cases.check(env, by_rows, cases.tables(), data, OPTIMIZERS, tolerance=LIMIT)
    by_columns = {**whole, "t0": column_wise([last, 0], [5, 1]), "t1": column_wise([0, last, 0])}
    cases.check(env, by_columns, cases.tables(), data, OPTIMIZERS, tolerance=LIMIT)


@pytest.mark.parametrize("world", [1, 2])
def test_every_table_is_that_of_a_single_process(world: int) -> None:
    run(world, every_cut, world)


class Model(nn.Module):
    def __init__(self, config: TierConfig, optimizer: Any = None) -> None:
        super().__init__()
        self.sparse = tierstore.EmbeddingBagCollection(
            cases.tables(), config=config, optimizer=optimizer or OPTIMIZERS
        )

    def forward(self, batch: Any) -> torch.Tensor:
        return self.sparse(batch).values()


def parallel(cut: Any, config: TierConfig = cases.MEMORY) -> DistributedModelParallel:
    model = Model(cases.MEMORY)
    cuts = {"t0": cut, "t1": row_wise(), "t2": table_wise(1), "t3": data_parallel()}
    plan = construct_plan(model.sparse, cuts, dist.get_world_size(), name="sparse")
    return DistributedModelParallel(model, plan=plan, config=config)


def train(dmp: DistributedModelParallel) -> None:
    for batch in cases.batches(2, 2):
        dmp(batch.of([dist.get_rank()])).square().sum().backward()


def groups_and_states(path: str) -> None:
    config = TierConfig(hbm="1MiB", path=path)
    first = parallel(table_wise(0), config)
    groups = first.fused_optimizer.param_groups
    assert [group["tables"] for group in groups] == [["t0"], ["t1"], ["t2"], ["t3"]]
    groups[0]["lr"] = 0.25
    train(first)
    state, rows = first.fused_optimizer.state_dict(), first.state_dict()
    assert set(state["state"]["sparse.embedding_bags.t0.weight"]) == {
        "t0.step",
        "t0.exp_avg",
        "t0.exp_avg_sq",
    }
    first.commit()
    loaded = parallel(column_wise([0, 1]))
    loaded.load_state_dict(rows)
    loaded.fused_optimizer.load_state_dict(state)
    assert loaded.fused_optimizer.param_groups[0]["lr"] == 0.25
    first.close()
    reopened = parallel(column_wise([1, 0]), config)  # another plan: the commit's rows are cut anew
    reopened.fused_optimizer.param_groups[0]["lr"] = 0.25
    for found in (loaded, reopened):
        torch.testing.assert_close(found.fused_optimizer.state_dict()["state"], state["state"])
        torch.testing.assert_close(found.state_dict(), rows)
    train(loaded)
    train(reopened)
    torch.testing.assert_close(loaded.state_dict(), reopened.state_dict(), rtol=LIMIT, atol=LIMIT)
    loaded.close()
    reopened.close(commit=False)


def test_groups_and_state_dicts_of_other_plans(tmp_path: Path) -> None:
    run(2, groups_and_states, str(tmp_path / "store"))


def wrong_ones() -> None:
    def sharded(optimizer: Any, cut: Any) -> Any:
        model = Model(cases.MEMORY, optimizer)
        cuts = {"t0": cut, "t1": table_wise(0), "t2": table_wise(1), "t3": table_wise(0)}
        return shard(model.sparse, construct_plan(model.sparse, cuts, 2))

    with pytest.raises(ConfigError, match="some tables of the collection are frozen"):
        sharded({"t0": None, "*": optim.SGD()}, table_wise(0))
    with pytest.raises(ConfigError, match="table 't0': lars_sgd needs the norms of whole rows"):
        sharded({"t0": optim.LarsSGD(), "*": optim.SGD()}, column_wise([0, 1]))
    with pytest.raises(ConfigError, match="table 't0': clip_grad_norm needs the norms of whole rows"):
        sharded(optim.SGD(clip_grad_norm=1.0), column_wise([0, 1]))
    sharded({"t1": optim.LarsSGD(), "*": optim.SGD()}, column_wise([0, 1])).close()


def test_what_cannot_be_sharded() -> None:
    run(2, wrong_ones)


def hooks_and_limits() -> None:
    """Hooks and clipping of whole rows, wherever they are; not of columns."""
    env = ShardingEnv.from_process_group()
    cuts = {"t0": row_wise(), "t1": table_wise(1), "t2": data_parallel(), "t3": column_wise([0, 1])}
    spec = {"t3": optim.SGD(lr=0.1), "*": optim.Adam(lr=0.05, clip_grad_norm=0.5, clip_grad_value=0.4)}
    whole, twin = (Model(cases.MEMORY, spec).sparse for _ in range(2))
    for module in (whole, twin):
        for name in ("t0", "t2"):
            module.register_gradient_hook(lambda ids, grads: grads * (ids % 3).unsqueeze(1), name)
    parts = shard(twin, construct_plan(twin, cuts, env.world_size), env)
    for batch in cases.batches(2, 3):
        full = whole(batch.of([0, 1])).values()
        own = parts(batch.of([env.rank])).values()
        begin = sum(batch.sizes[: env.rank])
        (full.square().sum() / 2).backward()
        own.square().sum().backward()
        torch.testing.assert_close(own, full[begin : begin + len(own)])
    rows = parts.state_dict()
    for name, expected in whole.state_dict().items():
        torch.testing.assert_close(rows[name], expected, rtol=LIMIT, atol=LIMIT)
    with pytest.raises(ConfigError, match="table 't3' is cut by columns, so that no rank has the gradient"):
        parts.register_gradient_hook(print, "t3")
    parts.fused_optimizer.param_groups[0]["clip_grad_norm"] = 1.0
    with pytest.raises(ConfigError, match=r"clip_grad_norm is 1\.0, and the plan cuts tables t3 by columns"):
        parts(batch.of([env.rank])).values().sum().backward()
    parts.close_here()


def test_hooks_and_limits() -> None:
    run(2, hooks_and_limits)
