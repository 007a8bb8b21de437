"""The fused optimizer of a model: its state by the names of weights, whatever the plan; torchrec's shape."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import ConfigError, EmbeddingConfig, optim
from tierstore.sharding import (
    DistributedModelParallel,
    ShardingPlan,
    column_wise,
    construct_plan,
    row_wise,
    table_wise,
)

CUTS = {"t0": row_wise(), "t1": table_wise(1), "t2": column_wise([0, 1]), "t3": table_wise(0)}
OTHERS = {"t0": table_wise(0), "t1": column_wise([0, 1]), "t2": row_wise(), "t3": row_wise([70, 1])}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = tierstore.EmbeddingBagCollection(
            cases.tables(), config=cases.MEMORY, optimizer=optim.Adam(lr=0.05)
        )
        sequence = EmbeddingConfig(57, 4, "s", feature_names=["c"])
        self.rows = tierstore.EmbeddingCollection(
            [sequence], config=cases.MEMORY, optimizer=optim.RowWiseAdagrad(lr=0.1)
        )

    def forward(self, features: tierstore.KeyedJaggedTensor) -> torch.Tensor:
        return self.bags(features).values().square().sum() + self.rows(features)["c"].values().square().sum()


def model(bags: dict) -> DistributedModelParallel:
    plan = construct_plan(cases.tables(), bags, 2)
    second = construct_plan([EmbeddingConfig(57, 4, "s", feature_names=["c"])], {"s": row_wise()}, 2)
    return DistributedModelParallel(Model(), plan=ShardingPlan((*plan.tables, *second.tables), 2, 2))


def train(dmp: DistributedModelParallel, steps: slice) -> None:
    rank = torch.distributed.get_rank()
    for batch in cases.batches(2, 5, longest=1)[steps]:
        dmp(batch.of([rank])).backward()


def saved_and_loaded() -> None:
    first = model(CUTS)
    optimizer = first.fused_optimizer
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(first, slice(0, 3))
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.05]
    state, rows = optimizer.state_dict(), first.state_dict()
    assert list(state["state"]) == list(rows)  # the names of the weights
    assert set(state["state"]["bags.embedding_bags.t1.weight"]) == {"t1.step", "t1.exp_avg", "t1.exp_avg_sq"}
    assert state["state"]["bags.embedding_bags.t1.weight"]["t1.exp_avg"].shape == (57, 10)
    assert state["state"]["rows.embeddings.s.weight"]["s.sum"].shape == (57,)
    assert state["param_groups"][1]["params"] == ["rows.embeddings.s.weight"]

    second = model(OTHERS)
    second.load_state_dict(rows)
    second.fused_optimizer.load_state_dict(state)
    for dmp in (first, second):
        train(dmp, slice(3, 5))
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    again = second.fused_optimizer.state_dict()
    torch.testing.assert_close(again["state"], first.fused_optimizer.state_dict()["state"], rtol=0, atol=0)
    unsharded = Model()
    unsharded.bags.fused_optimizer.load_state_dict(first.sharded["bags"].fused_optimizer.state_dict())
    assert unsharded.bags.fused_optimizer.num_updates == 5
    wrong = {**state, "state": {"other.weight": {}}}
    with pytest.raises(ConfigError, match="this is not the state of these tables"):
        second.fused_optimizer.load_state_dict(wrong)
    combined_by_torchrec(first)


def combined_by_torchrec(dmp: DistributedModelParallel) -> None:
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    over = nn.Linear(2, 1)
    dense = KeyedOptimizerWrapper(
        dict(over.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.1)
    )
    both = CombinedOptimizer([("", dmp.fused_optimizer), ("", dense)])
    both.zero_grad()
    both.step()
    assert {*dmp.fused_optimizer.params, "weight", "bias"} == set(both.params)
    found = both.state_dict()["state"]["rows.embeddings.s.weight"]["s.sum"]
    torch.testing.assert_close(found, dmp.sharded["rows"].optimizer_rows(torch.arange(57))["sum"])


def test_state_by_the_names_of_weights() -> None:
    run(2, saved_and_loaded)
