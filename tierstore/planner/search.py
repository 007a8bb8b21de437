"""Which cut for which table on which ranks: greedy insertion, then reinsertion for as long as it pays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.planner.cluster import Cluster, Ranks, badness
from tierstore.planner.costs import Workload
from tierstore.planner.cuts import Cut
from tierstore.planner.prices import Priced, price_grid, priced
from tierstore.planner.topology import Topology

_LIGHT = 0.2  # of the ideal step: cutting a table with less load per rank is not tried in large searches
_SMALL = 2_000  # cuts x ranks up to which every cut is tried for every table
_RESTARTS = 4  # of small searches, in random order
_PASSES = (6.0, 16.0, 40.0)  # powers of the smooth maximum, ever closer to the maximum itself


@dataclass(frozen=True)
class Choice:
    """A table's cut, by its position among the table's cuts, and the ranks of its shards."""

    cut: int
    ranks: Ranks


Found = tuple[tuple[float, float], dict[int, Choice]]
"""(Overflow, step) of a plan, and its choices."""


class Search:
    """Chooses a :class:`Choice` for every table. ``allowed[t]``: ranks that may hold table t;
    ``hint[t]``: cuts of it that a good plan is likely to use."""

    def __init__(
        self,
        topology: Topology,
        work: Workload,
        cuts: Sequence[Sequence[Cut]],
        allowed: Sequence[Ranks],
        seconds: float,
        seed: int = 0,
        hint: Sequence[list[int]] | None = None,
    ) -> None:
        self.topology, self.work, self.cuts, self.allowed = topology, work, cuts, allowed
        self.grid = price_grid(options[0].cost for options in cuts)
        self.parts: list[list[Priced | None]] = [[None] * len(options) for options in cuts]
        self.until = time.perf_counter() + seconds
        self.random = np.random.default_rng(seed)
        self.cluster = Cluster(topology, work)
        self.choices: dict[int, Choice] = {}
        self.unit = self._ideal()
        small = sum(map(len, cuts)) * topology.world_size <= _SMALL
        self.tried: Sequence[list[int]] = [
            list(range(len(options))) if small else self._worthwhile(t) for t, options in enumerate(cuts)
        ]
        self.small, self.hint = small, hint

    def run(self) -> list[Choice]:
        """The best choices found, in the order of the tables."""
        tried, order = self.tried, self._by_weight()
        best = self._descend(order, tried, tried)
        starts = [(order, self.hint)] if self.hint is not None else []
        if self.small:
            starts += [(self.random.permutation(order).tolist(), tried) for _ in range(_RESTARTS)]
        for start, first in starts:
            best = min(best, self._descend(start, first, tried), key=lambda found: found[0])
        best = self._relieve(best)
        best = self._shake(best)
        self._restore(best[1])
        return [self.choices[t] for t in range(len(self.cuts))]

    def _descend(self, order: Sequence[int], first: Sequence[list[int]], then: Sequence[list[int]]) -> Found:
        """The best plan on the way from an empty one: with cuts of ``first``, of ``then`` in the end."""
        if self.choices and time.perf_counter() > self.until:
            return (np.inf, np.inf), {}
        self._restore({})
        self.tried = first
        for t in order:
            self._insert(t, _PASSES[0])
        best: Found = self._score(), dict(self.choices)
        for power in _PASSES:
            for _ in range(3 if self.small else 1):
                self.unit = self._longest()
                if not self._reinsert_all(order, power):
                    break
            best = self._better(best)
            if power == _PASSES[-2]:
                self.tried = then
        self.tried = then
        return best

    # What there is to choose from

    def part(self, t: int, c: int) -> Priced:
        part = self.parts[t][c]
        if part is None:
            part = self.parts[t][c] = priced(self.cuts[t][c].cost, self.grid)
        return part

    def _ideal(self) -> float:
        """The step if every table's first cut could be spread evenly: the unit of the smooth maximum."""
        pooled = Cluster(self.topology, self.work)
        world, hosts = self.topology.world_size, self.topology.hosts
        for t, options in enumerate(self.cuts):
            cut, part = options[0], self.part(t, 0)
            share = 1.0 / world * cut.shards
            pooled.add_everywhere(cut.everywhere)
            load = cut.cost.load
            pooled.seconds += share * np.array(load.seconds)
            pooled.hbm_bytes += share * part.hbm_bytes
            pooled.link_s += share * part.link_s
            pooled.held_bytes += share * part.held_bytes
            for name in ("index_bytes", "ssd_s", "ssd_bytes", "moved"):
                getattr(pooled, name).__iadd__(cut.shards / hosts * getattr(part, name))
        rank, host, *_ = pooled.loads()
        return max(float(rank.max()), float(host.max()), 1e-9)

    def _worthwhile(self, t: int) -> list[int]:
        """The first cut alone, if it can be no rank's burden; data-parallel too, if it is a small table."""
        options = self.cuts[t]
        cost, part = options[0].cost, self.part(t, 0)
        load = cost.load
        seconds = max(*load.seconds, float(part.ssd_s[0]) / 4)
        hbm = (cost.fixed_hbm + part.hbm_bytes[0]) / self.cluster.hbm_size
        host = (part.held_bytes[0] + part.index_bytes[0]) / max(1.0, self.cluster.host_size)
        stored = part.ssd_bytes[0] / max(1.0, self.cluster.ssd_size)
        if max(seconds / self.unit, hbm, host, stored) < _LIGHT:
            room = 0.002 * self.cluster.hbm_size
            return [
                c
                for c, cut in enumerate(options)
                if c == 0 or (cut.cost.fixed_hbm <= room and not cut.cost.unique)
            ]
        return list(range(len(options)))

    def _by_weight(self) -> list[int]:
        """Tables with the greatest share of any resource first."""
        weights = []
        for t, options in enumerate(self.cuts):
            cost, part = options[0].cost, self.part(t, 0)
            load = cost.load
            middle = len(part.link_s) // 2
            seconds = max(
                load.compute, load.index, load.intra, load.inter, part.link_s[middle], part.ssd_s[middle]
            )
            bytes_ = (cost.fixed_hbm + part.hbm_bytes[0]) / self.cluster.hbm_size
            weights.append(
                max(float(seconds) / self.unit, bytes_, part.ssd_bytes[0] / max(1.0, self.cluster.ssd_size))
            )
        return sorted(range(len(weights)), key=lambda t: -weights[t])

    # How good it is

    def _total(self, power: float) -> float:
        rank, host, over, host_over = self.cluster.loads()
        return float(
            badness(rank, over, self.unit, power).sum() + badness(host, host_over, self.unit, power).sum()
        )

    def _longest(self) -> float:
        rank, host, *_ = self.cluster.loads()
        return max(float(rank.max()), float(host.max()), 1e-9)

    def _score(self) -> tuple[float, float]:
        """(Overflow, step): less is better, in this order."""
        rank, host, over, host_over = self.cluster.loads()
        return float(over.sum() + host_over.sum()), max(float(rank.max()), float(host.max()))

    def _better(self, best: Found) -> Found:
        score = self._score()
        return (score, dict(self.choices)) if score < best[0] else best

    # Moves

    def _put(self, t: int, choice: Choice, sign: float = 1.0) -> None:
        self.cluster.place(self.cuts[t][choice.cut], self.part(t, choice.cut), choice.ranks, sign)
        if sign > 0:
            self.choices[t] = choice
        else:
            del self.choices[t]

    def _restore(self, choices: dict[int, Choice]) -> None:
        self.cluster = Cluster(self.topology, self.work)
        self.choices = {}
        for t, choice in choices.items():
            self._put(t, choice)

    def _insert(self, t: int, power: float) -> None:
        """Puts a table where it does the least harm."""
        best: tuple[float, Choice] | None = None
        for c in self.tried[t]:
            for ranks in self._places(t, c, power):
                choice = Choice(c, ranks)
                self._put(t, choice)
                total = self._total(power)
                self._put(t, choice, -1.0)
                if best is None or total < best[0]:
                    best = total, choice
        assert best is not None
        self._put(t, best[1])

    def _places(self, t: int, c: int, power: float) -> list[Ranks]:
        """Ranks for the shards of one cut that look best."""
        cut, allowed = self.cuts[t][c], self.allowed[t]
        if cut.spread == "all":
            return [allowed]
        grows = self.cluster.one_more(cut, self.part(t, c), self.unit, power)
        if cut.spread == "any":
            few = allowed[np.argsort(grows[allowed], kind="stable")[: cut.shards]]
            return [np.sort(few) if cut.shards > 1 else few]
        per_host = self.topology.ranks_per_host
        mask = np.full(len(grows), np.inf)
        mask[allowed] = grows[allowed]
        by_host = np.sort(mask.reshape(-1, per_host), axis=1)
        wanted = cut.shards if cut.spread == "host" else per_host
        cost = by_host[:, :wanted].sum(axis=1)
        hosts = np.argsort(cost, kind="stable")[: 1 if cut.spread == "host" else cut.column_cuts]
        if not np.isfinite(cost[hosts]).all():
            return []
        if cut.spread == "host":
            own = np.arange(hosts[0] * per_host, (hosts[0] + 1) * per_host)
            return [np.sort(own[np.argsort(mask[own], kind="stable")[:wanted]])]
        return [(hosts[:, None] * per_host + np.arange(per_host)).ravel()]

    def _reinsert_all(self, order: Sequence[int], power: float) -> bool:
        """Takes each table out and puts it where it is best now; True if that changed anything."""
        before = self._total(power)
        for t in order:
            if time.perf_counter() > self.until:
                return False
            self._put(t, self.choices[t], -1.0)
            self._insert(t, power)
        return self._total(power) < before * (1 - 1e-6)

    def _relieve(self, best: Found) -> Found:
        """Moves tables off the slowest rank or host, one at a time, as long as the step gets shorter."""
        self._restore(best[1])
        power, idle = _PASSES[-1], 0
        while idle < 2 and time.perf_counter() < self.until:
            self.unit, start = self._longest(), best[0]
            for t in self._on_slowest()[:24]:
                self._put(t, self.choices[t], -1.0)
                self._insert(t, power)
                best = self._better(best)
            idle = 0 if best[0] < start else idle + 1
        return best

    def _on_slowest(self) -> list[int]:
        """Tables with a shard on the rank or host that takes longest, or overflows, heaviest first."""
        rank, host, over, host_over = self.cluster.loads()
        slow = rank.max(axis=1) + 1e6 * over
        slow_host = host.max(axis=1) + 1e6 * host_over
        if slow.max() >= slow_host.max():
            where = {int(slow.argmax())}
        else:
            first = int(slow_host.argmax()) * self.topology.ranks_per_host
            where = set(range(first, first + self.topology.ranks_per_host))
        here = [t for t, choice in self.choices.items() if not where.isdisjoint(choice.ranks.tolist())]
        return sorted(here, key=lambda t: -self._weight(t))

    def _weight(self, t: int) -> float:
        choice = self.choices[t]
        load, part = self.cuts[t][choice.cut].cost.load, self.part(t, choice.cut)
        return max(load.compute + load.index, load.intra, load.inter, float(part.link_s[24] + part.ssd_s[24]))

    def _shake(self, best: Found) -> Found:
        """Takes several tables out, one of the slowest place among them, and puts them back shuffled."""
        rounds = min(100, 8 * len(self.cuts)) if self.small else 40
        everything = np.arange(len(self.cuts))
        since = 0
        while since < rounds and time.perf_counter() < self.until:
            self._restore(best[1])
            self.unit = self._longest()
            slow = self._on_slowest()[:8]
            count = min(len(self.cuts), int(self.random.integers(2, 6)))
            picks = {int(t) for t in self.random.choice(everything, count, replace=False)}
            if slow:
                picks.add(int(self.random.choice(slow)))
            out = self.random.permutation(sorted(picks)).tolist()
            for t in out:
                self._put(t, self.choices[t], -1.0)
            power = float(self.random.choice([4.0, 10.0, 40.0]))
            for t in out:
                self._insert(t, power)
            after = self._better(best)
            since = 0 if after[0] < best[0] else since + 1
            best = after
        return best
