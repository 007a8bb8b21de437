"""One rank of what ``tierstore bench plan-vs-torchrec --train`` trains: one plan, by one runtime."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

import tierstore
from tierstore import KeyedJaggedTensor, TierConfig
from tierstore.cache.engine import set_num_threads
from tierstore.optim import SGD
from tierstore.placement import ShardingPlan
from tierstore.sharding import DistributedModelParallel

from ._neighbours import LOUD, Neighbours
from ._their_plan import cuts_for_cpu
from ._torchrec import as_theirs, sharded_by_torchrec
from ._trained_plan import DEPTH, LR, WINDOW, Data, Model, Tables, Turns, dense_seconds, train_step

_LOADED = 1 << 15  # rows at a time


class Parts(Data):
    """Batches of all ranks together, of ``batch_size`` examples each. ``bags``: ids of a bag, by table."""

    def __init__(self, tables: Tables, bags: tuple[int, ...], batch_size: int, ranks: int) -> None:
        super().__init__(tables, batch_size * ranks)
        self.bags, self.part_size = bags, batch_size

    def ids(self, step: int) -> list[NDArray[np.int64]]:
        random = np.random.default_rng(1000 + step)
        counts = [self.batch_size * bag for bag in self.bags]
        return [
            names[np.searchsorted(edges, random.random(count))]
            for (edges, names), count in zip(self._draws, counts, strict=True)
        ]

    def part(self, step: int, rank: int) -> KeyedJaggedTensor:
        """The examples of one rank."""
        size = self.part_size
        ids = [
            every[rank * size * bag : (rank + 1) * size * bag]
            for every, bag in zip(self.ids(step), self.bags, strict=True)
        ]
        lengths = torch.tensor(self.bags).repeat_interleave(size)
        names = [config.name for config in self.configs]
        return KeyedJaggedTensor(names, torch.from_numpy(np.concatenate(ids)), None, lengths)


@dataclass
class Job:
    """A model that is trained: its own part of every batch, whatever runs it."""

    model: torch.nn.Module
    batches: Iterator[Any]
    draw: Callable[[int], None]
    bytes_sent: Callable[[], int]
    close: Callable[[], None]


def trained_by_tierstore(data: Parts, plan: ShardingPlan, turns: Turns) -> dict[str, Any]:
    """Trains with the shards and tiers of a plan; see :func:`_train`."""
    _one_thread()
    return _train(job_by_tierstore(data, plan), turns)


def job_by_tierstore(data: Parts, plan: ShardingPlan) -> Job:
    """All rows begin as zeros, and are there."""
    torch.manual_seed(0)
    bags = tierstore.EmbeddingBagCollection(data.configs, config=TierConfig(hbm="all"), optimizer=SGD(lr=LR))
    stored = any(shard.ssd_bytes for table in plan.tables for shard in table.shards)
    config = TierConfig(ssd="10GiB" if stored else 0)
    model = DistributedModelParallel(Model(bags, data.width), plan=plan, config=config)
    (sharded,) = model.sharded.values()
    for table in data.configs:
        for first in range(0, table.num_embeddings, _LOADED):
            ids = torch.arange(first, min(first + _LOADED, table.num_embeddings))
            sharded.load_rows(ids, torch.zeros(len(ids), table.embedding_dim), None, table.name)
    drawn, draw = _drawing(data, lambda batch: batch)
    batches = tierstore.prefetch(drawn, model, depth=DEPTH, window=WINDOW)

    def close() -> None:
        batches.close()
        model.close()

    return Job(model, batches, draw, lambda: sharded.env.traffic.bytes_sent, close)


def trained_by_torchrec(
    data: Parts, placed: Mapping[str, tuple[str, list[int]]], turns: Turns
) -> dict[str, Any]:
    """Trains with torchrec's own collections, all in memory. ``placed``: sharding type and ranks by table."""
    _one_thread()
    warnings.simplefilter("ignore")
    bags = sharded_by_torchrec(data.configs, cuts_for_cpu(placed), LR)
    model = Model(lambda features: bags(features).wait(), data.width)
    model.over = DistributedDataParallel(model.over)  # type: ignore[assignment]
    drawn, draw = _drawing(data, as_theirs)
    return _train(Job(model, drawn, draw, lambda: 0, lambda: None), turns)


def dense_seconds_of(data: Parts) -> float:
    """What the planner is told of the dense part: seconds of a rank's processors, the exchange of gradients
    included."""
    _one_thread()
    found = dense_seconds(data.part_size, data.width, DistributedDataParallel, time.process_time)
    return _largest(found)


def _one_thread() -> None:
    torch.set_num_threads(1)
    set_num_threads(1)


def _drawing(data: Parts, convert: Callable[[Any], Any]) -> tuple[Iterator[Any], Callable[[int], None]]:
    """(Endless batches, what makes so many of them ahead of time): drawing them is no part of a step."""
    drawn, rank = deque[Any](), dist.get_rank()
    next_step = iter(range(1 << 40))

    def draw(count: int) -> None:
        drawn.extend(convert(data.part(next(next_step), rank)) for _ in range(count))

    def batches() -> Iterator[Any]:
        while True:
            if not drawn:
                draw(1)
            yield drawn.popleft()

    return batches(), draw


def _train(job: Job, turns: Turns) -> dict[str, Any]:
    """Per step: seconds of the slowest rank, CPU seconds of all ranks, bytes of the loopback device for each
    rank (dense gradients and TCP's own included); medians of the calm turns (of all where there are none).
    Bytes that a rank's collections send on average, 0 where they do not count; the loss of rank 0 at the end.
    """
    optimizer = torch.optim.SGD(job.model.parameters(), lr=LR)
    neighbours = Neighbours(_sum)
    found: list[dict[str, float]] = []
    job.draw(turns.warm + WINDOW + DEPTH + 2)
    _steps(job, optimizer, turns.warm)
    sent = job.bytes_sent()
    while sum(turn["others"] < LOUD for turn in found) < turns.turns and len(found) < 2 * turns.turns:
        job.draw(WINDOW + turns.steps)
        _steps(job, optimizer, WINDOW)  # what was fetched while batches were drawn is used up
        neighbours.share()
        start, cpu, passed = time.perf_counter(), time.process_time(), _loopback_bytes()
        loss = _steps(job, optimizer, turns.steps)
        taken, worked = time.perf_counter() - start, time.process_time() - cpu
        passed = (_loopback_bytes() - passed) / dist.get_world_size()
        turn = {"step": _largest(taken), "cpu": _sum(worked), "loopback": _largest(passed)}
        turn = {name: value / turns.steps for name, value in turn.items()}
        found.append({**turn, "others": _largest(neighbours.share())})
    calm = [turn for turn in found if turn["others"] < LOUD]
    figures = {name: float(np.median([turn[name] for turn in calm or found])) for name in found[0]}
    steps = len(found) * (WINDOW + turns.steps) * dist.get_world_size()
    per_step = round(_sum(job.bytes_sent() - sent) / steps)
    job.close()
    return {**figures, "calm": len(calm), "turns": len(found), "bytes_sent": per_step, "loss": loss}


def _steps(job: Job, optimizer: torch.optim.Optimizer, count: int) -> float:
    for _ in range(count):
        loss = train_step(job.model, optimizer, next(job.batches))
    return float(loss)


def _loopback_bytes() -> float:
    """All processes' of this machine."""
    devices = psutil.net_io_counters(pernic=True)
    return float(sum(found.bytes_sent for name, found in devices.items() if name.startswith("lo")))


def _sum(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def _largest(value: float) -> float:
    most = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)
