"""Builds torchrec's sharded collection, with which benchmarks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tierstore import EmbeddingBagConfig, KeyedJaggedTensor
from tierstore.planner import TableSpec

from ._checks import importing


def collection_on_meta(tables: Iterable[EmbeddingBagConfig | TableSpec]) -> Any:
    """Make torchrec's EmbeddingBagCollection of such tables, without memory; the planner's are summed."""
    with importing("torchrec"):
        import torchrec

    configs = [
        torchrec.EmbeddingBagConfig(
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            name=table.name,
            feature_names=list(table.feature_names),
            pooling=torchrec.PoolingType[table.pooling.name if hasattr(table, "pooling") else "SUM"],
        )
        for table in tables
    ]
    return torchrec.EmbeddingBagCollection(configs, device=torch.device("meta"))


def sharded_by_torchrec(
    configs: Sequence[EmbeddingBagConfig], cuts: Callable[[Any], Mapping[str, Any]], lr: float
) -> nn.Module:
    """Shard an EmbeddingBagCollection of torchrec with SGD over the CPUs of all ranks.

    The collection's input is torchrec's own KeyedJaggedTensor (:func:`as_theirs`). ``cuts`` maps torchrec's
    module ``sharding_plan`` to a cut per table. Raises ConfigError where torchrec cannot be imported.
    """
    with importing("torchrec"):
        from torch.distributed.optim import _apply_optimizer_in_backward
        from torchrec.distributed import sharding_plan as plans
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.types import ShardingEnv, ShardingPlan

    collection = collection_on_meta(configs)
    _apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": lr})
    sharder: Any = EmbeddingBagCollectionSharder()
    world = dist.get_world_size()
    plan = plans.construct_module_sharding_plan(
        collection, dict(cuts(plans)), sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(
        nn.Sequential(collection), env, torch.device("cpu"), ShardingPlan({"0": plan}), [sharder]
    )


def as_theirs(batch: KeyedJaggedTensor) -> Any:
    """Return the same batch as torchrec's class."""
    import torchrec

    return torchrec.KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths().to(torch.int32))
