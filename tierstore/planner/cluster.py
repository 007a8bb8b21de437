"""The load of every rank and host under a placement, kept up to date as shards come and go."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierstore.planner.costs import Load, Workload, fetched_share
from tierstore.planner.curves import Floats
from tierstore.planner.cuts import Cut
from tierstore.planner.prices import GRID, Priced
from tierstore.planner.topology import Topology

Ranks = NDArray[np.int64]
RANK_STAGES = ("compute", "index", "intra_host", "inter_host", "host_link", "fetch")
"""``fetch``: index, link, and what the thread that does both has to do with the SSD, on the CPU; else 0. With
fewer than two processors per rank it also waits for those that compute."""
HOST_STAGES = ("ssd", "host_memory")
_OVERFLOW = 1e12


class Cluster:
    """Sums over the shards placed so far; caches are divided as prices say (:mod:`prices`).

    ``seconds`` (ranks, 4) are those of :data:`RANK_STAGES` that do not depend on the caches.
    """

    def __init__(self, topology: Topology, work: Workload) -> None:
        self.topology, self.work = topology, work
        world, hosts = topology.world_size, topology.hosts
        self.host_of = np.arange(world) // topology.ranks_per_host
        self.seconds = np.zeros((world, 4))
        self.seconds[:, 0], self.seconds[:, 1] = work.compute_seconds, work.lookup_seconds
        self.fetched_share = fetched_share(topology, work)
        self.fixed_hbm = np.full(world, float(work.fixed_hbm))
        self.hbm_bytes, self.link_s = np.zeros((world, GRID)), np.zeros((world, GRID))
        self.link_bytes = np.zeros((world, GRID))
        self.fixed_host = np.full(hosts, float(work.fixed_host(topology)))
        self.held_bytes = np.zeros((world, GRID))
        self.index_bytes, self.ssd_s = np.zeros((hosts, GRID)), np.zeros((hosts, GRID))
        self.ssd_bytes, self.moved = np.zeros((hosts, GRID)), np.zeros((hosts, GRID))
        self.hbm_size = float(topology.hbm_per_rank)
        self.host_size = float(topology.host_memory_per_host)
        self.ssd_size = float(topology.ssd_per_host)

    def place(self, cut: Cut, part: Priced, ranks: Ranks, sign: float = 1.0) -> None:
        """Adds (or with ``sign`` -1 takes away) a table cut as ``cut`` onto ``ranks``, one shard each."""
        self.add_everywhere(cut.everywhere, sign)
        cost = cut.cost
        self.seconds[ranks] += sign * np.array(cost.load.seconds)
        self.fixed_hbm[ranks] += sign * cost.fixed_hbm
        self.hbm_bytes[ranks] += sign * part.hbm_bytes
        self.link_s[ranks] += sign * part.link_s
        self.link_bytes[ranks] += sign * part.link_bytes
        self.held_bytes[ranks] += sign * part.held_bytes
        counts = np.bincount(self.host_of[ranks], minlength=len(self.fixed_host)).astype(np.float64)
        hosts = np.flatnonzero(counts)
        times = sign * counts[hosts, None]
        self.fixed_host[hosts] += times[:, 0] * cost.fixed_host
        self.index_bytes[hosts] += times * part.index_bytes
        self.ssd_s[hosts] += times * part.ssd_s
        self.ssd_bytes[hosts] += times * part.ssd_bytes
        self.moved[hosts] += times * part.moved

    def add_everywhere(self, load: Load, sign: float = 1.0) -> None:
        self.seconds += sign * np.array(load.seconds)

    def loads(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Seconds (ranks, 6) and (hosts, 2), and by how much memories overflow, as shares of their size:
        (ranks,) and (hosts,)."""
        rank, link_bytes, over = self._ranks(
            self.seconds, self.fixed_hbm, self.hbm_bytes, self.link_s, self.link_bytes
        )
        host, host_over = self._hosts(
            self.fixed_host,
            self._by_host(self._below(self.held_bytes, self.fixed_hbm)) + self.index_bytes,
            self.ssd_s,
            self.ssd_bytes,
            self.moved,
            self._by_host(link_bytes),
        )
        return self._with_fetch(rank, host[self.host_of]), host, over, host_over

    def _by_host(self, values: Floats) -> Floats:
        """Sums over the ranks of each host."""
        return values.reshape(len(self.fixed_host), self.topology.ranks_per_host, *values.shape[1:]).sum(
            axis=1
        )

    def _below(self, held: Floats, fixed: Floats) -> Floats:
        """What does not fit the device of what a rank's shards hold, and is in host memory: (ranks, GRID)."""
        return np.maximum(held - np.maximum(self.hbm_size - fixed, 0)[:, None], 0)

    def _ranks(
        self, seconds: Floats, fixed: Floats, bytes_: Floats, link: Floats, moved: Floats
    ) -> tuple[Floats, Floats, Floats]:
        room = self.hbm_size - fixed
        over = np.maximum(0, bytes_[:, 0] - room) / self.hbm_size
        link_s, link_bytes = _at(bytes_, link, room), _at(bytes_, moved, room)
        result = np.column_stack([seconds, link_s, np.zeros(len(link_s))])
        if not self.topology.one_fetcher:
            result[:, 0] += link_bytes / self.topology.hbm_bw
        return result, link_bytes, over

    def _with_fetch(self, rank: Floats, host: Floats) -> Floats:
        """Fills in the last stage; ``host`` (ranks, 2) are the seconds of each rank's host."""
        if self.topology.one_fetcher:
            rank[:, 5] = rank[:, 1] + rank[:, 4] + self.fetched_share * host[:, 0]
            rank[:, 5] += self.topology.in_turn * (rank[:, 0] - self.work.idle_seconds)
        return rank

    def _hosts(
        self,
        fixed: Floats,
        bytes_: Floats,
        ssd: Floats,
        ssd_bytes: Floats,
        moved: Floats,
        link_bytes: Floats,
    ) -> tuple[Floats, Floats]:
        room = self.host_size - fixed
        # A shard that comes to be held whole gives its index back, which may make a sum fall.
        bytes_ = np.maximum.accumulate(bytes_, axis=1)
        over = np.maximum(0, bytes_[:, 0] - room) / max(self.host_size, 1.0)
        stored = _at(bytes_, ssd_bytes, room)
        over = over + np.maximum(0, stored - self.ssd_size) / max(self.ssd_size, 1.0)
        memory = (link_bytes + _at(bytes_, moved, room)) / self.topology.host_memory_bw
        return np.column_stack([_at(bytes_, ssd, room), memory]), over

    def one_more(self, cut: Cut, part: Priced, unit: float, power: float) -> Floats:
        """By how much :func:`badness` grows with one shard on each rank: float64 (ranks,)."""
        cost = cut.cost
        rank0, link0, over0 = self._ranks(
            self.seconds, self.fixed_hbm, self.hbm_bytes, self.link_s, self.link_bytes
        )
        rank1, link1, over1 = self._ranks(
            self.seconds + cost.load.seconds,
            self.fixed_hbm + cost.fixed_hbm,
            self.hbm_bytes + part.hbm_bytes,
            self.link_s + part.link_s,
            self.link_bytes + part.link_bytes,
        )
        below0 = self._below(self.held_bytes, self.fixed_hbm)
        below1 = self._below(self.held_bytes + part.held_bytes, self.fixed_hbm + cost.fixed_hbm)
        bytes0, link = self._by_host(below0) + self.index_bytes, self._by_host(link0)
        host0, host_over0 = self._hosts(self.fixed_host, bytes0, self.ssd_s, self.ssd_bytes, self.moved, link)
        # One row per rank from here on: its host, if the shard were on that rank.
        at = self.host_of
        host1, host_over1 = self._hosts(
            self.fixed_host[at] + cost.fixed_host,
            bytes0[at] + below1 - below0 + part.index_bytes,
            self.ssd_s[at] + part.ssd_s,
            self.ssd_bytes[at] + part.ssd_bytes,
            self.moved[at] + part.moved,
            link[at] + link1 - link0,
        )
        grows = badness(self._with_fetch(rank1, host1), over1, unit, power)
        grows -= badness(self._with_fetch(rank0, host0[at]), over0, unit, power)
        return grows + badness(host1, host_over1, unit, power) - badness(host0, host_over0, unit, power)[at]


def badness(seconds: Floats, over: Floats, unit: float, power: float) -> Floats:
    """A smooth maximum to be summed over ranks and hosts, float64 (n,); what does not fit outweighs time."""
    return ((seconds / unit) ** power).sum(axis=1) + _OVERFLOW * over * (1 + over)


def _at(bytes_: Floats, values: Floats, room: Floats) -> Floats:
    """``values`` (n, GRID) where ``bytes_`` (n, GRID, not falling) reach ``room`` (n,), linear between."""
    n, last = np.arange(len(room)), bytes_.shape[1] - 1
    below = np.clip((bytes_ <= room[:, None]).sum(axis=1) - 1, 0, last)
    above = np.minimum(below + 1, last)
    low = bytes_[n, below]
    gap = bytes_[n, above] - low
    share = np.clip((room - low) / np.where(gap > 0, gap, 1), 0, 1) * (gap > 0)
    return values[n, below] * (1 - share) + values[n, above] * share
