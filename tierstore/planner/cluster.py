"""The load of every rank and host under a placement, kept up to date as shards come and go.

Caches are divided by price. At one price for all shards of a memory, seconds per byte, each shard holds what
the best division of that memory gives it. So bytes and seconds as functions of the price add up over shards,
and a rank or host is known by their sums at :data:`GRID` prices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tierstore.planner.allocate import Steps, steps_of
from tierstore.planner.costs import Problem
from tierstore.planner.options import Ranks, ShardCost, ShardingOption
from tierstore.rounds import FloatArray

GRID = 48
_OVERFLOW = 1e12
# Columns of what shards need of a rank: seconds of four stages; buffers; by price bytes of the device and
# seconds of the link, bytes of device and host together. Of a host: buffers; by price bytes of the store's
# index, seconds and bytes of the drives.
_LOAD, _FIXED = slice(4), 4
_BYTES, _LINK, _HELD = (slice(5 + k * GRID, 5 + (k + 1) * GRID) for k in range(3))
_INDEX, _DRIVES, _FILES = (slice(1 + k * GRID, 1 + (k + 1) * GRID) for k in range(3))


@dataclass(frozen=True, eq=False)
class Part:
    """What one shard of an option needs of its rank and of its host: float64, in the columns above."""

    option: ShardingOption
    rank: FloatArray
    host: FloatArray


class PriceGrid:
    """Falling prices of link and drives, seconds per byte: from buying floors to buying everything."""

    def __init__(self, costs: Iterable[ShardCost]) -> None:
        fast, slow = zip(*map(_steps, costs), strict=True)
        self.link, self.ssd = _prices(fast), _prices(slow)

    def part(self, option: ShardingOption) -> Part:
        """Return what a shard of ``option`` needs at every price."""
        cost = option.cost
        fast, slow = _steps(cost)
        i, j = (
            np.searchsorted(-steps.density, -prices * (1 - 1e-12), side="right")
            for steps, prices in ((fast, self.link), (slow, self.ssd))
        )
        stored = j < len(slow.density)
        index = stored * cost.index_bytes
        rank = np.hstack([cost.load, cost.fixed_hbm, fast.bytes[i], fast.seconds[i], slow.bytes[j] - index])
        host = np.hstack([cost.fixed_host, index, slow.seconds[j], stored * cost.ssd_bytes])
        return Part(option, rank, host)


def _steps(cost: ShardCost) -> tuple[Steps, Steps]:
    """Return (device memory against seconds of the link, all, in slots of the device, against drives)."""
    fast = steps_of(cost, cost.hbm_floor, 0, "link_s")
    return fast, steps_of(cost, cost.memory_floor, cost.index_bytes, "ssd_s")


def _prices(steps: Iterable[Steps]) -> FloatArray:
    values = np.concatenate([step.density for step in steps])
    values = values[values > 0]
    if not len(values):
        return np.concatenate([np.full(GRID - 1, np.inf), [-1.0]])
    # Quantiles follow where tables really compete for bytes; the ends are kept.
    inner = np.quantile(np.log(values), np.linspace(1, 0, GRID - 2))
    return np.concatenate([[np.inf], np.exp(inner), [-1.0]])


class Cluster:
    """Sums over the shards placed so far, in the columns of :class:`Part`: (ranks, ...) and (hosts, ...)."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.topology = problem, problem.topology
        self.host_of = np.arange(self.topology.world_size) // self.topology.ranks_per_host
        self.ranks = np.zeros((self.topology.world_size, _HELD.stop))
        self.hosts = np.zeros((self.topology.hosts, _FILES.stop))
        self.ranks[:, 0], self.ranks[:, _FIXED] = problem.compute_seconds, problem.fixed_hbm
        self.hosts[:, 0] = problem.fixed_host

    def place(self, part: Part, ranks: Ranks, sign: float = 1.0) -> None:
        """Add (or with ``sign`` -1 take away) a table on ``ranks``, one shard each."""
        self.ranks[:, _LOAD] += sign * part.option.everywhere
        self.ranks[ranks] += sign * part.rank
        counts = np.bincount(self.host_of[ranks], minlength=len(self.hosts))
        hosts = np.flatnonzero(counts)
        self.hosts[hosts] += sign * counts[hosts, None] * part.host

    def quality(self) -> tuple[float, float]:
        """Return (shares of memories that do not fit, seconds of the longest stage); less is better."""
        spilled = self._by_host(self._spilled(self.ranks))
        (rank, over), (host, host_over) = self._of_ranks(self.ranks), self._of_hosts(self.hosts, spilled)
        return float(over.sum() + host_over.sum()), max(float(rank.max()), float(host.max()), 1e-12)

    def total(self, unit: float, power: float) -> float:
        """Return a smooth maximum of the seconds of ranks and hosts; what does not fit outweighs time."""
        spilled = self._by_host(self._spilled(self.ranks))
        rank, host = self._badness(self.ranks, self.hosts, spilled, unit, power)
        return float(rank.sum() + host.sum())

    def longest_stage(self, part: Part) -> float:
        """Return the seconds of the longest stage of a shard at its floors."""
        rank, host = part.rank, part.host
        return max(*rank[_LOAD], rank[_LINK][0], host[_DRIVES][0] / self.topology.ranks_per_host)

    def growth(self, part: Part, unit: float, power: float) -> FloatArray:
        """Return by how much the total grows with one shard on each rank: float64 (ranks,)."""
        at, before, after = self.host_of, self._spilled(self.ranks), self.ranks + part.rank
        by_host = self._by_host(before)
        rank, host = self._badness(self.ranks, self.hosts, by_host, unit, power)
        # One row per rank: its host, if the shard were on that rank.
        spilled = by_host[at] + self._spilled(after) - before
        then, host_then = self._badness(after, self.hosts[at] + part.host, spilled, unit, power)
        return then - rank + host_then - host[at]

    def _badness(
        self, ranks: FloatArray, hosts: FloatArray, spilled: FloatArray, unit: float, power: float
    ) -> list[FloatArray]:
        """Return what each rank, and what each host, adds to the total."""
        both = self._of_ranks(ranks), self._of_hosts(hosts, spilled)
        return [((s / unit) ** power).sum(axis=1) + _OVERFLOW * over * (1 + over) for s, over in both]

    def _by_host(self, values: FloatArray) -> FloatArray:
        """Return sums over the ranks of each host."""
        return values.reshape(self.topology.hosts, self.topology.ranks_per_host, GRID).sum(axis=1)

    def _spilled(self, ranks: FloatArray) -> FloatArray:
        """Return what shards hold and their device has no room for, so that it is in host memory."""
        room = np.maximum(self.topology.hbm_per_rank - ranks[:, _FIXED], 0)
        return np.maximum(ranks[:, _HELD] - room[:, None], 0)

    def _of_ranks(self, ranks: FloatArray) -> tuple[FloatArray, FloatArray]:
        size, seconds = self.topology.hbm_per_rank, ranks[:, _LOAD]
        room = size - ranks[:, _FIXED]
        link = _at(ranks[:, _BYTES], ranks[:, _LINK], room)
        fetch = self.problem.fetch_seconds(seconds, link)
        over = np.maximum(0, ranks[:, _BYTES.start] - room) / size
        return np.column_stack([seconds, link, fetch]), over

    def _of_hosts(self, hosts: FloatArray, spilled: FloatArray) -> tuple[FloatArray, FloatArray]:
        memory, ssd = self.topology.host_memory_per_host, self.topology.ssd_per_host
        # A shard that comes to be held whole gives its index back, which may make a sum fall.
        held, room = np.maximum.accumulate(spilled + hosts[:, _INDEX], axis=1), memory - hosts[:, 0]
        over = np.maximum(0, held[:, 0] - room) / max(memory, 1)
        over += np.maximum(0, _at(held, hosts[:, _FILES], room) - ssd) / max(ssd, 1)
        return _at(held, hosts[:, _DRIVES], room)[:, None], over


def _at(bytes_: FloatArray, values: FloatArray, room: FloatArray) -> FloatArray:
    """Return ``values`` (n, GRID) where ``bytes_`` (n, GRID, not falling) reach ``room`` (n,)."""
    n, last = np.arange(len(room)), bytes_.shape[1] - 1
    below = np.clip((bytes_ <= room[:, None]).sum(axis=1) - 1, 0, last)
    above = np.minimum(below + 1, last)
    low = bytes_[n, below]
    gap = bytes_[n, above] - low
    share = np.clip((room - low) / np.where(gap > 0, gap, 1), 0, 1) * (gap > 0)
    return values[n, below] * (1 - share) + values[n, above] * share
