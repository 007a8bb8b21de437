"""A discrete-event simulation of a planned cluster's steps.

The planner predicts a step as its longest stage. The simulation knows nothing of that: each batch goes
through its stages on every rank; stages wait for one another, for the batch before and for shared drives;
all-to-alls start when the last rank is ready; ids are drawn, deduplicated and looked up in what each shard
holds, its most popular rows; service times vary. The rates of the machines and what single operations cost
are the planner's.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np

from tierstore.planner import Popularity
from tierstore.planner.solver import Solution

_DRAWN = 2  # different batches, which are used in turns


class Simulation:
    """Steps of a planned cluster. ``jitter``: relative standard deviation of every service time."""

    def __init__(self, solution: Solution, depth: int, jitter: float) -> None:
        self.depth, self.jitter = depth, jitter
        self.random = np.random.default_rng(0)
        self.topology = topology = solution.problem.topology
        self.world = topology.world_size
        self.now, self.events, self.count = 0.0, [], 0
        caches = solution.caches
        self.rank_of = caches.rank
        self.batches_drawn = [self._draw(solution) for _ in range(_DRAWN)]
        self.link_s, self.ssd_s = caches.field("link_s"), caches.field("ssd_s")
        self.kernels, self.index, self.intra, self.inter, *_ = solution.prediction.ranks.T
        self.moves = topology.host_link_bw / topology.hbm_bw
        self.free: dict[tuple[str, int], float] = defaultdict(float)  # when each server has done its jobs
        self.finished: list[float] = []

    def _draw(self, solution: Solution) -> tuple[np.ndarray, np.ndarray]:
        """Count the rows of one global batch and shard that are not in device memory, and not in memory."""
        caches, problem = solution.caches, solution.problem
        missing: list[tuple[int, int]] = []
        for item, shards in zip(solution.placed, solution.shards(), strict=True):
            table, rows = problem.tables[item.table], item.option.row_cuts
            lookups = int(table.accesses(problem.global_batch))
            ids = popular_ids(self.random, table.rows, table.popularity, lookups)
            # Popularity is spread evenly over row cuts; each shard holds its most popular rows.
            parts = (ids % rows).astype(np.int16)
            order, ends = np.argsort(parts, kind="stable"), np.cumsum(np.bincount(parts, minlength=rows))
            places = np.split(ids[order] // rows, ends[:-1])
            for j, held in enumerate(zip(caches.hbm_rows[shards], caches.memory_rows[shards], strict=True)):
                here = places[j % rows]
                missing.append(tuple(len(here) - int(np.searchsorted(here, n)) for n in held))
        both = np.array(missing, dtype=np.float64)
        return both[:, 0], both[:, 1]

    def run(self, batches: int) -> float:
        """Return the mean seconds per step, without the first third."""
        self.batches, self.started = batches, 0
        for _ in range(min(self.depth + 1, batches)):
            self._start_batch()
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            action()
        skip = batches // 3
        return (self.finished[-1] - self.finished[skip - 1]) / (batches - skip)

    # A batch: ids are exchanged and indexed, misses read and moved, outputs exchanged, rows computed on.

    def _start_batch(self) -> None:
        self.started += 1
        link_misses, ssd_misses = self.batches_drawn[self.started % _DRAWN]
        link = np.bincount(self.rank_of, link_misses * self.link_s, self.world)
        ssd = np.bincount(self.rank_of, ssd_misses * self.ssd_s, self.world)
        compute = partial(self._on_all_ranks, "device", self.kernels + link * self.moves, self._finish_batch)
        exchange = partial(self._on_all_ranks, "network", np.maximum(self.intra, self.inter), compute)
        gathered = last_of(self.world, exchange)
        for r in range(self.world):
            to_link = partial(self._serve, ("link", r), float(link[r]), gathered)
            to_ssd = partial(self._serve, ("ssd", r // self.topology.ranks_per_host), float(ssd[r]), to_link)
            self._serve(("index", r), float(self.index[r]), to_ssd)

    def _finish_batch(self) -> None:
        self.finished.append(self.now)
        if self.started < self.batches:
            self._start_batch()

    def _on_all_ranks(self, name: str, seconds: np.ndarray, then: Callable[[], None]) -> None:
        """Let each rank's server of a name do a job, and call ``then`` when the slowest has done its job."""
        done = last_of(self.world, then)
        for r in range(self.world):
            self._serve((name, r), float(seconds[r]), done)

    def _serve(self, name: tuple[str, int], seconds: float, then: Callable[[], None]) -> None:
        """Let a server do a job, after those that came before, and then call ``then``."""
        factor = max(0.1, 1 + self.jitter * self.random.standard_normal())
        self.free[name] = max(self.now, self.free[name]) + seconds * factor
        self.count += 1
        heapq.heappush(self.events, (self.free[name], self.count, then))


def popular_ids(random: np.random.Generator, rows: int, popularity: Popularity, count: int) -> np.ndarray:
    """Return the distinct ids of ``count`` draws of P(k) ~ (k + q)^-s, k in [0, rows) (int64, sorted)."""
    power, shift = 1 - popularity.s or 1e-9, popularity.q + 1
    first, last = ((np.array([-0.5, rows - 0.5]) + shift) ** power).tolist()
    drawn = (first + (last - first) * random.random(count)) ** (1 / power) - shift
    return np.unique(np.clip(np.rint(drawn), 0, rows - 1).astype(np.int64))


def last_of(count: int, then: Callable[[], None]) -> Callable[[], None]:
    """Return what ranks call when they arrive: the last of ``count`` calls ``then``."""
    arrived = itertools.count(1)
    return lambda: then() if next(arrived) == count else None
