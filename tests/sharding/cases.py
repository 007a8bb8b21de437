"""A model in plain and sharded form, fed the same batches, must be the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tierstore
from tierstore import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType, TierConfig, optim
from tierstore.sharding import CommsConfig, ShardingEnv, construct_plan, shard
from tierstore.sharding.table_sharding import TableSharding

MEMORY = TierConfig(hbm="all")
TIGHT = TierConfig(hbm="24KiB", uvm="16KiB", ssd="64MiB", engine="memory")


def tables(*poolings: PoolingType) -> list[EmbeddingBagConfig]:
    """Dims 6 (two features), 10, 8 (a feature that t0 has too), 6. ``poolings`` in turns; sums if none."""
    dims, names = (6, 10, 8, 6), (["a", "b"], ["c"], ["a"], ["d"])
    kinds = poolings or (PoolingType.SUM,)
    return [
        EmbeddingBagConfig(
            50 + 7 * i, dims[i], f"t{i}", feature_names=names[i], pooling=kinds[i % len(kinds)]
        )
        for i in range(4)
    ]


@dataclass
class Batch:
    """Global batch: ids, bag lengths and weights by feature and rank. ``bag_of``: which of these bags each of
    ``sizes`` examples of a rank has, where features have fewer bags than there are examples."""

    lengths: dict[str, list[Tensor]]
    ids: dict[str, list[Tensor]]
    weights: dict[str, list[Tensor]]
    bag_of: dict[str, list[Tensor]]
    sizes: list[int]

    def of(self, ranks: list[int], weighted: bool = False) -> KeyedJaggedTensor:
        def joined(parts: dict[str, list[Tensor]]) -> Tensor:
            return torch.cat([parts[key][rank] for key in parts for rank in ranks])

        more: dict[str, Any] = {}
        if self.bag_of:
            counts = {key: [len(parts[rank]) for rank in ranks] for key, parts in self.lengths.items()}
            before = {key: np.cumsum([0, *of_rank]).tolist() for key, of_rank in counts.items()}
            rows = [
                torch.cat([parts[rank] + at for rank, at in zip(ranks, before[key], strict=False)])
                for key, parts in self.bag_of.items()
            ]
            more["stride_per_key_per_rank"] = [[sum(of_rank)] for of_rank in counts.values()]
            more["inverse_indices"] = (list(self.bag_of), torch.stack(rows))
        weights = joined(self.weights) if weighted else None
        return KeyedJaggedTensor(list(self.ids), joined(self.ids), weights, joined(self.lengths), **more)


def batches(
    world: int,
    steps: int,
    longest: int = 4,
    empty: int | None = None,
    grow: int = 1,
    shared: bool = False,
) -> list[Batch]:
    """Ranks have 5, 5 + ``grow`` ... bags; rank ``empty`` none in every second batch. Ids repeat.

    ``shared``: features have fewer bags, each its own number, which examples share.
    """
    rng = np.random.default_rng(0)
    rows = {"c": 57, "a": 50, "d": 71, "b": 50}  # not the order of the tables
    found = []
    for step in range(steps):
        sizes = [0 if rank == empty and step % 2 else 5 + grow * rank for rank in range(world)]
        batch = Batch({}, {}, {}, {}, sizes)
        for number, (name, bound) in enumerate(rows.items()):
            counts = [min(size, 1 + (size + rank) // (number + 1)) for rank, size in enumerate(sizes)]
            if shared:
                draws = zip(counts, sizes, strict=True)
                batch.bag_of[name] = [torch.from_numpy(rng.integers(0, n, size)) for n, size in draws]
            lengths = [
                torch.from_numpy(rng.integers(0, longest + 1, n)) for n in (counts if shared else sizes)
            ]
            batch.lengths[name] = lengths
            batch.ids[name] = [torch.from_numpy(rng.zipf(1.3, int(n.sum())) % bound) for n in lengths]
            batch.weights[name] = [torch.from_numpy(rng.random(int(n.sum()), np.float32)) for n in lengths]
        found.append(batch)
    return found


def check(
    env: ShardingEnv,
    cuts: dict[str, TableSharding],
    configs: list[Any],
    data: list[Batch],
    optimizer: optim.OptimizerSpec,
    *,
    tiers: TierConfig = MEMORY,
    weighted: bool = False,
    tolerance: float = 0.0,
    ranks_per_host: int | None = None,
    comms: CommsConfig | None = None,
) -> None:
    """Trains both and compares outputs, gradients of weights, and rows with their state, to ``tolerance``:
    bit for bit if that is 0."""
    memory = replace(MEMORY, stochastic_rounding=tiers.stochastic_rounding)
    whole, twin = (_collection(configs, weighted, optimizer, memory) for _ in range(2))
    plan = construct_plan(whole, cuts, env.world_size, ranks_per_host)
    parts = shard(twin, plan, env, config=tiers, comms=comms)
    limit = {"rtol": tolerance, "atol": tolerance}
    everyone = list(range(env.world_size))
    for step, batch in enumerate(data):
        full, own = batch.of(everyone, weighted), batch.of([env.rank], weighted)
        for kjt in (full, own):
            if weighted:
                kjt.weights().requires_grad_()
        expected, found = whole(full), parts(own)
        assert list(found.keys()) == list(expected.keys())
        noise = torch.Generator().manual_seed(step)
        losses = [torch.zeros(()), torch.zeros(())]
        for name, values, part, mine in _outputs(expected, found, batch, env.rank):
            torch.testing.assert_close(
                part, values[mine], **limit, msg=lambda text, name=name: f"{name}: {text}"
            )
            target = torch.randn(values.shape, generator=noise)
            losses[0] = losses[0] + (values * (target / env.world_size)).sum()
            losses[1] = losses[1] + (part * target[mine]).sum()
        losses[0].backward()
        losses[1].backward()
        if weighted:
            _check_weights(full, own, batch, env, max(tolerance, 1e-5))
    rows, expected = parts.state_dict(), whole.state_dict()
    assert list(rows) == list(expected)
    torch.testing.assert_close(rows, expected, **limit)
    for config in configs:
        ids = torch.arange(config.num_embeddings)
        state = parts.optimizer_rows(ids, config.name)
        for name, value in whole.optimizer_rows(ids, config.name).items():
            torch.testing.assert_close(state[name], value, **limit)
    whole.close()
    parts.close()


def _collection(
    configs: list[Any], weighted: bool, optimizer: optim.OptimizerSpec, config: TierConfig
) -> Any:
    options = {"config": config, "optimizer": optimizer, "seed": 3}
    if isinstance(configs[0], EmbeddingConfig):
        return tierstore.EmbeddingCollection(configs, need_indices=True, **options)
    return tierstore.EmbeddingBagCollection(configs, weighted, **options)


def _outputs(
    expected: Any, found: Any, batch: Batch, rank: int
) -> Iterator[tuple[str, Tensor, Tensor, slice]]:
    """Name, the single process's values, this rank's, and which of the former they must be."""
    if isinstance(expected, dict):
        for name, jagged in expected.items():
            torch.testing.assert_close(found[name].lengths(), batch.lengths[name[0]][rank])
            assert found[name].weights().equal(batch.ids[name[0]][rank])  # need_indices
            yield name, jagged.values(), found[name].values(), _mine(batch.ids[name[0]], rank)
    else:
        begin = sum(batch.sizes[:rank])
        yield "pooled", expected.values(), found.values(), slice(begin, begin + batch.sizes[rank])


def _mine(parts: list[Tensor], rank: int) -> slice:
    begin = sum(len(part) for part in parts[:rank])
    return slice(begin, begin + len(parts[rank]))


def _check_weights(
    full: KeyedJaggedTensor, own: KeyedJaggedTensor, batch: Batch, env: ShardingEnv, limit: float
) -> None:
    """Gradients of per-sample weights are those of this rank's own loss, not divided."""
    expected, found = full.weights().grad, own.weights().grad
    assert expected is not None
    assert found is not None
    at, parts = 0, []
    for pieces in batch.ids.values():
        mine = _mine(pieces, env.rank)
        parts.append(expected[at + mine.start : at + mine.stop])
        at += sum(len(piece) for piece in pieces)
    torch.testing.assert_close(found, torch.cat(parts) * env.world_size, rtol=limit, atol=limit)
