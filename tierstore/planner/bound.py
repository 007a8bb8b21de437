"""How good a plan can be at best: the planner's cost model as a (mixed-integer) linear programme for HiGHS.

Tests and benchmarks compare plans with it, and the search takes a hint of it. Caches are divided along the
convex curves of :mod:`prices`, to parts of a row.
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
from tierstore.planner.costs import Load, ShardCost, Workload, fetched_share
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
            (cut, [[program.on_rank(int(r))] for r in place])
            for cut in options
            for place in _places(cut, ranks, topology)
        )
    return program.solve(time_limit)


def relaxed(
    topology: Topology, work: Workload, cuts: Sequence[Sequence[Cut]], time_limit: float = 60.0
) -> Bound:
    """A step that no plan can beat: one cut for every table, whose shards spread evenly over all ranks.

    What one shard alone does to its rank, and the shards of one table that must share a host to that host,
    counts too: shards of a cut are equal, so that the fullest has at least the mean. The bound is proven even
    if the solver does not end within ``time_limit``; then it is between this and that of a mix of cuts.
    """
    return _relaxed(topology, work, cuts).solve(time_limit)


def likely_cuts(
    topology: Topology, work: Workload, cuts: Sequence[Sequence[Cut]], time_limit: float
) -> list[list[int]] | None:
    """Of each table the position of the cut that :func:`relaxed` chooses; None if there was no time."""
    program = _relaxed(topology, work, cuts)
    try:
        program.solve(time_limit)
    except TierStoreError:
        return None
    if program.values is None:
        return None
    values = program.values
    return [[int(values[np.array(chosen)].argmax())] for chosen in program.chosen]


def _relaxed(topology: Topology, work: Workload, cuts: Sequence[Sequence[Cut]]) -> _Program:
    program = _Program(topology, work, 1, 1)
    for options in cuts:
        own = program.add_place()
        alternatives = []
        for cut in options:
            count = topology.world_size if cut.spread == "all" else cut.shards
            pooled = _Target(0, count / topology.world_size, 7, count / topology.hosts)
            together = _Target(own, 1.0, own + 7, count / _hosts_of(cut, topology))
            alternatives.append((cut, [[pooled, together]]))
        program.add_table(alternatives)
    return program


def _hosts_of(cut: Cut, topology: Topology) -> int:
    """The most hosts that the shards of a cut can be on."""
    if cut.spread == "host":
        return 1
    if cut.spread == "hosts":
        return cut.column_cuts
    return topology.hosts if cut.spread == "all" else min(topology.hosts, cut.shards)


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


@dataclass(frozen=True)
class _Target:
    """Where a shard's needs go: first rows of a rank (7) and of a host (4), and how often. ``fetchers``: rows
    of the fetch stage of other ranks of the host."""

    rank: int
    many: float
    host: int
    many_host: float
    fetchers: tuple[int, ...] = ()


class _Program:
    """Rows of the matrix: of each rank its stages and device memory; of each host SSD, memory traffic, memory
    and SSD space; ties of variables.

    Variable 0 is the step in units of ``unit``, the next four the seconds that every rank spends in a stage,
    whatever it holds; all memory is in shares of its size.
    """

    def __init__(self, topology: Topology, work: Workload, ranks: int, hosts: int) -> None:
        self.topology, self.work, self.ranks = topology, work, ranks
        self.entries: list[tuple[int, int, float]] = []
        self.integral = [0, 0, 0, 0, 0]
        self.limits: list[tuple[float, float]] = []
        self.chosen: list[list[int]] = []
        """Variables of the alternatives of each table."""
        self.values: NDArray[np.float64] | None = None
        self.unit = 1e-3
        sizes = topology.hbm_per_rank, topology.host_memory_per_host, topology.ssd_per_host
        self.sizes = dict(zip(("hbm", "host", "ssd"), (max(1.0, float(size)) for size in sizes), strict=True))
        for _ in range(ranks):
            self._add_rank()
        for _ in range(hosts):
            self._add_host()
        self.everywhere = [self._tie(0.0, 0.0) for _ in range(4)]
        for stage, row in enumerate(self.everywhere):
            self._put(row, 1 + stage, -1.0)

    def add_place(self) -> int:
        """One more rank and its host, for one table alone; its first row."""
        first = self._add_rank()
        self._add_host()
        return first

    def _add_rank(self) -> int:
        first, lookups, dense = len(self.limits), self.work.lookup_seconds, self.work.compute_seconds
        busy = dense - self.work.idle_seconds
        fetches = lookups + self.topology.in_turn * busy if self.topology.one_fetcher else 0.0
        for stage, seconds in enumerate((dense, lookups, 0.0, 0.0, 0.0, fetches)):
            row = self._tie(-np.inf, -seconds / self.unit)
            self._put(row, 0, -1.0)
            if stage < 4:
                self._put(row, 1 + stage, 1.0)
        if self.topology.one_fetcher:
            self._put(first + 5, 2, 1.0)
            self._put(first + 5, 1, self.topology.in_turn)
        self._tie(-np.inf, (self.topology.hbm_per_rank - self.work.fixed_hbm) / self.sizes["hbm"])
        return first

    def _add_host(self) -> None:
        for _ in range(2):
            self._put(self._tie(-np.inf, 0.0), 0, -1.0)
        free = self.topology.host_memory_per_host - self.work.fixed_host(self.topology)
        self._tie(-np.inf, free / self.sizes["host"])
        self._tie(-np.inf, self.topology.ssd_per_host / self.sizes["ssd"])

    def on_rank(self, rank: int) -> _Target:
        per_host = self.topology.ranks_per_host
        host = self.topology.host_of(rank)
        others = tuple(7 * r + 5 for r in range(host * per_host, (host + 1) * per_host) if r != rank)
        return _Target(7 * rank, 1.0, 7 * self.ranks + 4 * host, 1.0, others)

    def add_table(self, alternatives: Iterable[tuple[Cut, Sequence[Sequence[_Target]]]]) -> None:
        """Exactly one of the alternatives is to be chosen: a cut, and of each shard where its needs go."""
        one = self._tie(1.0, 1.0)
        self.chosen.append([])
        for cut, shards in alternatives:
            chosen = self._variable(integral=True)
            self._put(one, chosen, 1.0)
            self.chosen[-1].append(chosen)
            for row, seconds in zip(self.everywhere, cut.everywhere.seconds, strict=True):
                self._put(row, chosen, seconds / self.unit)
            for targets in shards:
                self._add_shard(chosen, cut.cost, targets)

    def _add_shard(self, chosen: int, cost: ShardCost, targets: Sequence[_Target]) -> None:
        for to in targets:
            self._stages(to, chosen, cost.load)
            self._put(to.rank + 6, chosen, to.many * cost.fixed_hbm / self.sizes["hbm"])
            self._put(to.host + 2, chosen, to.many_host * cost.fixed_host / self.sizes["host"])
        if not cost.slot_bytes:
            return
        above = self._tie(-np.inf, 0.0)  # rows on the device are among the rows in memory
        fast, slow = hbm_steps(cost), memory_steps(cost, gradual=True)
        for v, size, seconds, rows in self._segments(chosen, fast.bytes, fast.seconds, fast.rows):
            for to in targets:
                self._add_fast(to, v, cost, size, seconds, rows)
            self._put(above, v, rows / float(cost.rows))
        for v, size, seconds, rows in self._segments(chosen, slow.bytes, slow.seconds, slow.rows):
            for to in targets:
                self._add_slow(to, v, cost, size, seconds)
            self._put(above, v, -rows / float(cost.rows))
        if slow.stored[0]:
            whole = self._variable(integral=True)  # else the store and its index are needed
            tie = self._tie(-np.inf, 0.0)
            self._put(tie, whole, 1.0)
            self._put(tie, v, -1.0)
            for to in targets:
                self._put(to.host + 2, whole, -to.many_host * cost.index_bytes / self.sizes["host"])
                stored = to.many_host * cost.ssd_bytes / self.sizes["ssd"]
                self._put(to.host + 3, chosen, stored)
                self._put(to.host + 3, whole, -stored)

    def _add_fast(
        self, to: _Target, v: int, cost: ShardCost, size: float, seconds: float, rows: float
    ) -> None:
        """Device memory: bytes there, link seconds, and host memory that is not needed."""
        moved = seconds * cost.link_bytes / cost.link_s
        self._put(to.rank + 6, v, to.many * size / self.sizes["hbm"])
        self._put(to.host + 2, v, -to.many_host * rows * cost.slot_bytes / self.sizes["host"])
        self._put(to.rank + 4, v, to.many * seconds / self.unit)
        if self.topology.one_fetcher:
            self._put(to.rank + 5, v, to.many * seconds / self.unit)
        else:
            self._put(to.rank, v, to.many * moved / self.topology.hbm_bw / self.unit)
        self._put(to.host + 1, v, to.many_host * moved / self.topology.host_memory_bw / self.unit)

    def _add_slow(self, to: _Target, v: int, cost: ShardCost, size: float, seconds: float) -> None:
        """Memory of device and host together: bytes, SSD seconds, and the traffic that they make."""
        moved = seconds * cost.ssd_bytes_moved / cost.ssd_s
        self._put(to.host + 2, v, to.many_host * size / self.sizes["host"])
        self._put(to.host, v, to.many_host * seconds / self.unit)
        if self.topology.one_fetcher:
            fetched = to.many_host * seconds * fetched_share(self.topology, self.work)
            for row in (to.rank + 5, *to.fetchers):
                self._put(row, v, fetched / self.unit)
        self._put(to.host + 1, v, to.many_host * moved / self.topology.host_memory_bw / self.unit)

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

    def _stages(self, to: _Target, variable: int, load: Load) -> None:
        for stage, seconds in enumerate(load.seconds):
            self._put(to.rank + stage, variable, to.many * seconds / self.unit)
        if self.topology.one_fetcher:
            fetch = load.index + self.topology.in_turn * load.compute
            self._put(to.rank + 5, variable, to.many * fetch / self.unit)

    def _variable(self, integral: bool = False) -> int:
        self.integral.append(int(integral))
        return len(self.integral) - 1

    def _tie(self, lower: float, upper: float) -> int:
        self.limits.append((lower, upper))
        return len(self.limits) - 1

    def _put(self, row: int, column: int, value: float) -> None:
        if value:
            self.entries.append((row, column, value))

    def solve(self, time_limit: float) -> Bound:
        row, column, value = zip(*self.entries, strict=True)
        n = len(self.integral)
        matrix = coo_array((value, (row, column)), shape=(len(self.limits), n)).tocsr()
        low, high = np.array(self.limits).T
        limits = LinearConstraint(matrix, low, high)
        cost = np.zeros(n)
        cost[0] = 1.0
        top = np.ones(n)
        top[:5] = np.inf
        result = milp(
            cost,
            integrality=np.array(self.integral),
            bounds=Bounds(np.zeros(n), top),
            constraints=limits,
            options={"time_limit": time_limit, "mip_rel_gap": 1e-3},
        )
        if result.status not in (0, 1):
            raise TierStoreError(f"the linear programme has no solution: {result.message}")
        self.values = result.x
        proven = result.mip_dual_bound
        if proven is None:
            raise TierStoreError(f"no bound within {time_limit} s: {result.message}")
        return Bound(float(proven) * self.unit, result.status == 0)
