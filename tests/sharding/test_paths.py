"""Folders of commits: other models' are refused, and so is a second user of the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import (
    ConfigError,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
    StoreLockedError,
    StoreMismatchError,
    TierConfig,
    optim,
)
from tierstore.sharding import DistributedModelParallel, construct_plan, row_wise, shard, table_wise


class Model(nn.Module):
    """Collections at these paths, each of one table."""

    def __init__(self, paths: Sequence[str], pooling: PoolingType = PoolingType.SUM) -> None:
        super().__init__()
        for path in paths:
            config = EmbeddingBagConfig(20, 8, f"of {path}", feature_names=["f"], pooling=pooling)
            bags = tierstore.EmbeddingBagCollection(
                [config], config=cases.MEMORY, optimizer=optim.SGD(lr=1.0)
            )
            self.add_module(path, bags)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return torch.cat([bags(features).values() for bags in self.children()], dim=1)


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.arange(6), lengths=torch.full((3,), 2))


def parallel(path: str, *names: str, env: Any = None, **options: Any) -> DistributedModelParallel:
    model = Model(names, **options)
    tables = [config for bags in model.children() for config in bags.embedding_bag_configs()]  # type: ignore
    world = dist.get_world_size(env)
    plan = construct_plan(tables, {table.name: row_wise() for table in tables}, world)
    tiers = TierConfig(hbm="24KiB", ssd="64MiB", path=path)
    return DistributedModelParallel(model, env, plan=plan, config=tiers)


def other_models(path: str) -> None:
    dmp = parallel(path, "a", "b")
    dmp(batch()).sum().backward()
    dmp.commit({"step": 3})
    expected = dict(dmp.state_dict())
    dmp.close()
    for names, lost in (
        (["a"], r"\['b'\], and the model has \['a'\]"),
        (["a", "c"], r"\['b'\], and the model has \['a', 'c'\]"),
        (["c", "d", "e"], r"\['a', 'b'\]"),
    ):
        for _ in range(2):  # the lock is free again
            with pytest.raises(StoreMismatchError, match=f"has rows of the collections {lost}"):
                parallel(path, *names)
    alone = Model(["a"]).a
    with pytest.raises(StoreMismatchError, match=r"collections \['a', 'b'\], and the model has \[''\]"):
        shard(
            alone, construct_plan(alone, {"of a": table_wise(1)}, 2), config=TierConfig(hbm="1MiB", path=path)
        )
    dmp = parallel(path, "b", "c", "a")  # another order, and a new one
    assert dmp.committed_extra() == {"step": 3}
    found = dmp.state_dict()
    torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=0, atol=0)
    dmp.close()


def test_collections_that_are_renamed_or_left_out(tmp_path: Path) -> None:
    run(2, other_models, str(tmp_path))


def unsharded(path: str) -> None:
    if dist.get_rank() == 0:
        tierstore.TieredEmbedding(9, 4, config=TierConfig(hbm="1MiB", path=path)).close()
    dist.barrier()
    with pytest.raises(StoreMismatchError, match="has the rows of unsharded tables; give the sharded ones"):
        parallel(path, "a")


def test_the_path_of_unsharded_tables(tmp_path: Path) -> None:
    run(2, unsharded, str(tmp_path))


def used_twice(path: str) -> None:
    for life in range(2):
        first = parallel(path, "a")
        for _ in range(2):
            for names in (["a"], ["b"], ["a", "b"]):
                with pytest.raises(StoreLockedError, match="is in use by another object of this process"):
                    parallel(path, *names)
            first(batch()).sum().backward()
            first.commit({"step": life})
        first.close(commit=False)
        first.close()
    with pytest.raises(ConfigError, match="max pooling cannot be cut by rows"):
        parallel(f"{path}/max", "a", pooling=PoolingType.MAX)
    parallel(f"{path}/max", "a").close()


def test_two_at_one_path_in_the_same_processes(tmp_path: Path) -> None:
    run(2, used_twice, str(tmp_path))


def of_one_rank(path: str) -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    own = groups[dist.get_rank()]
    for first in range(2):
        if dist.get_rank() == first:
            dmp = parallel(path, "a", env=own)
        dist.barrier()
        if dist.get_rank() != first:
            with pytest.raises(StoreLockedError, match=r"is in use by process \d+; close it there"):
                parallel(path, "a", env=own)
        dist.barrier()
        if dist.get_rank() == first:
            dmp.commit({"of": first})
            dmp.close()
        dist.barrier()
    dmp = parallel(f"{path}/{dist.get_rank()}", "a", env=own)
    dmp.commit()
    dmp.close()


def test_groups_at_one_path(tmp_path: Path) -> None:
    run(2, of_one_rank, str(tmp_path))


def one_has_a_path(path: str) -> None:
    model = Model(["a"])
    plan = construct_plan(model.a, {"of a": row_wise()}, 2)
    tiers = TierConfig(hbm="1MiB", path=path if dist.get_rank() else None, ssd="1MiB")
    with pytest.raises(ConfigError, match="rank 1 was given other path than rank 0"):
        DistributedModelParallel(model, plan=plan, config=tiers)


def test_a_path_on_one_rank_only(tmp_path: Path) -> None:
    run(2, one_has_a_path, str(tmp_path))
