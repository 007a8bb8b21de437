"""DistributedModelParallel: the whole model against one process; state dicts; plans that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import ConfigError, EmbeddingBagConfig, KeyedJaggedTensor, optim
from tierstore.sharding import (
    DistributedModelParallel,
    ShardingPlan,
    column_wise,
    construct_plan,
    data_parallel,
    row_wise,
    table_wise,
)


class Model(nn.Module):
    def __init__(self, configs: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = tierstore.EmbeddingBagCollection(
            configs, config=cases.MEMORY, optimizer=optim.Adagrad(lr=0.1)
        )
        self.over = nn.Linear(36, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.sparse(features).values())


CUTS = {"t0": row_wise(), "t1": table_wise(1), "t2": column_wise([0, 1]), "t3": data_parallel()}


def whole_model(dense: str) -> None:
    configs = cases.tables()
    one, many = Model(configs), Model(configs)
    plan = construct_plan(many.sparse, CUTS, 2, name="sparse")
    dmp = DistributedModelParallel(many, plan=plan, dense=dense)
    assert isinstance(dmp.module, Model)
    assert list(dict(dmp.named_parameters())) == ["over.weight", "over.bias"]
    train_both(one, dmp, steps=4)
    expected, found = one.state_dict(), whole_tensors(dmp.state_dict())
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    dmp.fused_optimizer.param_groups[0]["lr"] = 0.5
    changed = {key: value + 1 for key, value in expected.items()}
    dmp.load_state_dict(changed_for(dmp, changed))
    torch.testing.assert_close(whole_tensors(dmp.state_dict()), changed, rtol=0, atol=0)
    around = nn.Sequential(dmp)
    around.load_state_dict({f"0.{key}": value for key, value in changed_for(dmp, expected).items()})
    torch.testing.assert_close(whole_tensors(dmp.state_dict()), expected, rtol=0, atol=0)
    dmp.close()
    if dense == "ddp":
        wrong_plans(configs, plan)


def train_both(one: nn.Module, dmp: DistributedModelParallel, steps: int) -> None:
    """``one`` with the batches of both ranks, ``dmp`` with those of this one."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, dmp)]
    for batch in cases.batches(2, steps):
        for model, optimizer, ranks, scale in (
            (one, optimizers[0], [0, 1], 2),
            (dmp, optimizers[1], [torch.distributed.get_rank()], 1),
        ):
            optimizer.zero_grad()
            (model(batch.of(ranks)).square().sum() / scale).backward()
            optimizer.step()


def whole_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Without DTensors, which FSDP2 has."""
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}


def changed_for(dmp: DistributedModelParallel, state: dict[str, Tensor]) -> dict[str, Any]:
    """As DTensors where the model has such parameters."""
    own = dict(dmp.named_parameters())
    return {
        key: distribute_tensor(value, own[key].device_mesh, own[key].placements)
        if isinstance(own.get(key), DTensor)
        else value
        for key, value in state.items()
    }


def wrong_plans(configs: list[EmbeddingBagConfig], plan: ShardingPlan) -> None:
    with pytest.raises(ConfigError, match="the plan is for 3 ranks and there are 2"):
        DistributedModelParallel(Model(configs), plan=construct_plan(configs, CUTS, 3))
    with pytest.raises(ConfigError, match="no table 't3' in the plan"):
        DistributedModelParallel(
            Model(configs), plan=construct_plan(configs[:3], dict(list(CUTS.items())[:3]), 2)
        )
    with pytest.raises(ConfigError, match=r"tables \['t3'\] are not in the model"):
        DistributedModelParallel(nn.Sequential(tierstore.EmbeddingBagCollection(configs[:3])), plan=plan)
    torn = replace(plan, tables=(replace(plan.tables[0], shards=plan.tables[0].shards[:1]), *plan.tables[1:]))
    with pytest.raises(ConfigError, match="do not cover the 50 rows"):
        DistributedModelParallel(Model(configs), plan=torn)
    twice = replace(plan, tables=(plan.tables[0], *plan.tables))
    with pytest.raises(ConfigError, match="table 't0' is in the plan 2 times"):
        DistributedModelParallel(Model(configs), plan=twice)
    cuts = CUTS | {"t1": table_wise(torch.distributed.get_rank())}
    with pytest.raises(ConfigError, match="rank 1 was given other plan than rank 0"):
        DistributedModelParallel(Model(configs), plan=construct_plan(configs, cuts, 2))
    with pytest.raises(ConfigError, match="ranks 0 and 1 would both use cuda:0"):
        DistributedModelParallel(Model(configs), device="cuda", plan=plan)
    with pytest.raises(ConfigError, match="device is mps; tiers are on the CPU or a GPU"):
        DistributedModelParallel(Model(configs), device="mps", plan=plan)
    gpu = tierstore.TierConfig(device="cuda")
    with pytest.raises(ConfigError, match="device is cpu, but the configuration has device='cuda'"):
        DistributedModelParallel(Model(configs), plan=plan, device="cpu", config=gpu)
    small = tierstore.TierConfig(hbm=64 if torch.distributed.get_rank() == 0 else "1MiB", engine="memory")
    with pytest.raises(ConfigError, match="rank 0: the hbm budget of 64 bytes is below the minimum"):
        DistributedModelParallel(Model(configs), plan=plan, config=small)


@pytest.mark.parametrize("dense", ["ddp", "fsdp2"])
def test_whole_model(dense: str) -> None:
    run(2, whole_model, dense)
