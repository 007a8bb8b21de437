"""The decisions of a plan: options and ranks by search, rows per tier by division, seconds by prediction."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tierstore.planner.allocate import Allocation, allocate
from tierstore.planner.costs import Problem, Workload, rows_by_size
from tierstore.planner.options import Placed, option_of
from tierstore.planner.predict import Prediction, predict
from tierstore.planner.search import Search
from tierstore.planner.tables import TableSpec
from tierstore.planner.topology import Topology


@dataclass(frozen=True, eq=False)
class Solution:
    """Everything that was decided, for reports and tests. It fits if ``caches.missing`` is empty."""

    problem: Problem
    placed: Sequence[Placed]
    caches: Allocation
    prediction: Prediction
    seconds: float = 0.0

    @property
    def topology(self) -> Topology:
        return self.problem.topology

    @property
    def work(self) -> Workload:
        return self.problem.work

    @property
    def tables(self) -> Sequence[TableSpec]:
        return self.problem.tables

    def shards(self) -> Iterator[slice]:
        """Yield where the shards of each of ``placed`` are among those of ``caches``."""
        end = 0
        for item in self.placed:
            yield slice(end, end := end + len(item.ranks))

    @property
    def quality(self) -> tuple[int, float]:
        """(Bytes missing, step): less is better, in this order."""
        return sum(self.caches.missing.values()), self.prediction.step


def solve(problem: Problem, seconds: float) -> Solution:
    """Return the best solution that a search of so many seconds finds."""
    start, topology = time.perf_counter(), problem.topology
    solution = divided(problem, Search(problem, seconds).run())
    lacking = {name for name, _ in solution.caches.missing}
    memory = topology.hosts * topology.host_memory_per_host + topology.world_size * topology.hbm_per_rank
    needed = sum(size * count for size, count in rows_by_size(problem.tables).items())
    if lacking and "hbm" not in lacking and topology.ssd_per_host and needed <= memory:
        # A store takes memory of its own, so what does not fit with one may do so without.
        memory_only = replace(problem, topology=replace(topology, ssd_per_host=0))
        without = divided(memory_only, Search(memory_only, seconds / 6).run())
        solution = solution if without.caches.missing else without
    return replace(solution, seconds=time.perf_counter() - start)


def divided(problem: Problem, placed: Sequence[Placed]) -> Solution:
    """Return the better way to divide device memory: by link time, or by SSD time if that sets the step."""
    found = _divided(problem, placed, for_ssd=False)
    if found.prediction.slowest()[0] != "ssd":
        return found
    return min(found, _divided(problem, placed, for_ssd=True), key=lambda one: one.quality)


def _divided(problem: Problem, placed: Sequence[Placed], for_ssd: bool) -> Solution:
    caches = allocate(problem, placed, for_ssd)
    return Solution(problem, placed, caches, predict(problem, placed, caches))


def placed_again(problem: Problem, placed: Sequence[Placed]) -> list[Placed]:
    """Return the same options and ranks at the costs of another problem with the same tables."""
    return [replace(item, option=option_of(problem, item.table, item.option.shape)) for item in placed]
