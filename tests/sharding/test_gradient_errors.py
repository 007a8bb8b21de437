"""Gradients that are NaN on one rank: every rank raises, and every rank can go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import EmbeddingConfig, GradientError, KeyedJaggedTensor, TierConfig, optim
from tierstore.sharding import (
    CommsConfig,
    DistributedModelParallel,
    construct_plan,
    row_wise,
    table_wise,
)

CHECKED = TierConfig(hbm="all", check_gradients=True)


class Model(nn.Module):
    """Two collections, with dense layers above and beside them, so that DDP exchanges before and after the
    rows are updated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"config": cases.MEMORY, "optimizer": optim.Adam(lr=0.1), "seed": 3}
        self.beside = nn.Linear(6, 6)
        self.bags = tierstore.EmbeddingBagCollection(cases.tables()[:1], **options)
        own = EmbeddingConfig(50, 6, "own", feature_names=["a"])
        self.rows = tierstore.EmbeddingCollection([own], **options)
        self.over = nn.Linear(6, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        bags = self.bags(features)
        rows = self.rows(features)["a"].values()
        return self.over(self.beside(bags["a"] + bags["b"] + rows.sum(dim=0))).squeeze(1)


def parallel(holder: int | None, dedup: bool) -> DistributedModelParallel:
    model = Model()
    tables = [*model.bags.embedding_bag_configs(), *model.rows.embedding_configs()]
    cut = row_wise() if holder is None else table_wise(holder)
    plan = construct_plan(tables, {table.name: cut for table in tables}, 2)
    return DistributedModelParallel(model, plan=plan, config=CHECKED, comms=CommsConfig(dedup=dedup))


def backward(dmp: DistributedModelParallel, batch: cases.Batch, bad: str, rank: int) -> None:
    """The gradient of ``bad`` is NaN on ``rank``."""
    hooks = []
    if dist.get_rank() == rank:

        def spoil(module: nn.Module, args: Any, output: Any) -> None:
            values = output["a"].values() if isinstance(output, dict) else output.values()
            values.register_hook(lambda gradient: gradient * float("nan"))

        hooks.append(getattr(dmp.module, bad).register_forward_hook(spoil))
    try:
        dmp(batch.of([dist.get_rank()])).square().sum().backward()
    finally:
        for hook in hooks:
            hook.remove()


def on_all(holder: int | None, dedup: bool) -> None:
    dmp = parallel(holder, dedup)
    steps = cases.batches(2, 6)
    optimizer = torch.optim.SGD(dmp.parameters(), lr=0.01)
    for step, (bad, rank) in enumerate([("bags", 0), ("rows", 1), ("bags", 1), ("rows", 0)]):
        before = dict(dmp.state_dict())
        with pytest.raises(GradientError, match=r"row\(s\) is NaN or infinite"):
            backward(dmp, steps[step], bad, rank)
        optimizer.zero_grad()
        same(dmp)
        backward(dmp, steps[step], bad, 2)  # of neither rank
        optimizer.step()
        same(dmp)
        assert not all(value.equal(before[name]) for name, value in dmp.state_dict().items())
        assert all(value.isfinite().all() for value in dmp.state_dict().values())
    dmp.close()


def same(dmp: DistributedModelParallel) -> None:
    """The ranks have the same dense part, and have made as many updates."""
    dense = {name: value.tolist() for name, value in dmp.named_parameters()}
    updates = [collection.fused_optimizer.num_updates for collection in dmp.sharded.values()]
    dmp.env.check_same({"dense": dense, "updates": updates})


@pytest.mark.parametrize(("holder", "dedup"), [(None, False), (0, False), (1, True)])
def test_all_ranks_raise_and_go_on(holder: int | None, dedup: bool) -> None:
    run(2, on_all, holder, dedup)


def checked_on_one() -> None:
    model = Model()
    tables = [*model.bags.embedding_bag_configs(), *model.rows.embedding_configs()]
    plan = construct_plan(tables, {table.name: row_wise() for table in tables}, 2)
    with pytest.raises(tierstore.ConfigError, match="rank 1 was given other check_gradients than rank 0"):
        DistributedModelParallel(model, plan=plan, config=[CHECKED, cases.MEMORY][dist.get_rank()])


def test_checks_on_one_rank_are_refused() -> None:
    run(2, checked_on_one)
