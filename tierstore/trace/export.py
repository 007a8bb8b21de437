"""What planners want to know of each table: its miss-ratio curve and how many rows a batch looks up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_policies import PreparedTrace, ReuseCurve, lru_curve
from cache_policies.prepared import split
from tierstore.keys import ID_BITS
from tierstore.trace.trace import Trace

FORMAT = "tierstore.table_curves"
VERSION = 1


@dataclass(frozen=True)
class TableCurve:
    """One table alone. ``num_embeddings`` is what the table has room for (``footprint``, the rows used, if
    that is not known); ``uniques`` and ``accesses`` are means per batch.
    """

    name: str
    num_embeddings: int
    footprint: int
    uniques: float
    accesses: float
    curve: ReuseCurve

    def reuse_histogram(self, bins: int = 100) -> np.ndarray:
        """Uses that hit once the cache has the rows up to each bin's upper edge (float64, bins of equal width
        over ``num_embeddings``); first uses are in none, since they miss at any size.
        """
        edges = np.linspace(0, self.num_embeddings, bins + 1)
        missed = self.curve.misses(np.floor(edges))
        return np.maximum(0.0, missed[:-1] - missed[1:])

    def cacheability(self, bins: int = 100) -> float:
        """Area under the miss-ratio curve over the table's size, first uses left out (0: all reuse is at
        once).
        """
        histogram = self.reuse_histogram(bins)
        if not histogram.sum():
            return 0.0
        return float((1 - np.cumsum(histogram) / histogram.sum()).mean())

    def offload_stats(self, bins: int = 100) -> dict[str, Any]:
        """Arguments of torchrec's ``EmbeddingOffloadStats``, by which its scale-up proposer sizes caches;
        make a tensor of ``mrc_hist_counts``.
        """
        return {
            "cacheability": self.cacheability(bins),
            "expected_lookups": round(self.uniques),
            "mrc_hist_counts": self.reuse_histogram(bins).tolist(),
            "height": self.num_embeddings,
        }


def table_curves(
    trace: Trace,
    prepared: PreparedTrace,
    rate: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> list[TableCurve]:
    """The LRU curve of every table of ``trace``, which ``prepared`` is of; ``rate`` samples rows."""
    table_of = (prepared.keys >> np.uint64(ID_BITS)).astype(np.int64)
    batches = max(1, prepared.batches)
    curves = []
    for t, part in enumerate(split(prepared, table_of, len(trace.tables))):
        known = trace.num_embeddings[t] if trace.num_embeddings else 0
        curves.append(
            TableCurve(
                trace.tables[t],
                known or max(1, part.footprint),
                part.footprint,
                part.uniques / batches,
                part.accesses / batches,
                lru_curve(part, rate),
            )
        )
        if progress:
            progress(t + 1, len(trace.tables))
    return curves


def planner_input(trace: Trace, curves: list[TableCurve], bins: int = 100) -> dict[str, Any]:
    """Plain JSON for planners (docs/policies.md): all tables, with ``offload_stats`` of each."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": trace.name,
        "tables": {
            c.name: {
                "num_embeddings": c.num_embeddings,
                "footprint": c.footprint,
                "uniques_per_batch": c.uniques,
                "accesses_per_batch": c.accesses,
                **c.offload_stats(bins),
            }
            for c in curves
        },
    }
