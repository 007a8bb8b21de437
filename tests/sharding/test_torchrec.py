"""The same weights, plan and batches in torchrec's sharded collection: the same outputs and final weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import tierstore
from bench._torchrec import as_theirs, sharded_by_torchrec
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import EmbeddingBagConfig, PoolingType, optim
from tierstore.sharding import ShardingEnv, column_wise, construct_plan, row_wise, shard, table_wise


def torchrec_model(configs: list[EmbeddingBagConfig], weights: dict[str, torch.Tensor]) -> nn.Module:
    def cuts(plans: Any) -> dict[str, Any]:
        if configs[0].pooling is PoolingType.MEAN:  # beside a row-wise table others' means are divided twice
            return dict.fromkeys(("t0", "t1", "t2"), plans.row_wise())
        columns = plans.column_wise(ranks=[0, 1])
        return {"t0": plans.row_wise(), "t1": plans.table_wise(rank=1), "t2": columns}

    model = sharded_by_torchrec(configs, cuts, lr=0.1)
    for part, weight in shards_of(model, weights):
        part.copy_(weight)
    return model


def shards_of(
    model: nn.Module, weights: dict[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The shards of this rank in torchrec's model, and the same parts of ``weights``."""
    for key, value in model.state_dict().items():
        for part in value.local_shards():
            (row, column), (rows, columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
            yield part.tensor, weights[key.removeprefix("0.")][row : row + rows, column : column + columns]


def agree() -> None:
    warnings.simplefilter("ignore")
    env = ShardingEnv.from_process_group()
    for pooling in (PoolingType.SUM, PoolingType.MEAN):
        configs = [
            EmbeddingBagConfig(rows, dim, f"t{i}", feature_names=[name], pooling=pooling)
            for i, (rows, dim, name) in enumerate([(50, 8, "a"), (57, 4, "c"), (71, 16, "d")])
        ]
        whole = tierstore.EmbeddingBagCollection(configs, config=cases.MEMORY, optimizer=optim.SGD(lr=0.1))
        theirs = torchrec_model(configs, whole.state_dict())
        cuts = {"t0": row_wise(), "t1": table_wise(1), "t2": column_wise([0, 1])}
        ours = shard(whole, construct_plan(whole, cuts, 2), env, config=cases.TIGHT)
        for batch in cases.batches(2, 4, grow=0):
            features = batch.of([env.rank])
            found = ours(features)
            expected = theirs(as_theirs(features)).wait()
            for key in expected.keys():  # noqa: SIM118  (a KeyedTensor)
                torch.testing.assert_close(found[key], expected[key], rtol=1e-6, atol=1e-6)
            found.values().square().sum().backward()
            sum(expected[key].square().sum() for key in found.keys()).backward()  # noqa: SIM118
        weights = ours.state_dict()
        for part, weight in shards_of(theirs, weights):
            torch.testing.assert_close(part, weight, rtol=1e-6, atol=1e-6)
        ours.close()


def test_training_agrees_with_torchrec() -> None:
    run(2, agree)
