"""Seconds of every stage on every rank and host for a placement and its caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.planner.allocate import Allocation, Placed
from tierstore.planner.cluster import HOST_STAGES, RANK_STAGES
from tierstore.planner.costs import Workload
from tierstore.planner.curves import Floats
from tierstore.planner.topology import Topology


@dataclass(frozen=True, eq=False)
class Prediction:
    """Seconds per step: ``ranks`` (ranks, 6) by RANK_STAGES, ``hosts`` (hosts, 2) by HOST_STAGES; bytes in
    use: ``hbm`` (ranks,), ``host_memory`` and ``ssd`` (hosts,). The pipeline overlaps stages, so a step takes
    as long as the longest of them."""

    ranks: Floats
    hosts: Floats
    hbm: Floats
    host_memory: Floats
    ssd: Floats

    @property
    def step(self) -> float:
        return max(float(self.ranks.max()), float(self.hosts.max()))

    def slowest(self) -> tuple[str, str]:
        """(Stage, place) that sets the step: ("ssd", "host 3")."""
        if self.ranks.max() >= self.hosts.max():
            where, stage = np.unravel_index(int(self.ranks.argmax()), self.ranks.shape)
            return RANK_STAGES[stage], f"rank {where}"
        where, stage = np.unravel_index(int(self.hosts.argmax()), self.hosts.shape)
        return HOST_STAGES[stage], f"host {where}"


def predict(topology: Topology, work: Workload, placed: Sequence[Placed], caches: Allocation) -> Prediction:
    """Sums up the shards of ``placed`` with the rows that ``caches`` gives them."""
    world, hosts = topology.world_size, topology.hosts
    ranks, host = np.zeros((world, 6)), np.zeros((hosts, 2))
    ranks[:, 0], ranks[:, 1] = work.compute_seconds, work.lookup_seconds
    for item in placed:
        ranks[:, :4] += item.cut.everywhere.seconds
    unique = caches.field("unique")
    on_link = unique * caches.misses(caches.hbm_rows)
    on_ssd = unique * caches.reads()
    where = caches.rank
    on_host = where // topology.ranks_per_host
    for item in placed:
        ranks[item.ranks, :4] += item.cut.cost.load.seconds
    ranks[:, 1] += _by_row_size(caches, world, topology.row_size_seconds)
    link = _sums(where, on_link * caches.field("link_bytes"), world)
    ranks[:, 4] = _sums(where, on_link * caches.field("link_s"), world)
    host[:, 0] = _sums(on_host, on_ssd * caches.field("ssd_s"), hosts)
    if topology.one_fetcher:
        ranks[:, 5] = ranks[:, 1] + ranks[:, 4] + _sums(where, on_ssd * caches.field("store_s"), world)
        ranks[:, 5] += work.read_waits * np.repeat(host[:, 0], topology.ranks_per_host)
        ranks[:, 5] += topology.in_turn * (ranks[:, 0] - work.idle_seconds)
    else:
        ranks[:, 0] += link / topology.hbm_bw
    moved = _sums(on_host, on_ssd * caches.field("ssd_bytes_moved"), hosts)
    moved += link.reshape(hosts, -1).sum(axis=1)
    host[:, 1] = moved / topology.host_memory_bw
    return Prediction(
        ranks,
        host,
        _sums(where, caches.hbm_bytes(), world) + work.fixed_hbm,
        _sums(on_host, caches.uvm_bytes(), hosts) + work.fixed_host(topology),
        _sums(on_host, caches.ssd_bytes(), hosts),
    )


def _by_row_size(caches: Allocation, world: int, each: Mapping[str, float]) -> Floats:
    """Seconds per rank of what depends on all tables of a row size together: what evicting and reading ahead
    cost whatever the rows, and, negative, policies where device memory holds all rows."""
    sizes, size = np.unique(caches.field("columns"), return_inverse=True)
    tier, tiers = caches.rank * len(sizes) + size, world * len(sizes)
    evicts = np.bincount(tier, caches.hbm_rows < caches.rows - 0.5, tiers) > 0
    reads = np.bincount(tier, caches.stored, tiers) > 0
    fixed = each["evict"] * evicts + each["ahead"] * reads
    return fixed.reshape(world, -1).sum(axis=1) - _sums(
        caches.rank, caches.field("policy_s") * ~evicts[tier], world
    )


def hit_rate(caches: Allocation, shards: slice) -> float:
    """Share of a step's unique rows of some shards (those of a table) that they find in device memory."""
    costs, rows = caches.costs[shards], caches.hbm_rows[shards]
    unique = sum(cost.unique for cost in costs)
    if not unique:
        return 1.0
    misses = {key: float(key[0].curve.at(key[1])) for key in set(zip(costs, rows.tolist(), strict=True))}
    lost = sum(cost.unique * misses[cost, n] for cost, n in zip(costs, rows.tolist(), strict=True))
    return 1.0 - lost / unique


def _sums(where: NDArray[np.int64], values: NDArray[Any], count: int) -> Floats:
    return np.bincount(where, weights=values, minlength=count).astype(np.float64)
