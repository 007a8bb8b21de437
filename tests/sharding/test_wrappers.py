"""Wrappers of whole models, around unsharded tables, on several ranks: each rank is told what to use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore.errors import ConfigError
from tierstore.sharding import DistributedModelParallel

IDS = torch.tensor([[1, 2], [3, 3]])


class Model(nn.Module):
    """One table, alone or in a module of its own, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"mode": "sum", "optimizer": tierstore.optim.SGD(lr=0.5), "name": "user"}
        self.inner = nn.Sequential(tierstore.TieredEmbeddingBag(10, 4, **options))
        self.top = nn.Linear(4, 1)

    @property
    def bag(self) -> Any:
        return self.inner[0]

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.inner(ids)).sum()


def fsdp2(model: Model) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh)


def fsdp1(model: Model, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def torchrec_dmp(model: Model) -> nn.Module:
    return torchrec.distributed.DistributedModelParallel(model, device=torch.device("cpu"))


class Recomputed(nn.Module):
    """Its backward pass calls the model again, outside of the forward call of a wrapper."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        anchor = torch.zeros((), requires_grad=True)
        return checkpoint(lambda anchor: self.model(ids) + anchor, anchor, use_reentrant=True)


WRAPPERS: dict[str, Callable[[Model], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "ddp, unused parameters": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "ddp, static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "ddp, recomputed": lambda model: DistributedDataParallel(Recomputed(model)),
    "ddp around a part": lambda model: nn.Sequential(DistributedDataParallel(model)),
    "replicate": replicate,
    "fsdp1": fsdp1,
    "fsdp1, own parameters": lambda model: fsdp1(model, use_orig_params=True),
    "fsdp2": fsdp2,
    "torchrec": torchrec_dmp,
}


def refuses(name: str) -> None:
    model = Model()
    bag = model.bag
    before = bag.rows([1, 2, 3])
    wrapped = WRAPPERS[name](model)
    with pytest.raises(
        ConfigError, match=r"tables user\) is inside .*tierstore.sharding.DistributedModelParallel"
    ):
        wrapped(IDS + dist.get_rank()).backward()
    assert torch.equal(bag.rows([1, 2, 3]), before)
    assert bag.fused_optimizer.num_updates == 0
    with torch.no_grad():  # reading is alike on all ranks
        wrapped.eval()
        assert wrapped(IDS).isfinite()


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_that_would_let_ranks_diverge_are_refused(name: str) -> None:
    run(2, refuses, name)


def works_alone(name: str) -> None:
    model, plain = Model(), Model()
    bag = model.bag
    wrapped = WRAPPERS[name](model)
    for step in range(3):
        wrapped(IDS + step).backward()
        plain(IDS + step).backward()
    assert torch.equal(bag.rows(torch.arange(10)), plain.bag.rows(torch.arange(10)))


@pytest.mark.parametrize("name", WRAPPERS)
def test_one_rank_trains_as_without_a_wrapper(name: str) -> None:
    run(1, works_alone, name)


def trains_after_a_refusal() -> None:
    with pytest.raises(ConfigError, match="is inside DistributedDataParallel"):
        replicate(Model())(IDS)
    model = Model()
    model(IDS).backward()
    assert model.bag.fused_optimizer.num_updates == 1


def test_a_refused_forward_call_refuses_no_other_model() -> None:
    """torch takes a forward call that failed for active, where ``replicate`` has made no wrapper."""
    run(2, trains_after_a_refusal)


def warns() -> None:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tierstore").addHandler(handler)
    model = Model()
    for _ in range(2):
        model(IDS).backward()
    logging.getLogger("tierstore").removeHandler(handler)
    assert len(heard) == 1
    assert "trained by one of 2 ranks, and is not sharded" in heard[0]
    assert model.bag.fused_optimizer.num_updates == 2


def test_ranks_that_train_tables_of_their_own_are_warned() -> None:
    run(2, warns)


class Sharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse = tierstore.EmbeddingBagCollection(cases.tables(), optimizer=tierstore.optim.SGD(lr=0.5))
        self.top = nn.Linear(36, 1)

    def forward(self, features: Any) -> Tensor:
        return self.top(self.sparse(features).values()).square().sum()


def freezes_and_refuses() -> None:
    dmp = DistributedModelParallel(Sharded(), batch_size=4)
    (batch,) = cases.batches(2, 1)
    features = batch.of([dist.get_rank()])
    (collection,) = dmp.sharded.values()

    def weights() -> list[Tensor]:
        return [collection.rows(torch.arange(50), table) for table in collection.table_names()]

    before = weights()
    collection.requires_grad_(False)
    dmp(features).backward()
    assert all(map(torch.equal, weights(), before))
    dmp.requires_grad_(True)
    dmp(features).backward()
    after = weights()
    assert not all(map(torch.equal, after, before))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(ConfigError, match=r"with tierstore.accumulate\(model\) as rows"):
        scaler.scale(dmp(features)).backward()
    assert all(map(torch.equal, weights(), after))
    dmp.close()


def test_sharded_tables_freeze_and_refuse_what_they_cannot_do() -> None:
    run(2, freezes_and_refuses)


def refuses_a_half_frozen_collection() -> None:
    model = Sharded()
    model.sparse.embedding_bags["t1"].requires_grad_(False)
    with pytest.raises(ConfigError, match="trained or frozen as a whole"):
        DistributedModelParallel(model, batch_size=4)


def test_a_collection_with_frozen_and_trained_tables_is_not_sharded() -> None:
    run(2, refuses_a_half_frozen_collection)
