"""A whole model with tables of float16 and bfloat16 whose ranks have a fake GPU each: the bits of ranks on
CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from tests.cuda.fake import fake_gpu
from tests.cuda.fake_nccl import on_gpus
from tests.cuda.fake_torch import GpuTensor
from tests.cuda.test_ranks_with_gpus import DIM, ROWS, batch
from tests.sharding.ranks import run
from tierstore import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, TierConfig, optim
from tierstore.modules.configs import DataType
from tierstore.sharding import (
    DistributedModelParallel,
    ShardingPlan,
    construct_plan,
    data_parallel,
    row_wise,
    table_wise,
)

CUTS = {"row_wise": row_wise(), "table_wise": table_wise(1), "data_parallel": data_parallel()}
KINDS = (DataType.BF16, DataType.FP16, DataType.FP32)
BAGS = 4
"""Of a batch; they have as many ids each."""
TIGHT = TierConfig(hbm="24KiB", uvm="16KiB", ssd="64MiB", engine="memory")


class Model(nn.Module):
    """Bags and rows, of which one table each has the same features, under one dense layer."""

    def __init__(self, device: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        bags = [EmbeddingBagConfig(ROWS, DIM, f"bags {k.value}", k, feature_names=["f"]) for k in KINDS]
        rows = [EmbeddingConfig(ROWS, DIM, "rows", DataType.BF16, feature_names=["f"])]
        options: dict[str, Any] = {"device": "meta", "optimizer": optim.Adam(lr=0.1), "seed": 3}
        self.bags = tierstore.EmbeddingBagCollection(bags, **options)
        self.rows = tierstore.EmbeddingCollection(rows, **options)
        self.over = nn.Linear((len(KINDS) + 1) * DIM, 2)
        if device:
            self.over.to(device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        means = self.rows(features)["f"].values().view(BAGS, -1, DIM).mean(1)
        return self.over(torch.cat([self.bags(features).values(), means], 1))

    def plan(self, cut: str) -> ShardingPlan:
        plans = [
            construct_plan(part, {config.name: CUTS[cut] for config in part.configs}, 2, name=name)
            for name, part in (("bags", self.bags), ("rows", self.rows))
        ]
        return ShardingPlan((*plans[0].tables, *plans[1].tables), 2, 2)


def trained(device: str | None, cut: str, prefetch: bool) -> list[Tensor]:
    """Outputs, weights and the rows' state."""
    rank = dist.get_rank()
    model = Model(device and f"{device}:{rank}")
    dmp = DistributedModelParallel(model, device=device, plan=model.plan(cut), config=TIGHT)
    dense = torch.optim.SGD(dmp.parameters(), lr=0.1)
    found: list[Tensor] = []
    own = [batch(step, rank) for step in range(6)]
    for features in tierstore.prefetch(own, dmp, depth=2, window=3) if prefetch else own:
        dense.zero_grad()
        out = dmp(features)
        assert isinstance(out, GpuTensor) == bool(device)
        out.square().sum().backward()
        dense.step()
        found.append(out.detach().cpu())
    found += [value.cpu() for value in dmp.state_dict().values()]
    for sharded in dmp.sharded.values():
        for config in sharded.configs:
            found += list(sharded.optimizer_rows(torch.arange(ROWS), config.name).values())
    dmp.close()
    return found


def both(cut: str, prefetch: bool) -> None:
    expected = trained(None, cut, prefetch)
    with on_gpus("random"):
        found = trained("cuda", cut, prefetch)
        assert fake_gpu().counts["launches"] > 50 or (cut == "table_wise" and dist.get_rank() == 0)
    assert {tensor.dtype for tensor in found} == {torch.float16, torch.bfloat16, torch.float32}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_a_model_of_16_bits_trains_as_on_cpus(cut: str, prefetch: bool) -> None:
    run(2, both, cut, prefetch)
