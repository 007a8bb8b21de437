"""The cost of exchanges between ranks of one host: per byte, per collective, in the runtime.

Vectors of tables on CPUs go over gloo, and vectors of tables on GPUs over NCCL.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

import tierstore
from tierstore import EmbeddingBagConfig, KeyedJaggedTensor, TierConfig, optim
from tierstore.planner.costs import EXCHANGES
from tierstore.sharding import ShardingEnv, construct_plan, row_wise, shard

from ._ranks import on_ranks

_SIZES = (1 << 18, 1 << 20, 1 << 22)
"""Bytes that a rank sends to each other rank: about the bytes of a step's vectors in most models."""
_TABLES = (2, 26)
"""Tables of the collections that are trained for the costs of steps and pieces."""
_CHUNK = 8  # steps whose mean is one measurement
_WARM = 24


def exchange_figures(ranks: int, seconds: float, device: str = "cpu") -> dict[str, Any]:
    """Measure fields of a Topology: ``intra_host_bw`` and ``exchange_seconds``.

    The bandwidth is the bytes per second that each of ``ranks`` processes receives from the other processes
    while all of them exchange. ``device``: "cpu", or "cuda", where each rank has the GPU of its number.
    """
    found: dict[str, Any] = on_ranks(ranks, figures_of_rank, seconds, device)
    return found


def figures_of_rank(seconds: float, device: str) -> dict[str, Any]:
    """Measure the fields of :func:`exchange_figures`. All ranks call it."""
    torch.set_num_threads(1)
    tierstore.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{dist.get_rank()}"
        torch.cuda.set_device(device)
    (few, few_busy), (many, many_busy) = (_step(tables, seconds, device) for tables in _TABLES)
    pieces = [tables * dist.get_world_size() for tables in _TABLES]
    piece = max(0.0, many_busy - few_busy) / (pieces[1] - pieces[0])
    waits = max(0.0, few - few_busy + many - many_busy) / 2
    return {
        "intra_host_bw": statistics.mean(_rate(size // 4, seconds / len(_SIZES), device) for size in _SIZES),
        "exchange_seconds": {
            "step": max(0.0, few_busy - pieces[0] * piece),
            "collective": waits / EXCHANGES,
            "piece": piece,
        },
    }


def _wait_for(device: str) -> None:
    """Wait until a GPU has done what it was given, so that a clock of the host sees it."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def _rate(floats: int, seconds: float, device: str) -> float:
    """Measure all-to-alls of ``floats`` numbers to each other rank, as sharded collections make them.

    No rank sends anything to itself.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [0 if other == rank else floats for other in range(world)]
    sent, found = torch.zeros(sum(sizes), device=device), torch.empty(sum(sizes), device=device)
    env = ShardingEnv.of(None)

    def exchange() -> None:
        env.all_to_all(found, sent, sizes, sizes).wait()
        _wait_for(device)

    times = _times(exchange, seconds)
    return found.nbytes * len(times) / sum(wall for wall, _ in times)


def _step(tables: int, seconds: float, device: str) -> tuple[float, float]:
    """Measure the typical seconds by the clock, and of the rank's processors, of a small step.

    The step has ``tables`` small row-wise tables and one id of each per example, so that little but its fixed
    cost remains.
    """
    env = ShardingEnv.of(None)
    configs = [EmbeddingBagConfig(1024, 8, f"t{i}", feature_names=[f"t{i}"]) for i in range(tables)]
    whole = tierstore.EmbeddingBagCollection(
        configs, config=TierConfig(hbm="all", device=device), optimizer=optim.SGD(lr=0.1)
    )
    plan = construct_plan(whole, {config.name: row_wise() for config in configs}, env.world_size)
    bags = shard(whole, plan, env)
    examples = 8
    ids = torch.arange(tables * examples) * 1024 // (tables * examples)
    batch = KeyedJaggedTensor([c.name for c in configs], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
    batches: Iterator[Any] = tierstore.prefetch(repeat(batch), bags, depth=2, window=8)
    grad = torch.ones(examples, 8 * tables, device=device)

    def steps() -> None:
        for _ in range(_CHUNK):
            bags(next(batches)).values().backward(grad)
        _wait_for(device)

    for _ in range(_WARM // _CHUNK):
        steps()
    wall, busy = (statistics.median(each) / _CHUNK for each in zip(*_times(steps, seconds), strict=True))
    batches.close()  # type: ignore[attr-defined]
    bags.close()
    return wall, busy


def _times(work: Callable[[], object], seconds: float) -> list[tuple[float, float]]:
    """Time each call, by the clock and by this rank's processors, until all ranks stop at the same time."""
    times = []
    until, more = time.perf_counter() + seconds, torch.ones(1)
    while more:
        start, busy = time.perf_counter(), time.process_time()
        work()
        times.append((time.perf_counter() - start, time.process_time() - busy))
        more[0] = time.perf_counter() < until
        dist.all_reduce(more, dist.ReduceOp.MIN)
    return times
