"""The decisions of a plan, and what it costs: options and ranks by search, rows per tier by division, and the
seconds of every stage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.planner.allocate import Allocation, allocate
from tierstore.planner.costs import HELD_BYTES_PER_ROW, RANK_STAGES, Problem
from tierstore.planner.options import Placed, option_of
from tierstore.planner.search import Search
from tierstore.planner.sharing import shared_misses
from tierstore.planner.topology import Topology
from tierstore.rounds import FloatArray, read_bytes, record_bytes

Misses = tuple[FloatArray, ...]


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a plan costs: seconds per step, ``ranks`` (ranks, 6) by RANK_STAGES and ``ssd_s`` (hosts,).

    Bytes in use are ``hbm`` (ranks,), ``host_memory`` and ``ssd`` (hosts,). ``step``: seconds; the pipeline
    overlaps stages, so that is about as long as the longest of them takes.
    """

    ranks: FloatArray
    ssd_s: FloatArray
    hbm: NDArray
    host_memory: NDArray
    ssd: NDArray
    step: float

    def slowest(self) -> tuple[str, str]:
        """Return the (stage, place) that sets the step: ("ssd", "host 3")."""
        if self.ssd_s.max() > self.ranks.max():
            return "ssd", f"host {int(self.ssd_s.argmax())}"
        where, stage = np.unravel_index(int(self.ranks.argmax()), self.ranks.shape)
        return RANK_STAGES[stage], f"rank {where}"


@dataclass(frozen=True, eq=False)
class Solution:
    """Everything that was decided, for reports and tests. The solution fits if ``caches.missing`` is empty.

    ``missed``: what shards miss of device memory, and of device and host memory, per unique row.
    """

    problem: Problem
    placed: Sequence[Placed]
    caches: Allocation
    missed: Misses
    prediction: Prediction
    seconds: float = 0.0

    def as_divided(self) -> Prediction:
        """Return the prediction if each shard held its most popular rows, as many as the plan gives it."""
        rows = self.caches.hbm_rows, self.caches.memory_rows
        return predict(self.problem, self.placed, self.caches, tuple(map(self.caches.misses, rows)))

    def shards(self) -> Iterator[slice]:
        """Yield where the shards of each of ``placed`` are among those of ``caches``."""
        end = 0
        for item in self.placed:
            yield slice(end, end := end + len(item.ranks))


def solve(problem: Problem, seconds: float) -> Solution:
    """Return the best solution that a search of so many seconds finds."""
    start, topology = time.perf_counter(), problem.topology
    solution = divided(problem, Search(problem, seconds).run())
    if solution.caches.missing and topology.ssd_per_host:
        # A store takes memory of its own, so what does not fit with one may do so without.
        memory_only = replace(problem, topology=replace(topology, ssd_per_host=0))
        without = divided(memory_only, Search(memory_only, seconds / 6).run())
        solution = solution if without.caches.missing else without
    return replace(solution, seconds=time.perf_counter() - start)


def divided(problem: Problem, placed: Sequence[Placed]) -> Solution:
    """Return the better division of device memory: by seconds of the link, or by seconds of the drives."""
    both = (_divided(problem, placed, per_miss) for per_miss in ("link_s", "ssd_s"))
    return min(both, key=lambda one: (sum(one.caches.missing.values()), one.prediction.step))


def _divided(problem: Problem, placed: Sequence[Placed], per_miss: str) -> Solution:
    caches = allocate(problem, placed, per_miss)
    missed = shared_misses(caches, _groups(problem, placed, caches))
    return Solution(problem, placed, caches, missed, predict(problem, placed, caches, missed))


def _groups(problem: Problem, placed: Sequence[Placed], caches: Allocation) -> NDArray[np.int64]:
    """Return a number for each shard, equal for shards that share slots: shards of one row layout and
    collection on one rank that have no slots of their own."""
    numbers: dict[Any, int] = {}
    found: list[int] = []
    for item in placed:
        table, cuts = problem.tables[item.table], item.option.column_cuts
        layout = table.module, table.embedding_dim // cuts, table.dtype, table.optimizer
        for rank in item.ranks:
            key = len(found) if caches.own[len(found)] else (*layout, rank)
            found.append(numbers.setdefault(key, len(numbers)))
    return np.array(found, dtype=np.int64)


def moved(solution: Solution, topology: Topology) -> Solution:
    """Return the same options and ranks on other machines, with the memories divided anew."""
    problem = replace(solution.problem, topology=topology)
    placed = [replace(p, option=option_of(problem, p.table, p.option.shape)) for p in solution.placed]
    return divided(problem, placed)


def predict(problem: Problem, placed: Sequence[Placed], caches: Allocation, missed: Misses) -> Prediction:
    """Sum up the shards of ``placed`` with the rows that ``caches`` gives them."""
    topology = problem.topology
    world, hosts = topology.world_size, topology.hosts
    ranks = np.zeros((world, len(RANK_STAGES)))
    ranks[:, 0] = problem.compute_seconds
    for item in placed:
        ranks[:, :4] += item.option.everywhere
        ranks[item.ranks, :4] += item.option.cost.load
    unique, rank, host = caches.field("unique"), caches.rank, caches.rank // topology.ranks_per_host
    on_link, on_ssd = (unique * share for share in missed)
    link = on_link * caches.field("link_s") + caches.field("policy_s") * (caches.hbm_rows < caches.rows)
    ranks[:, 4] = np.bincount(rank, link, world)
    reads = np.bincount(rank, on_ssd, world)
    stored = reads * topology.row_seconds["store"] + np.minimum(reads, 1) * topology.row_seconds["read"]
    ranks[:, 5] = problem.fetch_seconds(ranks, ranks[:, 4] + stored)
    ssd_s = np.bincount(host, on_ssd * caches.field("ssd_s"), hosts) - _saved_seconds(problem, caches, on_ssd)
    alone = ranks[:, [0, 5]] if topology.one_fetcher else ranks  # fetch and compute have the other stages
    return Prediction(
        ranks,
        ssd_s,
        np.bincount(rank, caches.hbm_bytes(), world) + problem.fixed_hbm,
        np.bincount(host, caches.uvm_bytes(), hosts) + problem.fixed_host,
        np.bincount(host, caches.ssd_bytes, hosts),
        topology.step_seconds(alone, ssd_s.repeat(topology.ranks_per_host)),
    )


def _saved_seconds(problem: Problem, caches: Allocation, misses: FloatArray) -> FloatArray:
    """Return what merged reads save each host's drives per step, against one read per row: (hosts,).

    ``misses``: rows per step that each shard reads from the SSD.
    """
    topology, saved = problem.topology, np.zeros(problem.topology.hosts)
    if not topology.one_fetcher or problem.work.rows_per_read is not None:
        return saved
    stored, sizes = caches.stored, caches.field("stored_bytes").astype(int)
    shares, ahead = caches.field("read_ahead"), caches.read_ahead_bytes()
    for r, size in sorted({*zip(caches.rank[stored].tolist(), sizes[stored].tolist(), strict=True)}):
        here = caches.rank == r
        tier = here & (sizes == size)
        lacking, record = float(misses[tier].sum()), record_bytes(size)
        part = float(shares[tier].sum() / max(shares[here].sum(), 1.0))  # as the runtime divides it
        room = part * problem.held_share * float(ahead[here].sum()) / (size + HELD_BYTES_PER_ROW)
        rows = float(caches.rows[tier & stored].sum())
        merged = topology.ahead_seconds(lacking, record, rows, problem.window, room)
        saved[r // topology.ranks_per_host] += lacking * topology.read_seconds(read_bytes(record)) - merged
    return saved
