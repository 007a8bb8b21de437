"""How good a plan can be at best: the planner's cost model as a (mixed-integer) linear programme for HiGHS.

Caches are divided along the convex curves of :mod:`tierstore.planner.prices`, to parts of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tierstore.errors import TierStoreError
from tierstore.planner.cluster import Ranks
from tierstore.planner.costs import Problem
from tierstore.planner.curves import Floats
from tierstore.planner.options import ShardCost, ShardingOption, options_of
from tierstore.planner.prices import corners

_RANK_ROWS, _HOST_ROWS = 7, 3  # six stages and device memory; SSD seconds, host memory and SSD space


@dataclass(frozen=True)
class Bound:
    """``seconds`` is proven: no plan is faster. ``optimal``: the solver's own best solution is as good."""

    seconds: float
    optimal: bool


def optimum(problem: Problem, time_limit: float = 60.0) -> Bound:
    """Return the best step over all options and ranks, by branch and bound; for small cases."""
    topology = problem.topology
    program = _Program(problem, topology.world_size, topology.hosts)
    hosts = _RANK_ROWS * topology.world_size
    for t, demand in enumerate(problem.demands):
        allowed = np.unique(
            range(topology.world_size) if demand.device_group is None else demand.device_group
        )
        program.add_table(
            (
                option,
                [
                    [_Target(_RANK_ROWS * r, 1.0, hosts + _HOST_ROWS * topology.host_of(r), 1.0)]
                    for r in place
                ],
            )
            for option in options_of(problem, t)
            for place in _places(option, allowed, topology.ranks_per_host)
        )
    return program.solve(time_limit)


def relaxed(problem: Problem, time_limit: float = 60.0) -> Bound:
    """Return a step that no plan can beat: one option for every table, whose shards spread evenly over ranks.

    What one shard alone does to its rank, and the shards of one table that must share a host to that host,
    counts too: shards of an option are equal, so the fullest has at least the mean. The bound is proven even
    if the solver does not end within ``time_limit``; then it may be that of a mix of options.
    """
    topology = problem.topology
    program = _Program(problem, 1, 1)
    for t in range(len(problem.tables)):
        own = program.add_places(1, 1)
        alternatives = []
        for option in options_of(problem, t):
            count = topology.world_size if option.spread == "all" else option.shards
            most = {"host": 1, "hosts": option.column_cuts, "all": topology.hosts}
            hosts = most.get(option.spread, min(topology.hosts, option.shards))
            pooled = _Target(0, count / topology.world_size, _RANK_ROWS, count / topology.hosts)
            together = _Target(own, 1.0, own + _RANK_ROWS, count / hosts)
            alternatives.append((option, [[pooled, together]]))
        program.add_table(alternatives)
    return program.solve(time_limit)


def _places(option: ShardingOption, allowed: Ranks, per_host: int) -> Iterable[Sequence[int]]:
    """Return every choice of ranks for an option's shards."""
    ranks = allowed.tolist()
    if option.spread == "all":
        return [ranks]
    if option.spread == "any":
        return itertools.combinations(ranks, option.shards)
    hosts = [range(first, first + per_host) for first in ranks if first % per_host == 0]
    hosts = [host for host in hosts if set(host) <= set(ranks)]
    if option.spread == "host":
        return [place for host in hosts for place in itertools.combinations(host, option.shards)]
    return [list(itertools.chain(*few)) for few in itertools.combinations(hosts, option.column_cuts)]


@dataclass(frozen=True)
class _Target:
    """Where a shard's needs go: the first rows of a rank and of a host, and how often."""

    rank: int
    many: float
    host: int
    many_host: float


class _Program:
    """Variable 0 is the step in milliseconds, the next four what every rank spends in a stage.

    All memory is in shares of its size.
    """

    def __init__(self, problem: Problem, ranks: int, hosts: int) -> None:
        self.problem, self.topology = problem, problem.topology
        self.entries: list[tuple[int, int, float]] = []
        self.integral = [0] * 5
        self.limits: list[tuple[float, float]] = []
        topology = self.topology
        self.hbm, self.host = float(topology.hbm_per_rank), max(1.0, float(topology.host_memory_per_host))
        self.ssd = max(1.0, float(topology.ssd_per_host))
        self.add_places(ranks, hosts)
        for stage in range(4):
            self._put(self._row(0.0, 0.0), 1 + stage, -1.0)
        self.everywhere = range(len(self.limits) - 4, len(self.limits))

    def add_places(self, ranks: int, hosts: int) -> int:
        """Add ranks, then hosts; return the first row."""
        problem, topology, first = self.problem, self.topology, len(self.limits)
        dense = problem.compute_seconds
        waits = topology.in_turn * (dense - problem.waiting_seconds)
        for _ in range(ranks):
            for stage, seconds in enumerate((dense, 0.0, 0.0, 0.0, 0.0, waits)):
                row = self._row(-np.inf, -1e3 * seconds)
                self._put(row, 0, -1.0)
                self._put(
                    row,
                    1 + stage if stage < 4 else 2,
                    1.0 if stage < 4 else topology.one_fetcher * (stage > 4),
                )
            self._put(row, 1, topology.in_turn)
            self._row(-np.inf, (topology.hbm_per_rank - problem.fixed_hbm) / self.hbm)
        for _ in range(hosts):
            self._put(self._row(-np.inf, 0.0), 0, -1.0)
            self._row(-np.inf, (topology.host_memory_per_host - problem.fixed_host) / self.host)
            self._row(-np.inf, topology.ssd_per_host / self.ssd)
        return first

    def add_table(self, alternatives: Iterable[tuple[ShardingOption, Sequence[Sequence[_Target]]]]) -> None:
        """Add a table: exactly one of the alternatives, an option and where each of its shards goes."""
        one = self._row(1.0, 1.0)
        for option, shards in alternatives:
            chosen = self._variable(integral=True)
            self._put(one, chosen, 1.0)
            for row, seconds in zip(self.everywhere, option.everywhere, strict=True):
                self._put(row, chosen, 1e3 * seconds)
            for targets in shards:
                self._add_shard(chosen, option.cost, targets)

    def _add_shard(self, chosen: int, cost: ShardCost, targets: Sequence[_Target]) -> None:
        for to in targets:
            fetch = self.topology.one_fetcher * (cost.load[1] + self.topology.in_turn * cost.load[0])
            for stage, seconds in enumerate((*cost.load, 0.0, fetch)):
                self._put(to.rank + stage, chosen, 1e3 * to.many * seconds)
            self._put(to.rank + 6, chosen, to.many * cost.fixed_hbm / self.hbm)
            self._put(to.host + 1, chosen, to.many_host * cost.fixed_host / self.host)
        if not cost.slot_bytes:
            return
        above = self._row(-np.inf, 0.0)  # rows on the device are among the rows in memory
        for v, rows, misses in self._segments(chosen, *corners(cost, cost.hbm_floor)):
            seconds, size = 1e3 * misses * cost.unique * cost.link_s, rows * cost.slot_bytes
            self._put(above, v, rows / cost.rows)
            for to in targets:
                self._put(to.rank + 4, v, to.many * seconds)
                self._put(to.rank + 5, v, to.many * seconds * self.topology.one_fetcher)
                self._put(to.rank + 6, v, to.many * size / self.hbm)
                self._put(to.host + 1, v, -to.many_host * size / self.host)
        rows, misses = corners(cost, cost.memory_floor)
        for v, more, fewer in self._segments(chosen, rows, misses):
            self._put(above, v, -more / cost.rows)
            for to in targets:
                self._put(to.host, v, 1e3 * to.many_host * fewer * cost.unique * cost.ssd_s)
                self._put(to.host + 1, v, to.many_host * more * cost.slot_bytes / self.host)
        if len(rows) > 1:
            whole = self._variable(integral=True)  # else the store and its index are needed
            tie = self._row(-np.inf, 0.0)
            self._put(tie, whole, 1.0)
            self._put(tie, v, -1.0)
            for variable, sign in ((chosen, 1.0), (whole, -1.0)):
                for to in targets:
                    self._put(to.host + 1, variable, sign * to.many_host * cost.index_bytes / self.host)
                    self._put(to.host + 2, variable, sign * to.many_host * cost.ssd_bytes / self.ssd)

    def _segments(self, chosen: int, rows: Floats, misses: Floats) -> list[tuple[int, float, float]]:
        """Return (variable, rows, misses) of the first corner, then of the way to each next one."""
        result = [(chosen, float(rows[0]), float(misses[0]))]
        for more, fewer in zip(np.diff(rows), np.diff(misses), strict=True):
            v, tie = self._variable(), self._row(-np.inf, 0.0)
            self._put(tie, v, 1.0)
            self._put(tie, chosen, -1.0)
            result.append((v, float(more), float(fewer)))
        return result

    def _variable(self, integral: bool = False) -> int:
        self.integral.append(int(integral))
        return len(self.integral) - 1

    def _row(self, lower: float, upper: float) -> int:
        self.limits.append((lower, upper))
        return len(self.limits) - 1

    def _put(self, row: int, column: int, value: float) -> None:
        if value:
            self.entries.append((row, column, value))

    def solve(self, time_limit: float) -> Bound:
        row, column, value = zip(*self.entries, strict=True)
        n = len(self.integral)
        matrix = coo_array((value, (row, column)), shape=(len(self.limits), n)).tocsr()
        result = milp(
            np.eye(1, n)[0],
            integrality=np.array(self.integral),
            bounds=Bounds(np.zeros(n), np.where(np.arange(n) < 5, np.inf, 1.0)),
            constraints=LinearConstraint(matrix, *np.array(self.limits).T),
            options={"time_limit": time_limit, "mip_rel_gap": 1e-3},
        )
        if result.status not in (0, 1) or result.mip_dual_bound is None:
            raise TierStoreError(f"no bound within {time_limit} s: {result.message}")
        return Bound(float(result.mip_dual_bound) * 1e-3, result.status == 0)
