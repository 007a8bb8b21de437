"""Which option for which table on which ranks: greedy insertion, then reinsertion for as long as it pays."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tierstore.planner.cluster import Cluster, Part, PriceGrid
from tierstore.planner.costs import Problem
from tierstore.planner.options import Placed, Ranks, options_of

_LIGHT = 0.2  # of the ideal step: other options of a table with less load are not tried in large searches
_SMALL = 2_000  # options x ranks up to which every option is tried for every table
_POWERS = (6.0, 16.0, 40.0)  # of the smooth maximum, ever closer to the maximum itself

Choices = dict[int, tuple[Part, Ranks]]
"""By table: its option, and the ranks of its shards."""


class Search:
    """Chooses an option and ranks for every table within ``seconds``."""

    def __init__(self, problem: Problem, seconds: float) -> None:
        self.problem, self.topology = problem, problem.topology
        world = np.arange(self.topology.world_size)
        self.allowed = [world if (g := d.device_group) is None else np.unique(g) for d in problem.demands]
        options = [options_of(problem, t) for t in range(len(problem.tables))]
        self.grid = PriceGrid(few[0].cost for few in options)
        self.until = time.perf_counter() + seconds
        self.cluster, self.choices = Cluster(problem), Choices()
        first = [self.grid.part(few[0]) for few in options]
        weights = [self.cluster.longest_stage(part) for part in first]
        # The unit of the smooth maximum is about a step of tables that are spread evenly.
        self.unit = problem.compute_seconds + sum(weights) / len(world)
        small = sum(map(len, options)) * len(world) <= _SMALL
        self.order = sorted(range(len(options)), key=lambda t: -weights[t])
        self.parts = [
            [part, *map(self.grid.part, few[1:] if small or weight >= _LIGHT * self.unit else ())]
            for part, weight, few in zip(first, weights, options, strict=True)
        ]

    def run(self) -> list[Placed]:
        """Return the better choices of two orders, the heaviest tables first and a random one."""
        found = [self._descend(self.order)]
        if time.perf_counter() < self.until:
            found.append(self._descend(np.random.default_rng(0).permutation(self.order).tolist()))
        _, choices = min(found, key=lambda one: one[0])
        return [Placed(t, part.option, ranks.tolist()) for t, (part, ranks) in sorted(choices.items())]

    def _descend(self, order: Sequence[int]) -> tuple[tuple[float, float], Choices]:
        """Return the (overflow, step) and the choices that begin with an empty cluster."""
        self.cluster, self.choices = Cluster(self.problem), {}
        for t in order:
            self._insert(t, _POWERS[0])
        for power in _POWERS:
            self.unit = self.cluster.quality()[1]
            for t in order:  # out, and to where the table is best now
                if time.perf_counter() > self.until:
                    break
                self.cluster.place(*self.choices.pop(t), -1.0)
                self._insert(t, power)
        return self.cluster.quality(), self.choices

    def _insert(self, t: int, power: float) -> None:
        """Put a table where it does the least harm."""
        best = np.inf
        for part in self.parts[t]:
            ranks = self._best_ranks(part, self.allowed[t], power)
            self.cluster.place(part, ranks)
            total = self.cluster.total(self.unit, power)
            self.cluster.place(part, ranks, -1.0)
            if total < best:
                best, self.choices[t] = total, (part, ranks)
        self.cluster.place(*self.choices[t])

    def _best_ranks(self, part: Part, allowed: Ranks, power: float) -> Ranks:
        """Return the ranks for the shards of one option that look best."""
        option = part.option
        if option.spread == "all":
            return allowed
        grows = np.full(self.topology.world_size, np.inf)
        grows[allowed] = self.cluster.growth(part, self.unit, power)[allowed]
        if option.spread == "any":
            return np.sort(np.argsort(grows, kind="stable")[: option.shards])
        per_host, one_host = self.topology.ranks_per_host, option.spread == "host"
        by_host = np.sort(grows.reshape(-1, per_host), axis=1)
        cost = by_host[:, : option.shards if one_host else per_host].sum(axis=1)
        hosts = np.argsort(cost, kind="stable")[: 1 if one_host else option.column_cuts]
        ranks = (hosts[:, None] * per_host + np.arange(per_host)).ravel()
        return np.sort(ranks[np.argsort(grows[ranks], kind="stable")[: option.shards]]) if one_host else ranks
