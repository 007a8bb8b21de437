"""Seconds of every stage on every rank and host for a placement and its caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstore.planner.allocate import Allocation
from tierstore.planner.costs import RANK_STAGES, Problem
from tierstore.planner.curves import Floats
from tierstore.planner.options import Placed
from tierstore.planner.reading import saved_seconds


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a plan costs: seconds per step, ``ranks`` (ranks, 6) by RANK_STAGES and ``ssd_s`` (hosts,).

    Bytes in use are ``hbm`` (ranks,), ``host_memory`` and ``ssd`` (hosts,). The pipeline overlaps stages, so
    a step takes as long as the longest of them.
    """

    ranks: Floats
    ssd_s: Floats
    hbm: NDArray
    host_memory: NDArray
    ssd: NDArray

    @property
    def step(self) -> float:
        """Seconds per step."""
        return max(float(self.ranks.max()), float(self.ssd_s.max()))

    def slowest(self) -> tuple[str, str]:
        """Return the (stage, place) that sets the step: ("ssd", "host 3")."""
        if self.ssd_s.max() > self.ranks.max():
            return "ssd", f"host {int(self.ssd_s.argmax())}"
        where, stage = np.unravel_index(int(self.ranks.argmax()), self.ranks.shape)
        return RANK_STAGES[stage], f"rank {where}"


def predict(problem: Problem, placed: Sequence[Placed], caches: Allocation) -> Prediction:
    """Sum up the shards of ``placed`` with the rows that ``caches`` gives them."""
    topology = problem.topology
    world, hosts = topology.world_size, topology.hosts
    ranks = np.zeros((world, len(RANK_STAGES)))
    ranks[:, 0] = problem.compute_seconds
    for item in placed:
        ranks[:, :4] += item.option.everywhere
        ranks[item.ranks, :4] += item.option.cost.load
    unique, rank, host = caches.field("unique"), caches.rank, caches.rank // topology.ranks_per_host
    on_link, on_ssd = (unique * caches.misses(rows) for rows in (caches.hbm_rows, caches.memory_rows))
    ranks[:, 4] = np.bincount(rank, on_link * caches.field("link_s"), world)
    ranks[:, 5] = problem.fetch_seconds(ranks, ranks[:, 4])
    ssd_s = np.bincount(host, on_ssd * caches.field("ssd_s"), hosts)
    return Prediction(
        ranks,
        ssd_s - saved_seconds(problem, caches, on_ssd),
        np.bincount(rank, caches.hbm_bytes(), world) + problem.fixed_hbm,
        np.bincount(host, caches.uvm_bytes(), hosts) + problem.fixed_host,
        np.bincount(host, caches.ssd_bytes(), hosts),
    )
