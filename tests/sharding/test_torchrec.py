"""The same weights, plan and batches in torchrec's sharded collection: the same outputs and final weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import EmbeddingBagConfig, PoolingType, optim
from tierstore.sharding import ShardingEnv, column_wise, construct_plan, row_wise, shard, table_wise


def torchrec_model(configs: list[EmbeddingBagConfig], weights: dict[str, torch.Tensor]) -> nn.Module:
    import torchrec
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv as Env
    from torchrec.distributed.types import ShardingPlan

    tables = [
        torchrec.EmbeddingBagConfig(
            num_embeddings=t.num_embeddings,
            embedding_dim=t.embedding_dim,
            name=t.name,
            feature_names=t.feature_names,
            pooling=torchrec.PoolingType[t.pooling.name],
        )
        for t in configs
    ]
    collection = torchrec.EmbeddingBagCollection(tables, device=torch.device("cpu"))
    _apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    cuts = {"t0": plans.row_wise(), "t1": plans.table_wise(rank=1), "t2": plans.column_wise(ranks=[0, 1])}
    if (
        configs[0].pooling is PoolingType.MEAN
    ):  # beside a row-wise table torchrec divides the others' means twice
        cuts = dict.fromkeys(cuts, plans.row_wise())
    sharder = EmbeddingBagCollectionSharder()
    plan = plans.construct_module_sharding_plan(
        collection, cuts, sharder=sharder, local_size=2, world_size=2, device_type="cpu"
    )
    model = DistributedModelParallel(
        nn.Sequential(collection),
        Env.from_process_group(dist.group.WORLD),
        torch.device("cpu"),
        ShardingPlan({"0": plan}),
        [sharder],
    )
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
    import torchrec

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
            expected = theirs(
                torchrec.KeyedJaggedTensor(
                    features.keys(), features.values(), lengths=features.lengths().to(torch.int32)
                )
            ).wait()
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
