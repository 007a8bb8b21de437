"""Sharded state dicts: weights and optimizer states as ShardedTensors, which torch.distributed.checkpoint
saves and cuts anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tests.sharding.test_parallel import CUTS, Model
from tierstore import optim
from tierstore.errors import StoreMismatchError
from tierstore.sharding import (
    DistributedModelParallel,
    column_wise,
    construct_plan,
    grid_shard,
    row_wise,
    shard,
    sharded_state_dict,
    table_wise,
)
from tierstore.sharding.table_sharding import TableSharding

PLANS: dict[str, dict[str, TableSharding]] = {
    "same": CUTS,
    "other": {
        "t0": column_wise([1, 0]),
        "t1": row_wise([57, 0]),
        "t2": row_wise([11, 53]),
        "t3": table_wise(1),
    },
    "three ranks": {
        "t0": grid_shard([0]),
        "t1": row_wise(),
        "t2": table_wise(2),
        "t3": column_wise([2, 0]),
    },
}


def sharded(plan_name: str, *, train: bool) -> DistributedModelParallel:
    model = Model(cases.tables())
    ranks = dist.get_world_size()
    plan = construct_plan(model.sparse, PLANS[plan_name], ranks, name="sparse")
    dmp = DistributedModelParallel(model, plan=plan)
    for batch in cases.batches(ranks, 3) if train else ():
        dmp(batch.of([dist.get_rank()])).square().sum().backward()
    return dmp


def save(folder: str) -> None:
    dmp = sharded("same", train=True)
    whole, state = dmp.state_dict(), sharded_state_dict(dmp)
    assert list(state) == list(whole)
    views = {name: value for name, value in state.items() if isinstance(value, ShardedTensor)}
    assert list(views) == [key(i) for i in range(3)]  # t3 is data-parallel
    for name, view in views.items():
        expected = whole[name]
        assert view.metadata().size == expected.shape
        for piece in view.local_shards():
            (row, column), (rows, columns) = piece.metadata.shard_offsets, piece.metadata.shard_sizes
            assert torch.equal(piece.tensor, expected[row : row + rows, column : column + columns])
    assert sum(len(view.local_shards()) for view in views.values()) == 2 + dist.get_rank()
    dcp.save({"model": state}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save(whole, Path(folder, "whole"))
    dmp.close()


def load(folder: str, plan_name: str) -> None:
    dmp = sharded(plan_name, train=False)
    state = sharded_state_dict(dmp)
    dcp.load({"model": state}, checkpoint_id=folder)
    dmp.load_state_dict(state)
    expected: dict[str, Tensor] = torch.load(Path(folder, "whole"))
    found = dmp.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    dmp.close()


def optimized(plan_name: str, optimizer: optim.OptimizerSpec) -> DistributedModelParallel:
    model = Model(cases.tables())
    model.sparse = tierstore.EmbeddingBagCollection(cases.tables(), config=cases.MEMORY, optimizer=optimizer)
    plan = construct_plan(model.sparse, PLANS[plan_name], dist.get_world_size(), name="sparse")
    return DistributedModelParallel(model, plan=plan)


def train(dmp: DistributedModelParallel) -> None:
    for batch in cases.batches(dist.get_world_size(), 3):
        dmp(batch.of([dist.get_rank()])).square().sum().backward()


def states_of(dmp: DistributedModelParallel) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = dmp.fused_optimizer.state_dict()["state"]
    return found


def save_states(folder: str, optimizer: optim.OptimizerSpec) -> None:
    dmp = optimized("same", optimizer)
    train(dmp)
    dmp.fused_optimizer.param_groups[0]["lr"] = 0.0625
    state = sharded_state_dict(dmp.fused_optimizer)
    views = [v for part in state["state"].values() for v in part.values() if isinstance(v, ShardedTensor)]
    assert len(views) == 3 * len(optimizer.state_names)
    dcp.save({"model": sharded_state_dict(dmp), "optimizer": state}, checkpoint_id=folder)
    whole = states_of(dmp)
    if dist.get_rank() == 0:
        torch.save(whole, Path(folder, "whole"))
    dmp.close()


def load_states(folder: str, plan_name: str, optimizer: optim.OptimizerSpec) -> None:
    """After loading, also every shard of other columns has the row's own number: trained on, all is equal."""
    dmp = optimized(plan_name, optimizer)
    state = {"model": sharded_state_dict(dmp), "optimizer": sharded_state_dict(dmp.fused_optimizer)}
    dcp.load(state, checkpoint_id=folder)
    dmp.load_state_dict(state["model"])
    dmp.fused_optimizer.load_state_dict(state["optimizer"])
    expected: dict[str, dict[str, Tensor]] = torch.load(Path(folder, "whole"))
    torch.testing.assert_close(states_of(dmp), expected, rtol=0, atol=0)
    assert dmp.fused_optimizer.param_groups[0]["lr"] == 0.0625

    loaded_whole = optimized(plan_name, optimizer)
    loaded_whole.load_state_dict(dmp.state_dict())
    loaded_whole.fused_optimizer.load_state_dict(dmp.fused_optimizer.state_dict())
    for model in (dmp, loaded_whole):
        train(model)
    torch.testing.assert_close(dmp.state_dict(), loaded_whole.state_dict(), rtol=0, atol=0)
    dmp.close()
    loaded_whole.close()


def wrong_cut_and_size() -> None:
    first, second = sharded("same", train=True), sharded("other", train=False)
    before = second.state_dict()
    with pytest.raises(RuntimeError, match=r"t0.weight is cut in another way.*sharded_state_dict"):
        second.load_state_dict(sharded_state_dict(first))
    after = second.state_dict()
    assert all(torch.equal(after[key(i)], before[key(i)]) for i in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tierstore.sharding.shard_views.STATE_DICT_LIMIT", 4 * 57 * 10 - 1)
        state = sharded_state_dict(first)
    assert [state[key(i)].dtype for i in (0, 1, 3)] == [torch.float32, torch.uint8, torch.float32]
    first.load_state_dict(state)
    with pytest.raises(StoreMismatchError, match=r"t1.weight: this state dict was made without the rows"):
        second.load_state_dict({key(1): state[key(1)]}, strict=False)
    first.close()
    second.close()


def key(table: int) -> str:
    return f"sparse.embedding_bags.t{table}.weight"


def test_sharded_state_dicts_are_saved_and_cut_anew(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    run(2, save, folder)
    run(2, load, folder, "same")
    run(2, load, folder, "other")
    run(3, load, folder, "three ranks")


@pytest.mark.parametrize(
    "optimizer",
    [optim.RowWiseAdagrad(lr=0.1), optim.Adam(), optim.PartialRowWiseAdam()],
    ids=lambda o: o.name,
)
def test_optimizer_states_are_saved_and_cut_anew(optimizer: optim.OptimizerSpec, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    run(2, save_states, folder, optimizer)
    run(2, load_states, folder, "other", optimizer)
    run(3, load_states, folder, "three ranks", optimizer)


def test_another_cut_is_refused_and_large_tables_are_left_out() -> None:
    run(2, wrong_cut_and_size)


def loaded_decayed() -> None:
    """Weights that are loaded were not there in the updates before, which decay all rows that they missed."""
    spec = optim.SGD(lr=0.1, weight_decay=0.5, weight_decay_mode="decoupled_global")
    cuts = {"t0": row_wise(), "t1": column_wise([1, 0]), "t2": table_wise(1), "t3": grid_shard([0])}
    models = []
    for _ in range(2):
        whole = tierstore.EmbeddingBagCollection(cases.tables(), config=cases.MEMORY, optimizer=spec)
        models.append(shard(whole, construct_plan(whole, cuts, 2)))
    first, second, third = (batch.of([dist.get_rank()]) for batch in cases.batches(2, 3))
    for model in models:
        for batch in (first, second):
            model(batch).values().sum().backward()
    parts, state = sharded_state_dict(models[0]), models[0].state_dict()
    models[0].load_state_dict(parts)
    models[1].load_state_dict(state)
    for model in models:
        model(third).values().sum().backward()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)
    for model in models:
        model.close()


def test_loaded_shards_are_not_decayed_for_earlier_updates() -> None:
    run(2, loaded_decayed)
