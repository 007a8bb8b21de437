"""Collections on the meta device are sharded as those with rows are, with the optimizer applied to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import ConfigError, KeyedJaggedTensor, TierConfig, optim
from tierstore.sharding import DistributedModelParallel, construct_plan, row_wise, table_wise


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = tierstore.EmbeddingBagCollection(cases.tables(), **options)
        self.over = nn.Linear(36, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.sparse(features).values())


CUTS = {"t0": row_wise(), "t1": table_wise(1), "t2": row_wise(), "t3": table_wise(0)}


def trained(model: Model, rank: int, **options: Any) -> dict[str, Tensor]:
    plan = construct_plan(model.sparse, CUTS, 2, name="sparse")
    with DistributedModelParallel(model, plan=plan, **options) as dmp:
        for batch in cases.batches(2, 3):
            dmp(batch.of([rank])).square().sum().backward()
        return dmp.state_dict() | {"lr": torch.tensor(dmp.fused_optimizer.param_groups[0]["lr"])}


def shards() -> None:
    rank = torch.distributed.get_rank()
    spec = optim.Adagrad(lr=0.1)
    expected = trained(Model(config=cases.MEMORY, optimizer=spec), rank, config=cases.TIGHT)
    on_meta = Model(config=cases.TIGHT, optimizer=spec, device="meta")
    torch.testing.assert_close(trained(on_meta, rank), expected, rtol=0, atol=0)
    applied = Model(config=cases.TIGHT, device="meta")
    _apply_optimizer_in_backward(torch.optim.Adagrad, applied.sparse.parameters(), {"lr": 0.1})
    torch.testing.assert_close(trained(applied, rank), expected, rtol=0, atol=0)
    # Applied to tables that have rows already, but no optimizer.
    loaded = Model(config=cases.MEMORY)
    _apply_optimizer_in_backward(torch.optim.Adagrad, loaded.sparse.parameters(), {"lr": 0.1})
    loaded.load_state_dict(Model(config=cases.MEMORY).state_dict())
    torch.testing.assert_close(trained(loaded, rank, config=cases.TIGHT), expected, rtol=0, atol=0)
    changed = Model(config=cases.TIGHT, optimizer=spec, device="meta")
    changed.sparse.fused_optimizer.param_groups[0]["lr"] = 0.25
    assert trained(changed, rank)["lr"] == 0.25


def test_a_collection_on_meta_is_sharded() -> None:
    run(2, shards)


def planned() -> None:
    spec = optim.Adagrad(lr=0.1)
    plans = []
    for device in (None, "meta"):
        model = Model(config=TierConfig(hbm="40KiB", ssd="64MiB"), optimizer=spec, device=device)
        with DistributedModelParallel(model, batch_size=16) as dmp:
            plans.append(dmp.plan)
    assert plans[0] == plans[1]
    both = Model(config=cases.MEMORY, optimizer=spec)
    _apply_optimizer_in_backward(torch.optim.SGD, both.sparse.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match="the layout of rows is fixed"):
        DistributedModelParallel(both, plan=construct_plan(both.sparse, CUTS, 2, name="sparse"))


def test_a_collection_on_meta_is_planned_for() -> None:
    run(2, planned)


def with_path(folder: str) -> None:
    rank = torch.distributed.get_rank()
    config = TierConfig(hbm="24KiB", ssd="64MiB", path=folder)
    model = Model(config=config, optimizer=optim.SGD(lr=0.1), device="meta")
    first = trained(model, rank)  # whose config has the path: nothing of this model is open
    model = Model(config=config, optimizer=optim.SGD(lr=0.1), device="meta")
    with DistributedModelParallel(model, plan=construct_plan(model.sparse, CUTS, 2, name="sparse")) as dmp:
        again = dmp.state_dict()
        for key in again:
            if key.startswith("sparse"):
                assert torch.equal(again[key], first[key])


def test_the_path_of_a_collection_on_meta_is_that_of_its_shards(tmp_path: Path) -> None:
    run(2, with_path, str(tmp_path / "rows"))
