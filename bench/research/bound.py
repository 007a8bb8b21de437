"""How fast any plan could be at best: lower bounds that scipy's HiGHS proves.

Caches are divided along the convex curves of :func:`tierstore.planner.allocate.corners`, to parts of a row.
Constraints to groups of ranks, and what policies and rows of the store take, are left out.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tierstore.errors import TierStoreError
from tierstore.planner.allocate import corners
from tierstore.planner.costs import Problem
from tierstore.planner.options import ShardCost, ShardingOption, options_of
from tierstore.planner.topology import Topology
from tierstore.rounds import FloatArray

Shares = Sequence[tuple[str, float]]
"""Ranks or hosts by name, and how many shards of a kind each of them has."""


def optimum(problem: Problem, time_limit: float = 60.0) -> float:
    """Return seconds that the best step over all options and ranks takes at least; for small cases."""
    topology, program = problem.topology, _Program(problem)
    machines = [(f"rank {r}", f"host {r // topology.ranks_per_host}") for r in range(topology.world_size)]
    for machine in machines:
        program.add_machine(*machine)
    for t in range(len(problem.tables)):
        for option in options_of(problem, t):
            for place in _places(option, topology):
                shards = [([(machines[r][0], 1.0)], [(machines[r][1], 1.0)]) for r in place]
                program.add_choice(t, option, shards)
    return program.solve(time_limit)


def relaxed(problem: Problem, time_limit: float = 60.0) -> float:
    """Return seconds that no plan can beat: one option for each table, its shards spread evenly over ranks.

    What one shard alone does to its rank, and the shards of one table that must share a host to that host,
    counts too: shards of an option are equal, so the fullest has at least the mean. The bound is proven even
    if the solver does not end within ``time_limit``; then it may be that of a mix of options.
    """
    topology, program = problem.topology, _Program(problem)
    for t in (-1, *range(len(problem.tables))):  # all ranks and hosts as one, then those of each table alone
        program.add_machine(f"rank of {t}", f"host of {t}")
        for option in options_of(problem, t) if t >= 0 else ():
            count = topology.world_size if option.spread == "all" else option.shards
            most = {"host": 1, "hosts": option.column_cuts, "all": topology.hosts}
            alone = count / most.get(option.spread, min(topology.hosts, option.shards))
            ranks = [("rank of -1", count / topology.world_size), (f"rank of {t}", 1.0)]
            hosts = [("host of -1", count / topology.hosts), (f"host of {t}", alone)]
            program.add_choice(t, option, [(ranks, hosts)])
    return program.solve(time_limit)


def _places(option: ShardingOption, topology: Topology) -> Iterable[Sequence[int]]:
    """Return every choice of ranks for an option's shards."""
    ranks, per_host = range(topology.world_size), topology.ranks_per_host
    if option.spread == "all":
        return [ranks]
    if option.spread == "any":
        return itertools.combinations(ranks, option.shards)
    hosts = [ranks[first : first + per_host] for first in ranks[::per_host]]
    if option.spread == "host":
        return [place for host in hosts for place in itertools.combinations(host, option.shards)]
    return [list(itertools.chain(*few)) for few in itertools.combinations(hosts, option.column_cuts)]


class _Program:
    """Rows by name, each with coefficients by variable; their sums are 0 at most, or within ``limits``.

    Variable 0 is the step in milliseconds, the next four what every rank spends in a stage. All memory is in
    shares of its size. The stages of a rank are numbered as in RANK_STAGES.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.topology = problem, problem.topology
        self.rows: dict[Any, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.limits: dict[Any, tuple[float, float]] = {}
        self.units = {"hbm": self.topology.hbm_per_rank, "memory": max(1, self.topology.host_memory_per_host)}
        self.units["ssd"] = max(1, self.topology.ssd_per_host)
        self.integral = [0] * 5
        for stage in range(4):
            self.rows["all", stage][1 + stage] = -1.0
            self.limits["all", stage] = 0.0, 0.0

    def add_machine(self, rank: str, host: str) -> None:
        """Add a rank with all that it spends whatever its shards are, and its host, shared by its ranks."""
        problem, topology, most = self.problem, self.topology, -np.inf
        fixed = np.array([[problem.compute_seconds, 0.0, 0.0, 0.0]])
        fetch = float(problem.fetch_seconds(fixed, np.zeros(1))[0])
        for stage, seconds in enumerate([*fixed[0], 0.0, fetch]):
            self.rows[rank, stage][0] = -1.0
            self.limits[rank, stage] = most, -1e3 * seconds
            if stage < 4:
                self.rows[rank, stage][1 + stage] = 1.0
        self.rows[rank, 5] |= {1: topology.in_turn, 2: float(topology.one_fetcher)}
        self.limits[rank, "hbm"] = most, 1 - problem.fixed_hbm / topology.hbm_per_rank
        self.rows[host, "drives"][0] = -1.0
        room = topology.host_memory_per_host - problem.fixed_host
        self.limits[host, "memory"] = most, room / self.units["memory"]
        self.limits[host, "ssd"] = most, float(topology.ssd_per_host > 0)

    def add_choice(self, table: int, option: ShardingOption, shards: Sequence[tuple[Shares, Shares]]) -> None:
        """Add an option and the ranks and hosts of its shards: a table has exactly one of its choices."""
        chosen = self._variable(integral=True)
        self.rows["one", table][chosen] = 1.0
        self.limits["one", table] = 1.0, 1.0
        for stage, seconds in enumerate(option.everywhere):
            self.rows["all", stage][chosen] = 1e3 * seconds
        for ranks, hosts in shards:
            self._add_shard(chosen, option.cost, ranks, hosts)

    def _add_shard(self, chosen: int, cost: ShardCost, ranks: Shares, hosts: Shares) -> None:
        one_fetcher = float(self.topology.one_fetcher)
        fetch = one_fetcher * (cost.load[1] + self.topology.in_turn * cost.load[0])
        for stage, seconds in enumerate((*cost.load, 0.0, fetch)):
            self._add(ranks, stage, chosen, seconds)
        self._add(ranks, "hbm", chosen, cost.fixed_hbm)
        self._add(hosts, "memory", chosen, cost.fixed_host)
        above = self.rows["on the device are among those in memory", len(self.rows)]
        for v, rows, misses in self._segments(chosen, *corners(cost, cost.hbm_floor)):
            above[v] += rows / cost.rows
            for stage, share in ((4, 1.0), (5, one_fetcher)):
                self._add(ranks, stage, v, share * misses * cost.unique * cost.link_s)
            self._add(ranks, "hbm", v, rows * cost.slot_bytes)
            self._add(hosts, "memory", v, -rows * cost.slot_bytes)
        segments = self._segments(chosen, *corners(cost, cost.memory_floor))
        for v, rows, misses in segments:
            above[v] -= rows / cost.rows
            self._add(hosts, "drives", v, misses * cost.unique * cost.ssd_s)
            self._add(hosts, "memory", v, rows * cost.slot_bytes)
        if len(segments) > 1:
            whole = self._variable(integral=True)  # else the store and its index are needed
            self.rows["whole", whole] |= {whole: 1.0, segments[-1][0]: -1.0}
            for v, sign in ((chosen, 1.0), (whole, -1.0)):
                self._add(hosts, "memory", v, sign * cost.index_bytes)
                self._add(hosts, "ssd", v, sign * cost.ssd_bytes)

    def _segments(self, chosen: int, rows: FloatArray, misses: FloatArray) -> list[tuple[int, float, float]]:
        """Return (variable, rows, misses) of the first corner, then of the way to each next one."""
        result = [(chosen, float(rows[0]), float(misses[0]))]
        for more, fewer in zip(np.diff(rows).tolist(), np.diff(misses).tolist(), strict=True):
            v = self._variable()
            self.rows["of a choice", v] |= {v: 1.0, chosen: -1.0}
            result.append((v, more, fewer))
        return result

    def _add(self, places: Shares, of: Any, variable: int, value: float) -> None:
        """Add seconds of a stage, or bytes of a memory, on some ranks or hosts."""
        for name, many in places:
            self.rows[name, of][variable] += many * value / self.units.get(of, 1e-3)

    def _variable(self, integral: bool = False) -> int:
        self.integral.append(int(integral))
        return len(self.integral) - 1

    def solve(self, time_limit: float) -> float:
        n = len(self.integral)
        entries = [(i, v, x) for i, row in enumerate(self.rows.values()) for v, x in row.items() if x]
        row, column, value = zip(*entries, strict=True)
        limits = np.array([self.limits.get(name, (-np.inf, 0.0)) for name in self.rows])
        result = milp(
            np.eye(1, n)[0],
            integrality=np.array(self.integral),
            bounds=Bounds(np.zeros(n), np.where(np.arange(n) < 5, np.inf, 1.0)),
            constraints=LinearConstraint(
                coo_array((value, (row, column)), (len(self.rows), n)).tocsr(), *limits.T
            ),
            options={"time_limit": time_limit, "mip_rel_gap": 1e-3},
        )
        if result.status not in (0, 1) or result.mip_dual_bound is None:
            raise TierStoreError(f"no bound within {time_limit} s: {result.message}")
        return float(result.mip_dual_bound) * 1e-3
