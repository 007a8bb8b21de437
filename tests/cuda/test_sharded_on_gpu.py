"""Sharded collections whose ranks have a fake GPU each: bits, hits, misses and evictions of ranks on CPUs."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tierstore
from tests.cuda.fake import ORDERS, fake_gpu
from tests.cuda.fake_nccl import compiled, on_gpus  # noqa: F401  (a fixture that all tests use)
from tests.cuda.fake_torch import GpuTensor
from tests.cuda.test_training_on_fake_gpu import counters
from tests.density import in_turns
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import EmbeddingConfig, PoolingType, optim
from tierstore.modules.configs import DataType
from tierstore.sharding import (
    CommsConfig,
    ShardingEnv,
    column_wise,
    construct_plan,
    data_parallel,
    grid_shard,
    row_wise,
    shard,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tierstore.sharding.table_sharding import TableSharding

NAMES = ["t0", "t1", "t2", "t3"]
CUTS: dict[str, dict[str, TableSharding]] = {
    "table_wise": dict(zip(NAMES, map(table_wise, (1, 0, 1, 0)), strict=True)),
    "one rank has none": dict.fromkeys(NAMES, table_wise(0)),
    "row_wise": dict.fromkeys(NAMES, row_wise()),
    "column_wise": dict.fromkeys(NAMES, column_wise([1, 0])) | {"t1": column_wise([0, 1], [8, 3])},
    "data_parallel": dict.fromkeys(NAMES, data_parallel()),
    "table_row_wise": dict.fromkeys(NAMES, table_row_wise(0)),
    "table_column_wise": dict.fromkeys(NAMES, table_column_wise(0)),
    "grid_shard": dict.fromkeys(NAMES, grid_shard([0, 0])),
    "mixed": {
        "t0": row_wise(),
        "t1": column_wise([0, 1], [8, 3]),
        "t2": data_parallel(),
        "t3": table_wise(1),
    },
}
# Shards have columns of which the fake driver has kernels: 3, 8 and 20.
DIMS = dict.fromkeys(CUTS, (8, 3, 20, 8)) | {
    "column_wise": (16, 11, 6, 16),
    "table_column_wise": (16, 6, 16, 16),
    "grid_shard": (6, 16, 6, 6),
    "mixed": (8, 11, 20, 3),
}
FEATURES = {
    "sums": {},
    "means of weighted": {"poolings": (PoolingType.MEAN, PoolingType.SUM), "weighted": True},
    "dedup": {"comms": CommsConfig(dedup=True)},
    "dedup of weighted": {"comms": CommsConfig(dedup=True), "weighted": True},
    "16 bits": {"comms": CommsConfig(forward_precision="bf16", backward_precision="fp16")},
    "rows": {"rows": True},
    "shared bags": {"shared": True},
    "prefetch": {"prefetch": True},
    "accumulated": {"accumulated": True},
    "ids on the GPU": {"ids_on_gpu": True},
    "prefetch of ids on the GPU": {"ids_on_gpu": True, "prefetch": True},
}
HALF = (DataType.BF16, DataType.FP16, DataType.FP32, DataType.BF16)
EXCHANGED = [name for name in FEATURES if name != "sums"]
FEATURES_OF_HALF = {
    "weighted": {"weighted": True},
    "dedup": {"comms": CommsConfig(dedup=True)},
    "16 bits": {"comms": CommsConfig(forward_precision="bf16", backward_precision="bf16")},
    "prefetch": {"prefetch": True},
    "accumulated": {"accumulated": True},
}


def collection(
    cut: str,
    poolings: tuple[PoolingType, ...] = (),
    weighted: bool = False,
    rows: bool = False,
    kinds: tuple[DataType, ...] = (DataType.FP32,) * 4,
    optimizer: optim.OptimizerSpec | None = None,
) -> tuple[list[Any], Any]:
    """Tables of dtypes ``kinds``, and their collection in memory; ``rows``: rows one by one."""
    chosen = zip(cases.tables(*poolings), DIMS[cut], kinds, strict=True)
    configs: list[Any] = [replace(config, embedding_dim=dim, data_type=kind) for config, dim, kind in chosen]
    options = {"config": cases.MEMORY, "optimizer": optimizer or optim.RowWiseAdagrad(lr=0.1), "seed": 3}
    if not rows:
        return configs, tierstore.EmbeddingBagCollection(configs, weighted, **options)
    configs = [
        EmbeddingConfig(c.num_embeddings, c.embedding_dim, c.name, c.data_type, feature_names=c.feature_names)
        for c in configs
    ]
    return configs, tierstore.EmbeddingCollection(configs, need_indices=True, **options)


def flat(found: Any) -> Tensor:
    if isinstance(found, dict):
        return torch.cat([part.values().reshape(-1) for part in found.values()])
    return found.values().reshape(-1)


def trained(cut: str, device: str | None, **more: Any) -> list[Any]:
    """Everything that a training of a sharded collection gives: outputs, gradients, rows, state, counters."""
    names = ("poolings", "weighted", "rows", "kinds", "optimizer")
    options = {name: more[name] for name in names if name in more}
    weighted = more.get("weighted", False)
    configs, whole = collection(cut, **options)
    plan = construct_plan(whole, CUTS[cut], 2, ranks_per_host=2)
    env = ShardingEnv.from_process_group()
    tiers = replace(cases.TIGHT, device=device, stochastic_rounding=more.get("rounds"))
    parts = shard(whole, plan, env, config=tiers, comms=more.get("comms"))
    number = dist.get_rank()
    on = torch.device(f"cuda:{number}" if device else "cpu")
    assert parts.device == on
    found: list[Any] = []
    data = cases.batches(2, 8, shared=more.get("shared", False))
    batches: Any = [batch.of([env.rank], weighted) for batch in data]
    if more.get("ids_on_gpu"):
        batches = [batch.to(on) for batch in batches]
    for batch in tierstore.prefetch(batches, parts, depth=2, window=3) if more.get("prefetch") else batches:
        if weighted:
            batch.weights().requires_grad_()
        out = flat(parts(batch))
        assert out.device == on
        ((out - 0.3) ** 2).sum().backward()
        found += [out.detach().cpu(), *([batch.weights().grad] if weighted else [])]
    if more.get("accumulated"):
        with tierstore.accumulate(parts) as kept:
            for batch in batches[:3]:
                flat(parts(batch)).square().sum().backward()
            found.append(torch.nn.utils.clip_grad_norm_(kept.parameters(), 0.5).cpu())
    found.append(counters(parts.stats()))
    parts.eval()
    with torch.no_grad():
        found.append(flat(parts(batches[1])).cpu())
    found += list(parts.state_dict().values())
    for config in configs:
        found += list(parts.optimizer_rows(torch.arange(config.num_embeddings), config.name).values())
    found.append(env.traffic.bytes_sent)
    parts.close()
    return found


@functools.cache
def on_cpus(cut: str) -> list[Any]:
    """Of a training without options: what runs in every order of streams must give."""
    return trained(cut, None)


def same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(mine, Tensor):
            assert not isinstance(mine, GpuTensor)
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other), number
        else:
            assert mine == other, number


def both(cut: str, order: str, more: dict[str, Any]) -> None:
    expected = trained(cut, None, **more) if more else on_cpus(cut)
    with on_gpus(order) as nccl:
        found = trained(cut, "cuda", **more)
        launches = fake_gpu().counts["launches"]
        assert nccl.exchanges >= 8
    if cut != "one rank has none" or dist.get_rank() == 0:
        counts = next(part for part in found if isinstance(part, list))
        assert launches > 20
        assert len(counts) >= 6
        assert any(counts)
    same(found, expected)


@pytest.mark.parametrize(("cut", "order"), in_turns(CUTS, ORDERS))
def test_every_cut_has_the_bits_of_ranks_on_cpus(cut: str, order: str) -> None:
    run(2, both, cut, order, {})


@pytest.mark.parametrize(("features", "cut"), in_turns(EXCHANGED, ["row_wise", "mixed"]))
def test_everything_that_is_exchanged_has_the_bits_of_cpus(cut: str, features: str) -> None:
    run(2, both, cut, "random", FEATURES[features])


@pytest.mark.parametrize(("cut", "rows"), in_turns(CUTS, [False, True]))
def test_tables_of_16_bits_have_the_bits_of_cpus(cut: str, rows: bool) -> None:
    run(2, both, cut, "random", {"kinds": HALF, "rounds": True, "rows": rows})


@pytest.mark.parametrize("rows", [False, True])
def test_tables_of_16_bits_that_round_to_nearest_have_the_bits_of_cpus(rows: bool) -> None:
    run(2, both, "mixed", "lazy", {"kinds": HALF, "rounds": False, "rows": rows})


@pytest.mark.parametrize("spec", [optim.SGD(lr=0.1), optim.Adam(lr=0.05)], ids=lambda spec: spec.name)
@pytest.mark.parametrize("cut", ["column_wise", "mixed"])
def test_optimizers_of_16_bits_have_the_bits_of_cpus(cut: str, spec: optim.OptimizerSpec) -> None:
    run(2, both, cut, "random", {"kinds": HALF, "rounds": True, "optimizer": spec})


@pytest.mark.parametrize("features", FEATURES_OF_HALF)
def test_what_16_bits_exchange_has_the_bits_of_cpus(features: str) -> None:
    run(2, both, "mixed", "random", {"kinds": HALF, "rounds": True} | FEATURES_OF_HALF[features])
