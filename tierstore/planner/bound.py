"""How good a plan can be at best: the planner's cost model as a (mixed-integer) linear programme for HiGHS.

The search does not use it; tests and benchmarks compare plans with it. Caches are divided along the convex
curves of :mod:`prices`, parts of a step allowed, so the optimum of the programme is at most the true one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tierstore.errors import TierStoreError
from tierstore.planner.costs import Load, Workload
from tierstore.planner.cuts import Cut
from tierstore.planner.prices import hbm_steps, memory_steps
from tierstore.planner.topology import Topology

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Bound:
    """``seconds`` is proven: no plan is faster. ``optimal``: the solver's own best solution is as good."""

    seconds: float
    optimal: bool


def optimum(
    topology: Topology,
    work: Workload,
    cuts: Sequence[Sequence[Cut]],
    allowed: Sequence[Ranks],
    time_limit: float = 60.0,
) -> Bound:
    """The best step over all cuts and ranks, by branch and bound; for small cases."""
    program = _Program(topology, work, topology.world_size, topology.hosts)
    for options, ranks in zip(cuts, allowed, strict=True):
        program.add_table(
            (cut, [(int(r), 1.0, topology.host_of(int(r)), 1.0) for r in place])
            for cut in options
            for place in _places(cut, ranks, topology)
        )
    return program.solve(integral=True, time_limit=time_limit)


def relaxed(topology: Topology, work: Workload, cuts: Sequence[Sequence[Cut]]) -> Bound:
    """A step that no plan can beat: every table spread over all ranks in any mix of its cuts."""
    program = _Program(topology, work, 1, 1)
    for options in cuts:
        program.add_table(
            (cut, [(0, count / topology.world_size, 0, count / topology.hosts)])
            for cut in options
            for count in [topology.world_size if cut.spread == "all" else cut.shards]
        )
    return program.solve(integral=False, time_limit=600.0)


def _places(cut: Cut, allowed: Ranks, topology: Topology) -> Iterable[Sequence[int]]:
    """Every choice of ranks for a cut's shards."""
    ranks = allowed.tolist()
    if cut.spread == "all":
        return [ranks]
    if cut.spread == "any":
        return itertools.combinations(ranks, cut.shards)
    per_host = topology.ranks_per_host
    hosts = [list(range(h * per_host, (h + 1) * per_host)) for h in range(topology.hosts)]
    hosts = [host for host in hosts if set(host) <= set(ranks)]
    if cut.spread == "host":
        return [place for host in hosts for place in itertools.combinations(host, cut.shards)]
    return [list(itertools.chain(*few)) for few in itertools.combinations(hosts, cut.column_cuts)]


Shard = tuple[int, float, int, float]
"""(rank, how many of it there, host, how many of it there)."""


class _Program:
    """Rows of the matrix: rank stages, device memory; host stages, host memory, SSD; ties of variables.

    Variable 0 is the step in units of ``unit``; all memory is in shares of its size.
    """

    def __init__(self, topology: Topology, work: Workload, ranks: int, hosts: int) -> None:
        self.topology, self.work, self.ranks, self.hosts = topology, work, ranks, hosts
        self.entries: list[tuple[int, int, float]] = []
        self.integral = [0]
        self.rows = ranks * 7 + hosts * 4
        self.upper = np.zeros(self.rows)
        self.lower = np.full(self.rows, -np.inf)
        self.unit = 1e-3
        self.extra: list[tuple[float, float]] = []
        hbm, host = max(1.0, float(topology.hbm_per_rank)), max(1.0, float(topology.host_memory_per_host))
        self.sizes = {"hbm": hbm, "host": host, "ssd": max(1.0, float(topology.ssd_per_host))}
        for r in range(ranks):
            for stage in range(6):
                self._put(r * 7 + stage, 0, -1.0)
            self.upper[r * 7] = -work.dense_seconds / self.unit
            self.upper[r * 7 + 6] = (topology.hbm_per_rank - work.fixed_hbm) / hbm
        for h in range(hosts):
            row = ranks * 7 + h * 4
            self._put(row, 0, -1.0)
            self._put(row + 1, 0, -1.0)
            self.upper[row + 2] = (topology.host_memory_per_host - work.fixed_host(topology)) / host
            self.upper[row + 3] = topology.ssd_per_host / self.sizes["ssd"]

    def add_table(self, alternatives: Iterable[tuple[Cut, Sequence[Shard]]]) -> None:
        """Exactly one of the alternatives is to be chosen."""
        one = self._tie(1.0, 1.0)
        for cut, shards in alternatives:
            chosen = self._variable(integral=True)
            self._put(one, chosen, 1.0)
            for r in range(self.ranks):
                self._stages(r, chosen, cut.everywhere, 1.0)
            for shard in shards:
                self._add_shard(chosen, cut, *shard)

    def _add_shard(self, chosen: int, cut: Cut, rank: int, many: float, host: int, many_host: float) -> None:
        cost, topology = cut.cost, self.topology
        self._stages(rank, chosen, cost.load, many)
        hbm_row, host_row = rank * 7 + 6, self.ranks * 7 + host * 4
        self._put(hbm_row, chosen, many * cost.fixed_hbm / self.sizes["hbm"])
        self._put(host_row + 2, chosen, many_host * cost.fixed_host / self.sizes["host"])
        if not cost.slot_bytes:
            return
        above = self._tie(-np.inf, 0.0)  # rows on the device are among the rows in memory
        fast, slow = hbm_steps(cost), memory_steps(cost)
        mem = topology.host_memory_bw
        rate = cost.link_bytes / cost.link_s
        fetchers = self._fetchers(rank, host)
        scale = float(cost.rows)
        for v, size, seconds, rows in self._segments(chosen, fast.bytes, fast.seconds, fast.rows):
            self._put(hbm_row, v, many * size / self.sizes["hbm"])
            self._put(host_row + 2, v, -many_host * rows * cost.slot_bytes / self.sizes["host"])
            self._put(rank * 7 + 4, v, many * seconds / self.unit)
            if fetchers:
                self._put(rank * 7 + 5, v, many * seconds / self.unit)
            else:
                self._put(rank * 7, v, many * seconds * rate / topology.hbm_bw / self.unit)
            self._put(host_row + 1, v, many_host * seconds * rate / mem / self.unit)
            self._put(above, v, rows / scale)
        moved = cost.ssd_bytes_moved / cost.ssd_s / mem
        for v, size, seconds, rows in self._segments(chosen, slow.bytes, slow.seconds, slow.rows):
            self._put(host_row + 2, v, many_host * size / self.sizes["host"])
            for row in [host_row, *fetchers]:
                self._put(row, v, many_host * seconds / self.unit)
            self._put(host_row + 1, v, many_host * seconds * moved / self.unit)
            self._put(above, v, -rows / scale)
        last = v
        if slow.stored[0]:
            stored = many_host * cost.ssd_bytes / self.sizes["ssd"]
            self._put(host_row + 3, chosen, stored)
            self._put(host_row + 3, last, -stored)

    def _fetchers(self, rank: int, host: int) -> list[int]:
        """Rows of the fetch stage of the ranks of a host; none where stages overlap."""
        if not self.topology.one_fetcher:
            return []
        first, count = host * self.topology.ranks_per_host, self.topology.ranks_per_host
        ranks = range(first, first + count) if self.ranks > 1 else [rank]
        return [r * 7 + 5 for r in ranks]

    def _segments(
        self, chosen: int, bytes_: NDArray, seconds: NDArray, rows: NDArray
    ) -> list[tuple[int, float, float, float]]:
        """(Variable, bytes, seconds, rows) of the first corner, then of the way to each next one."""
        result = [(chosen, float(bytes_[0]), float(seconds[0]), float(rows[0]))]
        for size, gain, more in zip(np.diff(bytes_), np.diff(seconds), np.diff(rows), strict=True):
            v = self._variable()
            tie = self._tie(-np.inf, 0.0)
            self._put(tie, v, 1.0)
            self._put(tie, chosen, -1.0)
            result.append((v, float(size), float(gain), float(more)))
        return result

    def _stages(self, rank: int, variable: int, load: Load, many: float) -> None:
        for stage, seconds in enumerate((load.compute, load.index, load.intra, load.inter)):
            self._put(rank * 7 + stage, variable, many * seconds / self.unit)
        if self.topology.one_fetcher:
            self._put(rank * 7 + 5, variable, many * load.index / self.unit)

    def _variable(self, integral: bool = False) -> int:
        self.integral.append(int(integral))
        return len(self.integral) - 1

    def _tie(self, lower: float, upper: float) -> int:
        self.extra.append((lower, upper))
        return self.rows + len(self.extra) - 1

    def _put(self, row: int, column: int, value: float) -> None:
        if value:
            self.entries.append((row, column, value))

    def solve(self, integral: bool, time_limit: float) -> Bound:
        row, column, value = zip(*self.entries, strict=True)
        n = len(self.integral)
        matrix = coo_array((value, (row, column)), shape=(self.rows + len(self.extra), n)).tocsr()
        low, high = (np.array([pair[i] for pair in self.extra]) for i in (0, 1))
        limits = LinearConstraint(
            matrix, np.concatenate([self.lower, low]), np.concatenate([self.upper, high])
        )
        cost = np.zeros(n)
        cost[0] = 1.0
        top = np.ones(n)
        top[0] = np.inf
        result = milp(
            cost,
            integrality=np.array(self.integral) if integral else None,
            bounds=Bounds(np.zeros(n), top),
            constraints=limits,
            options={"time_limit": time_limit, "mip_rel_gap": 1e-3},
        )
        if result.status not in (0, 1):
            raise TierStoreError(f"the linear programme has no solution: {result.message}")
        proven = result.mip_dual_bound if integral else result.fun
        if proven is None:
            raise TierStoreError(f"no bound within {time_limit} s: {result.message}")
        return Bound(float(proven) * self.unit, result.status == 0)
