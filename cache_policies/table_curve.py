"""Figures of each table for planners: its miss-ratio curve and how many rows a batch looks up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache_policies.reuse import ReuseCurve

FORMAT = "tierstore.table_curves"
VERSION = 1
_POINTS = 40  # sizes per curve


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
        """Count the uses that hit once the cache has the rows up to each bin's upper edge.

        The counts are float64, of bins of equal width over ``num_embeddings``. No bin has the first uses,
        which miss at any size.
        """
        edges = np.linspace(0, self.num_embeddings, bins + 1)
        missed = self.curve.misses(np.floor(edges))
        return np.maximum(0.0, missed[:-1] - missed[1:])

    def cacheability(self, bins: int = 100) -> float:
        """Return the area under the miss-ratio curve over the table's size, without first uses.

        0 means that all reuse is at once.
        """
        histogram = self.reuse_histogram(bins)
        if not histogram.sum():
            return 0.0
        return float((1 - np.cumsum(histogram) / histogram.sum()).mean())

    def offload_stats(self, bins: int = 100) -> dict[str, Any]:
        """Return the arguments of torchrec's ``EmbeddingOffloadStats``.

        torchrec's scale-up proposer sizes caches by them. The caller makes a tensor of ``mrc_hist_counts``.
        """
        return {
            "cacheability": self.cacheability(bins),
            "expected_lookups": round(self.uniques),
            "mrc_hist_counts": self.reuse_histogram(bins).tolist(),
            "height": self.num_embeddings,
        }

    def points(self) -> dict[str, list[float]]:
        """Return LRU misses per unique row of a batch at sizes up to the rows used."""
        sizes = np.unique(np.geomspace(1, max(1, self.footprint), _POINTS).round().astype(np.int64))
        capacity = self.curve.capacity_miss_ratio(sizes)
        return {
            "sizes_rows": sizes.tolist(),
            "unique_miss_ratio": np.clip(self.curve.unique_miss_ratio(sizes), 0, 1).tolist(),
            "capacity_miss_ratio": np.clip(capacity, 0, 1).tolist(),
        }


def planner_document(source: str, curves: Iterable[TableCurve], bins: int = 100) -> dict[str, Any]:
    """Return the plain JSON of the used tables that ``tierstore plan --stats`` reads.

    Each table has its ``offload_stats`` (docs/reference/policies.md).
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "tables": {
            c.name: {
                "num_embeddings": c.num_embeddings,
                "footprint": c.footprint,
                "unique_rows": c.uniques,
                "accesses": c.accesses,
                **c.points(),
                **c.offload_stats(bins),
            }
            for c in curves
            if c.accesses
        },
    }
