"""How fast ranks of one host exchange vectors over gloo."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ._ranks import on_ranks

_SIZES = (1 << 18, 1 << 20, 1 << 22)
"""Bytes that a rank sends to each other one: those of a step's vectors in most models."""


def exchange_bandwidth(ranks: int, seconds: float) -> float:
    """Bytes per second that each of ``ranks`` processes receives from the others, all at once."""
    rate: float = on_ranks(ranks, _received, seconds)
    return rate


def _received(seconds: float) -> float:
    torch.set_num_threads(1)
    return sum(_rate(size // 4, seconds / len(_SIZES)) for size in _SIZES) / len(_SIZES)


def _rate(floats: int, seconds: float) -> float:
    """Of all-to-alls of ``floats`` numbers to each other rank, as sharded collections make them: nothing is
    sent to oneself."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [0 if other == rank else floats for other in range(world)]
    sent, found = torch.zeros(sum(sizes)), torch.empty(sum(sizes))
    times = []
    until, more = time.perf_counter() + seconds, torch.ones(1)
    while more:
        start = time.perf_counter()
        dist.all_to_all_single(found, sent, sizes, sizes)
        times.append(time.perf_counter() - start)
        more[0] = time.perf_counter() < until
        dist.all_reduce(more, dist.ReduceOp.MIN)  # all stop at the same time
    return found.nbytes * len(times) / sum(times)
