"""The load of every rank and host under a placement, kept up to date as shards come and go."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierstore.planner.costs import Problem
from tierstore.planner.curves import Floats
from tierstore.planner.options import ShardingOption
from tierstore.planner.prices import GRID, Priced

Ranks = NDArray[np.int64]
RANK_STAGES = ("compute", "index", "intra_host", "inter_host", "host_link", "fetch")
"""``fetch``: on the CPU index and link, which one thread does in turn; elsewhere 0. With fewer than two
processors per rank this thread also waits for those that compute."""
_OVERFLOW = 1e12


class Cluster:
    """Sums over the shards placed so far; caches are divided as prices say (:mod:`prices`).

    - ``seconds`` (ranks, 4): stages that do not depend on the caches. ``fixed``: buffers, in bytes.
    - ``hbm_bytes``, ``link_s``, ``held_bytes`` (ranks, GRID), ``host`` (3, hosts, GRID: bytes of the index,
      seconds and bytes of the drives): sums of :class:`Priced`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.topology = problem, problem.topology
        world, hosts = self.topology.world_size, self.topology.hosts
        self.host_of = np.arange(world) // self.topology.ranks_per_host
        self.seconds = np.zeros((world, 4))
        self.seconds[:, 0] = problem.compute_seconds
        self.fixed_hbm = np.full(world, float(problem.fixed_hbm))
        self.fixed_host = np.full(hosts, float(problem.fixed_host))
        self.hbm_bytes, self.link_s, self.held_bytes = np.zeros((3, world, GRID))
        self.host = np.zeros((3, hosts, GRID))

    def place(self, option: ShardingOption, part: Priced, ranks: Ranks, sign: float = 1.0) -> None:
        """Add (or with ``sign`` -1 take away) a table under ``option`` on ``ranks``, one shard each."""
        cost = option.cost
        self.seconds += sign * option.everywhere
        self.seconds[ranks] += sign * cost.load
        self.fixed_hbm[ranks] += sign * cost.fixed_hbm
        self.hbm_bytes[ranks] += sign * part.hbm_bytes
        self.link_s[ranks] += sign * part.link_s
        self.held_bytes[ranks] += sign * part.held_bytes
        counts = sign * np.bincount(self.host_of[ranks], minlength=len(self.fixed_host))
        hosts = np.flatnonzero(counts)
        self.fixed_host[hosts] += counts[hosts] * cost.fixed_host
        self.host[:, hosts] += counts[hosts, None] * part.host[:, None]

    def loads(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return (seconds, overflow of memories) of ranks: (ranks, 6) and (ranks,); of hosts: (hosts,) each.

        Overflow is a share of the memory's size.
        """
        rank, over = self._ranks(self.seconds, self.fixed_hbm, self.hbm_bytes, self.link_s)
        bytes_ = self._by_host(self._spilled(self.held_bytes, self.fixed_hbm)) + self.host[0]
        return rank, over, *self._hosts(self.fixed_host, bytes_, self.host)

    def longest(self) -> float:
        """Return the seconds of the longest stage."""
        rank, _, host, _ = self.loads()
        return max(float(rank.max()), float(host.max()), 1e-12)

    def growth(self, option: ShardingOption, part: Priced, unit: float, power: float) -> Floats:
        """Return by how much :func:`badness` grows with one shard on each rank: float64 (ranks,)."""
        cost, at = option.cost, self.host_of
        rank0, over0 = self._ranks(self.seconds, self.fixed_hbm, self.hbm_bytes, self.link_s)
        rank1, over1 = self._ranks(
            self.seconds + cost.load,
            self.fixed_hbm + cost.fixed_hbm,
            self.hbm_bytes + part.hbm_bytes,
            self.link_s + part.link_s,
        )
        spilled0 = self._spilled(self.held_bytes, self.fixed_hbm)
        spilled1 = self._spilled(self.held_bytes + part.held_bytes, self.fixed_hbm + cost.fixed_hbm)
        bytes0 = self._by_host(spilled0) + self.host[0]
        host0, host_over0 = self._hosts(self.fixed_host, bytes0, self.host)
        # One row per rank from here on: its host, if the shard were on that rank.
        bytes1 = bytes0[at] + spilled1 - spilled0 + part.host[0]
        fixed1 = self.fixed_host[at] + cost.fixed_host
        host1, host_over1 = self._hosts(fixed1, bytes1, self.host[:, at] + part.host[:, None])
        grows = badness(rank1, over1, unit, power) - badness(rank0, over0, unit, power)
        grows += badness(host1[:, None], host_over1, unit, power)
        return grows - badness(host0[:, None], host_over0, unit, power)[at]

    def _by_host(self, values: Floats) -> Floats:
        """Return sums over the ranks of each host."""
        return values.reshape(self.topology.hosts, self.topology.ranks_per_host, GRID).sum(axis=1)

    def _spilled(self, held: Floats, fixed: Floats) -> Floats:
        """Return what shards hold and their device has no room for, so that it is in host memory."""
        return np.maximum(held - np.maximum(self.topology.hbm_per_rank - fixed, 0)[:, None], 0)

    def _ranks(self, seconds: Floats, fixed: Floats, bytes_: Floats, link: Floats) -> tuple[Floats, Floats]:
        topology, room = self.topology, self.topology.hbm_per_rank - fixed
        link = _at(bytes_, link, room)
        fetch = np.zeros(len(link))
        if topology.one_fetcher:
            busy = seconds[:, 0] - self.problem.waiting_seconds
            fetch = seconds[:, 1] + link + topology.in_turn * busy
        return np.column_stack([seconds, link, fetch]), np.maximum(
            0, bytes_[:, 0] - room
        ) / topology.hbm_per_rank

    def _hosts(self, fixed: Floats, bytes_: Floats, host: Floats) -> tuple[Floats, Floats]:
        memory, ssd = self.topology.host_memory_per_host, self.topology.ssd_per_host
        # A shard that comes to be held whole gives its index back, which may make a sum fall.
        bytes_, room = np.maximum.accumulate(bytes_, axis=1), memory - fixed
        stored = _at(bytes_, host[2], room)
        over = np.maximum(0, bytes_[:, 0] - room) / max(memory, 1) + np.maximum(0, stored - ssd) / max(ssd, 1)
        return _at(bytes_, host[1], room), over


def badness(seconds: Floats, over: Floats, unit: float, power: float) -> Floats:
    """Return a smooth maximum to be summed over ranks and hosts, float64 (n,).

    What does not fit outweighs time.
    """
    return ((seconds / unit) ** power).sum(axis=1) + _OVERFLOW * over * (1 + over)


def _at(bytes_: Floats, values: Floats, room: Floats) -> Floats:
    """Return ``values`` (n, GRID) where ``bytes_`` (n, GRID, not falling) reach ``room`` (n,)."""
    n, last = np.arange(len(room)), bytes_.shape[1] - 1
    below = np.clip((bytes_ <= room[:, None]).sum(axis=1) - 1, 0, last)
    above = np.minimum(below + 1, last)
    low = bytes_[n, below]
    gap = bytes_[n, above] - low
    share = np.clip((room - low) / np.where(gap > 0, gap, 1), 0, 1) * (gap > 0)
    return values[n, below] * (1 - share) + values[n, above] * share
