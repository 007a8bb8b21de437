"""Which option for which table on which ranks: greedy insertion, then reinsertion for as long as it pays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.planner.cluster import Cluster, Ranks, badness
from tierstore.planner.costs import Problem
from tierstore.planner.options import ShardingOption
from tierstore.planner.prices import Priced, price_grid, priced

_LIGHT = 0.2  # of the ideal step: other options of a table with less load are not tried in large searches
_REPLICA = 0.002  # of device memory: the largest table that is tried as a replica then
_SMALL = 2_000  # options x ranks up to which every option is tried for every table
_RESTARTS = 4  # of small searches, in random order
_POWERS = (6.0, 16.0, 40.0)  # of the smooth maximum, ever closer to the maximum itself


@dataclass(frozen=True)
class Choice:
    """A table's option, by its position among the table's options, and the ranks of its shards."""

    option: int
    ranks: Ranks


Found = tuple[tuple[float, float], dict[int, Choice]]
"""(Overflow, step) of a plan, and its choices."""


class Search:
    """Chooses a :class:`Choice` for every table within ``seconds``.

    ``options``: of each table; ``allowed``: ranks that may hold it.
    """

    def __init__(
        self,
        problem: Problem,
        options: Sequence[Sequence[ShardingOption]],
        allowed: Sequence[Ranks],
        seconds: float,
    ) -> None:
        self.problem, self.topology = problem, problem.topology
        self.options, self.allowed = options, allowed
        self.grid = price_grid(few[0].cost for few in options)
        self.parts: dict[tuple[int, int], Priced] = {}
        self.until = time.perf_counter() + seconds
        self.random = np.random.default_rng(0)
        self.cluster, self.choices = Cluster(problem), dict[int, Choice]()
        self.unit = self._ideal()
        self.small = sum(map(len, options)) * self.topology.world_size <= _SMALL
        self.tried = [
            list(range(len(few))) if self.small or self._weight(t, 0) >= _LIGHT else self._light(few)
            for t, few in enumerate(options)
        ]

    def run(self) -> list[Choice]:
        """Return the best choices found, in the order of the tables."""
        order = sorted(range(len(self.options)), key=lambda t: -self._weight(t, len(self.grid.ssd) // 2))
        best = self._descend(order)
        for _ in range(_RESTARTS if self.small else 0):
            if time.perf_counter() > self.until:
                break
            best = min(best, self._descend(self.random.permutation(order).tolist()), key=lambda one: one[0])
        return [best[1][t] for t in range(len(self.options))]

    def _descend(self, order: Sequence[int]) -> Found:
        """Return the best plan on the way from an empty one."""
        self.cluster, self.choices = Cluster(self.problem), {}
        for t in order:
            self._insert(t, _POWERS[0])
        best = self._found()
        for power in _POWERS:
            for _ in range(3 if self.small else 1):
                self.unit = self.cluster.longest()
                if not self._reinsert_all(order, power):
                    break
            best = min(best, self._found(), key=lambda one: one[0])
        return best

    def _found(self) -> Found:
        rank, over, host, host_over = self.cluster.loads()
        return (float(over.sum() + host_over.sum()), max(rank.max(), host.max())), dict(self.choices)

    def _reinsert_all(self, order: Sequence[int], power: float) -> bool:
        """Take each table out and put it where it is best now; return True if that changed anything."""
        before = self._total(power)
        for t in order:
            if time.perf_counter() > self.until:
                return False
            self._place(t, self.choices.pop(t), -1.0)
            self._insert(t, power)
        return self._total(power) < before * (1 - 1e-6)

    def _insert(self, t: int, power: float) -> None:
        """Put a table where it does the least harm."""
        best: tuple[float, Choice] | None = None
        for k in self.tried[t]:
            ranks = self._best_ranks(t, k, power)
            if ranks is None:
                continue
            choice = Choice(k, ranks)
            self._place(t, choice)
            total = self._total(power)
            self._place(t, choice, -1.0)
            if best is None or total < best[0]:
                best = total, choice
        assert best is not None
        self.choices[t] = best[1]
        self._place(t, best[1])

    def _place(self, t: int, choice: Choice, sign: float = 1.0) -> None:
        self.cluster.place(self.options[t][choice.option], self._part(t, choice.option), choice.ranks, sign)

    def _total(self, power: float) -> float:
        rank, over, host, host_over = self.cluster.loads()
        hosts = badness(host[:, None], host_over, self.unit, power).sum()
        return float(badness(rank, over, self.unit, power).sum() + hosts)

    def _best_ranks(self, t: int, k: int, power: float) -> Ranks | None:
        """Return the ranks for the shards of one option that look best; None if none are allowed."""
        option, allowed = self.options[t][k], self.allowed[t]
        if option.spread == "all":
            return allowed
        grows = np.full(self.topology.world_size, np.inf)
        grows[allowed] = self.cluster.growth(option, self._part(t, k), self.unit, power)[allowed]
        if option.spread == "any":
            return np.sort(np.argsort(grows, kind="stable")[: option.shards])
        per_host, one_host = self.topology.ranks_per_host, option.spread == "host"
        by_host = np.sort(grows.reshape(-1, per_host), axis=1)
        cost = by_host[:, : option.shards if one_host else per_host].sum(axis=1)
        hosts = np.argsort(cost, kind="stable")[: 1 if one_host else option.column_cuts]
        if not np.isfinite(cost[hosts]).all():
            return None
        ranks = (hosts[:, None] * per_host + np.arange(per_host)).ravel()
        return np.sort(ranks[np.argsort(grows[ranks], kind="stable")[: option.shards]]) if one_host else ranks

    # What there is to choose from

    def _part(self, t: int, k: int) -> Priced:
        if (t, k) not in self.parts:
            self.parts[t, k] = priced(self.options[t][k].cost, self.grid)
        return self.parts[t, k]

    def _ideal(self) -> float:
        """Return the step if every table were spread evenly: the unit of the smooth maximum."""
        pooled, everyone = Cluster(self.problem), np.arange(self.topology.world_size)
        for t, (first, *_) in enumerate(self.options):
            pooled.place(first, self._part(t, 0), everyone, first.shards / len(everyone))
        return pooled.longest()

    def _weight(self, t: int, price: int) -> float:
        """Return a whole table's share of the ideal step, or of a memory, at one of the grid's prices."""
        cost, part = self.options[t][0].cost, self._part(t, 0)
        index, ssd_s, stored = part.host[:, price]
        seconds = max(*cost.load, part.link_s[price], ssd_s / self.topology.ranks_per_host)
        topology = self.topology
        return max(
            seconds / self.unit,
            (cost.fixed_hbm + part.hbm_bytes[0]) / topology.hbm_per_rank,
            (part.held_bytes[0] + index) / max(1, topology.host_memory_per_host),
            stored / max(1, topology.ssd_per_host),
        )

    def _light(self, options: Sequence[ShardingOption]) -> list[int]:
        """Return the first option, and the replica of a small table: it can be no rank's burden."""
        room = _REPLICA * self.topology.hbm_per_rank
        replicas = [k for k, one in enumerate(options) if not one.cost.unique and one.cost.fixed_hbm <= room]
        return [0, *(k for k in replicas if k)]
