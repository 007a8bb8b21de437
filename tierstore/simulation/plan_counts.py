"""What a simulation of a plan's tiers counted, and the planner's solution and report with these counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tierstore.planner.solver import Solution, predict


@dataclass(frozen=True)
class ShardCounts:
    """Rows of a shard per step. ``memory_misses``: rows that are read from the SSD. ``new_rows`` of
    ``hbm_misses`` were never updated before, so no tier has them."""

    unique_rows: float
    hbm_misses: float
    memory_misses: float
    new_rows: float


@dataclass(frozen=True)
class Simulated:
    """Counts of every shard, in the plan's order, under an eviction ``policy``.

    ``cold``: means over ``cold_batches`` batches, whose lookups fill the tiers. ``steady``: over ``batches``
    batches after these.
    """

    policy: str
    cold_batches: int
    batches: int
    cold: Sequence[ShardCounts]
    steady: Sequence[ShardCounts]

    def of(self, solution: Solution) -> Solution:
        """Return ``solution`` with the misses that were counted, and the seconds that these take."""
        unique = np.maximum(solution.caches.field("unique"), 1e-12)
        counts = np.array([(one.hbm_misses, one.memory_misses) for one in self.steady])
        missed = tuple(np.minimum(counts.T / unique, 1.0) * (solution.caches.field("unique") > 0))
        found = predict(solution.problem, solution.placed, solution.caches, missed)
        return replace(solution, missed=missed, prediction=found)

    def added_to(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return a plan's report with these counts."""
        tables, first = [], 0
        for entry in report["tables"]:
            shards = slice(first, first := first + len(entry["shards"]))
            steady, cold = ([asdict(one) for one in counts[shards]] for counts in (self.steady, self.cold))
            tables.append({**entry, "predicted": steady, "cold_start": cold})
        known = {"policy": self.policy, "cold_batches": self.cold_batches, "batches": self.batches}
        return {**report, "tables": tables, "simulated": known}
