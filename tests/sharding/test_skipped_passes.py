"""A rank that leaves out a backward pass is found out, before its exchanges are taken for those of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore.errors import RankError
from tierstore.optim import SGD
from tierstore.sharding import ShardedEmbeddingBagCollection, construct_plan, shard, table_wise

STEPS, SKIPPED, WINDOW = 30, 2, 2


def part(names: list[str], dims: tuple[int, int]) -> ShardedEmbeddingBagCollection:
    """A table on each rank. With equal dims all ranks send and receive as much, forward and backward."""
    tables = [
        tierstore.EmbeddingBagConfig(100, dims[number], name, feature_names=[f"f{number}"])
        for number, name in enumerate(names)
    ]
    whole = tierstore.EmbeddingBagCollection(tables, device="meta", optimizer=SGD(lr=0.1))
    plan = construct_plan(whole, {name: table_wise(rank) for rank, name in enumerate(names)}, 2)
    sharded = shard(whole, plan, config=cases.MEMORY)
    assert isinstance(sharded, ShardedEmbeddingBagCollection)
    return sharded


def skip(folder: Path, what: str, dims: tuple[int, int]) -> None:
    """Leave out a backward pass, or the second collection's part in one, on rank 1."""
    rank = dist.get_rank()
    model = torch.nn.ModuleList([part(["a0", "a1"], dims), part(["b0", "b1"], dims)])
    batches = [
        tierstore.KeyedJaggedTensor.from_lengths_sync(
            ["f0", "f1"], torch.full((8,), step), torch.ones(8, dtype=torch.int64)
        )
        for step in range(STEPS)
    ]
    step = -1
    try:
        for step, batch in enumerate(tierstore.prefetch(batches, model, depth=1, window=WINDOW)):
            first, second = (child(batch).values().sum() for child in model)
            loss: Tensor = first + second
            if rank == 1 and step == SKIPPED:
                if what == "backward":
                    continue
                loss = first
            loss.backward()
        found = "nothing"
    except RankError as error:
        found = str(error)
    (folder / f"{rank}.json").write_text(json.dumps([step, found]))


@pytest.mark.parametrize("dims", [(4, 4), (4, 12)])
def test_a_rank_that_leaves_out_a_backward_pass(tmp_path: Path, dims: tuple[int, int]) -> None:
    """No rank takes the vectors of another rank's next batch for gradients."""
    run(2, skip, tmp_path, "backward", dims)
    for rank in range(2):
        step, found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert step == SKIPPED + rank
        assert "in the exchange of gradients" in found


def test_a_rank_whose_loss_leaves_out_a_collection(tmp_path: Path) -> None:
    run(2, skip, tmp_path, "a collection", (4, 4))
    for rank in range(2):
        step, found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert step == SKIPPED + rank
        assert "in the exchange of gradients" in found
