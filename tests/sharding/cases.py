"""A model in plain and sharded form, fed the same batches, must be the same model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import tierstore
from tierstore import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType, TierConfig, optim
from tierstore.sharding import ShardingEnv, construct_plan, shard
from tierstore.sharding.cuts import Cut

MEMORY = TierConfig(hbm="all")
TIGHT = TierConfig(hbm="24KiB", uvm="16KiB", ssd="64MiB", engine="memory")


def tables(pooling: PoolingType = PoolingType.SUM, count: int = 4) -> list[EmbeddingBagConfig]:
    """Dims 6 (two features), 10, 8 (a feature that t0 has too), 6."""
    dims, names = (6, 10, 8, 6), (["a", "b"], ["c"], ["a"], ["d"])
    return [
        EmbeddingBagConfig(50 + 7 * i, dims[i], f"t{i}", feature_names=names[i], pooling=pooling)
        for i in range(count)
    ]


@dataclass
class Batch:
    """Global batch: ids, bag lengths and weights by feature and rank."""

    lengths: dict[str, list[Tensor]]
    ids: dict[str, list[Tensor]]
    weights: dict[str, list[Tensor]]

    def of(self, ranks: list[int], weighted: bool = False) -> KeyedJaggedTensor:
        def joined(parts: dict[str, list[Tensor]]) -> Tensor:
            return torch.cat([parts[key][rank] for key in parts for rank in ranks])

        return KeyedJaggedTensor(
            list(self.ids), joined(self.ids), joined(self.weights) if weighted else None, joined(self.lengths)
        )


def batches(world: int, steps: int, longest: int = 4, empty: int | None = None, seed: int = 0) -> list[Batch]:
    """Ranks have 5, 6, 7 ... bags; rank ``empty`` has none in every second batch. Ids repeat."""
    rng = np.random.default_rng(seed)
    rows = {"c": 57, "a": 50, "d": 71, "b": 50}  # not the order of the tables
    found = []
    for step in range(steps):
        batch = Batch({}, {}, {})
        sizes = [0 if rank == empty and step % 2 else 5 + rank for rank in range(world)]
        for name, bound in rows.items():
            lengths = [torch.from_numpy(rng.integers(0, longest + 1, size)) for size in sizes]
            batch.lengths[name] = lengths
            batch.ids[name] = [torch.from_numpy(rng.zipf(1.3, int(n.sum())) % bound) for n in lengths]
            batch.weights[name] = [torch.from_numpy(rng.random(int(n.sum()), np.float32)) for n in lengths]
        found.append(batch)
    return found


def check(
    env: ShardingEnv,
    cuts: dict[str, Cut],
    configs: list[EmbeddingBagConfig],
    data: list[Batch],
    optimizer: optim.OptimizerSpec,
    *,
    tiers: TierConfig = MEMORY,
    weighted: bool = False,
    exact: bool = True,
    ranks_per_host: int | None = None,
) -> None:
    """Trains both and compares outputs, gradients of weights, and rows with their state: bit for bit if
    ``exact``, else to 1e-6."""
    whole = tierstore.EmbeddingBagCollection(configs, weighted, config=MEMORY, optimizer=optimizer, seed=3)
    twin = tierstore.EmbeddingBagCollection(configs, weighted, config=MEMORY, optimizer=optimizer, seed=3)
    plan = construct_plan(whole, cuts, env.world_size, ranks_per_host)
    parts = shard(twin, plan, env, config=tiers)
    limit = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-6, "atol": 1e-6}
    everyone = list(range(env.world_size))
    for step, batch in enumerate(data):
        full, own = batch.of(everyone, weighted), batch.of([env.rank], weighted)
        expected, found = whole(full), parts(own)
        assert found.keys() == expected.keys()
        counts = [len(batch.lengths["a"][rank]) for rank in everyone]
        mine = slice(sum(counts[: env.rank]), sum(counts[: env.rank + 1]))
        torch.testing.assert_close(found.values(), expected.values()[mine], **limit)
        target = torch.randn(expected.values().shape, generator=torch.Generator().manual_seed(step))
        (expected.values() * (target / env.world_size)).sum().backward()
        (found.values() * target[mine]).sum().backward()
    for config in configs:
        ids = torch.arange(config.num_embeddings)
        torch.testing.assert_close(parts.rows(ids, config.name), whole.rows(ids, config.name), **limit)
        state = parts.optimizer_rows(ids, config.name)
        for name, value in whole.optimizer_rows(ids, config.name).items():
            torch.testing.assert_close(state[name], value, **limit)
    assert parts.state_dict().keys() == whole.state_dict().keys()
    whole.close()
    parts.close()
