"""Simulates what the tiers of a training hit and miss on a trace, by the training's own code."""

from tierstore.simulation.halves import Counts, Halves, counts_of, simulated_halves
from tierstore.simulation.plan_counts import ShardCounts, Simulated
from tierstore.simulation.tiers import (
    Stats,
    Training,
    batches_of,
    of_rank_0,
    share_of,
    simulate_tiers,
    table_rows,
)

__all__ = [
    "Counts",
    "Halves",
    "ShardCounts",
    "Simulated",
    "Stats",
    "Training",
    "batches_of",
    "counts_of",
    "of_rank_0",
    "share_of",
    "simulate_tiers",
    "simulated_halves",
    "table_rows",
]
