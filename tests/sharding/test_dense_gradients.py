"""Gradients of dense layers: DDP's bits, and no rank waits where another one has stopped."""

from __future__ import annotations

import gc
import json
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tests.sharding.test_stopped_ranks import TIMEOUT, fail, leave
from tierstore import KeyedJaggedTensor, optim
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

CUTS = {"t0": row_wise(), "t1": column_wise([1, 0]), "t2": data_parallel(), "t3": table_wise(1)}
STEPS = 4
LATE_S = 11
"""How late a rank fails: once ranks looked for 10 s whether it was late, and then waited for the timeout."""
_LONG_S = 60


class Dense(nn.Module):
    """Layers over and under the tables; gradients of the ones under come when rows have theirs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.under = nn.Linear(3, 36)
        self.over = nn.Sequential(nn.Linear(36, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, pooled: Tensor) -> Tensor:
        inputs = torch.linspace(-1, 1, 3 * len(pooled)).view(-1, 3)
        return self.over(pooled * self.under(inputs))


class Model(nn.Module):
    def __init__(self, width: int = 50) -> None:
        super().__init__()
        self.sparse: Any = tierstore.EmbeddingBagCollection(
            cases.tables(), config=cases.MEMORY, optimizer=optim.Adam(lr=0.05)
        )
        self.dense = Dense(width)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.dense(self.sparse(features).values())


def trained(forward: Any, dense: nn.Module) -> None:
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    for batch in cases.batches(dist.get_world_size(), STEPS, longest=2):
        optimizer.zero_grad()
        forward(batch.of([dist.get_rank()])).square().mean().backward()
        optimizer.step()


def has_the_bits_of_ddp(options: dict[str, Any], buffers: bool, width: int = 50) -> None:
    """A DDP of the user's around the dense part does all of its exchanges itself."""
    whole, parts = Model(width), Model(width)
    if buffers:
        for model in (whole, parts):
            model.dense.register_buffer("of_dense", torch.full((2,), float(dist.get_rank())))
    plan = construct_plan(whole.sparse, CUTS, dist.get_world_size(), name="sparse")
    sparse = shard(parts.sparse, plan)
    dense = DistributedDataParallel(parts.dense, **options)
    trained(lambda features: dense(sparse(features).values()), dense)
    with DistributedModelParallel(whole, plan=plan, **options) as dmp:
        trained(dmp, whole.dense)
        for mine, other in zip(whole.dense.parameters(), parts.dense.parameters(), strict=True):
            assert torch.equal(mine, other)
        if buffers:
            assert torch.equal(whole.dense.of_dense, torch.zeros(2))
        ids = torch.arange(50)
        assert torch.equal(dmp.sharded["sparse"].rows(ids, "t0"), sparse.rows(ids, "t0"))
    sparse.close()


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
def test_dense_layers_have_the_bits_of_ddp(options: dict[str, Any], buffers: bool) -> None:
    run(3, has_the_bits_of_ddp, options, buffers)


@pytest.mark.parametrize("width", [6_898, 6_899, 20_000])
def test_several_buckets_have_the_bits_of_ddp(width: int) -> None:
    """DDP's first bucket has a mebibyte: 6,898 columns over the tables fill it but for a few bytes."""
    run(3, has_the_bits_of_ddp, {}, False, width)


def stopped(folder: Path, place: str) -> None:
    """Rank 1 fails in its second step, and stays alive until the other one has told what it met."""
    model, world = Model(), dist.get_world_size()
    plan = construct_plan(model.sparse, CUTS, world, name="sparse")
    dmp = DistributedModelParallel(
        model, ShardingEnv.from_process_group(dist.new_group(timeout=TIMEOUT)), plan=plan
    )
    found, start = "nothing", time.monotonic()
    try:
        for step, batch in enumerate(cases.batches(world, STEPS, longest=1)):
            if dist.get_rank() == 1 and step == 1:
                if place == "late for a forward call":
                    time.sleep(LATE_S)
                    fail()
                model.dense.under.weight.register_hook(fail)
            dmp(batch.of([dist.get_rank()])).sum().backward()
    except BaseException as error:
        dmp.close()
        found = f"{type(error).__name__}: {error}"
        with pytest.raises(tierstore.RankError):
            dmp(batch.of([dist.get_rank()]))
    leave(folder, start, found, not dmp.sharded["sparse"].engine.closed)


@pytest.mark.parametrize("place", ["in a dense layer's gradient", "late for a forward call"])
def test_the_others_hear_of_a_rank_that_stops(tmp_path: Path, place: str) -> None:
    with pytest.raises(AssertionError, match="it died"):
        run(2, stopped, tmp_path, place)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told[0][0].startswith("RankError: rank 1 has stopped after Boom: boom. Nothing of this step")
    assert told[1][0] == "Boom: boom"
    assert max(took for *_, took in told) < _LONG_S


def is_collected() -> None:
    model = Model()
    plan = construct_plan(model.sparse, CUTS, dist.get_world_size(), name="sparse")
    dmp = DistributedModelParallel(model, plan=plan)
    trained(dmp, model.dense)
    dmp.close()
    dense = weakref.ref(model.dense)
    del model, dmp
    gc.collect()
    assert dense() is None


def test_a_model_that_is_dropped_is_collected() -> None:
    run(2, is_collected)
