"""Miss-ratio curves: what share of a batch's unique rows a memory of a given number of rows does not hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import boxcox1p

from tierstore.planner.checks import require
from tierstore.rounds import FloatArray

_CELLS = 400
_POINTS = 36


@dataclass(frozen=True, eq=False)
class MissCurve:
    """A convex, non-increasing curve through (``rows[i]``, ``misses[i]``), float64, from 0 rows on.

    A table can reach every point of the lower convex hull of its measured curve, since the planner spends
    bytes along the hull only; between points the curve is linear, behind the last one constant.
    """

    rows: FloatArray
    misses: FloatArray

    def at(self, rows: float) -> float:
        """Return the miss ratio of a memory of ``rows`` rows."""
        return float(np.interp(rows, self.rows, self.misses))

    @classmethod
    def through(cls, rows: Sequence[float], misses: Sequence[float], table_rows: int) -> MissCurve:
        """Return the hull of measured points; all ``table_rows`` rows in memory miss nothing, 0 rows all.

        Raises ConfigError for points that are no miss-ratio curve.
        """
        x, y = np.asarray(rows, dtype=np.float64), np.asarray(misses, dtype=np.float64)
        pairs = x.ndim == 1 and x.shape == y.shape and len(x)
        require(pairs, "a miss-ratio curve needs as many miss ratios as sizes, and one at least")
        possible = (np.isfinite(x) & (x >= 0) & (y >= 0) & (y <= 1)).all()
        require(possible, "a miss-ratio curve needs sizes of 0 rows or more, and miss ratios from 0 to 1")
        order = np.argsort(x, kind="stable")
        inside = x[order] < table_rows
        x = np.concatenate([[0.0], x[order][inside], [float(table_rows)]])
        y = np.concatenate([[1.0], y[order][inside], [0.0]])
        return cls(*lower_hull(x, np.minimum.accumulate(y)))


@dataclass(frozen=True)
class Popularity:
    """P(k-th most popular of N rows) ~ (k + q)^-s.

    Unless said otherwise, as one batch of Meta's published tables is on average (docs/planner.md).
    """

    s: float = 1.1
    q: float = 100.0

    def __post_init__(self) -> None:
        known = 0 <= self.s <= 10 and 0 <= self.q < math.inf
        require(known, f"popularity needs 0 <= s <= 10 and q >= 0, not s={self.s!r}, q={self.q!r}")

    def demand(self, rows: int, accesses: float) -> tuple[float, MissCurve]:
        """Return the (expected different rows, misses per different row) of ``accesses`` independent draws.

        The memory holds the most popular rows. That is what exact frequency counts reach; next-use eviction
        does better.
        """
        return _demand(self.s, self.q, rows, accesses)


@lru_cache(maxsize=8192)
def _demand(s: float, q: float, rows: int, accesses: float) -> tuple[float, MissCurve]:
    edges = np.unique(np.floor(np.geomspace(1, rows + 1, _CELLS)))  # of cells of ranks, the first of one each
    counts = np.diff(edges)
    mass = np.maximum(np.diff(boxcox1p((edges - 1) / (q + 0.5), 1 - s)), 0)  # integral of (x + q)^-s, scaled
    expected = counts * -np.expm1(-accesses * mass / mass.sum() / counts)
    unique = float(expected.sum())
    left = np.concatenate([[1.0], 1 - np.cumsum(expected) / unique])
    left[-1] = 0.0
    x, y = edges - edges[0], np.maximum(left, 0)
    # The curve is convex, so points of it are corners of their hull but for rounding.
    keep = np.unique(np.linspace(0, len(x) - 1, _POINTS).astype(int))
    return unique, MissCurve(*lower_hull(x[keep], y[keep]))


def lower_hull(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the corners of the lower convex hull of points; ``x`` does not fall."""
    keep: list[int] = []
    for c in range(len(x)):
        if keep and x[c] == x[keep[-1]]:
            if y[c] >= y[keep[-1]]:
                continue
            keep.pop()
        while len(keep) > 1:  # a corner is below the line from the one before it to the next one
            a, b = keep[-2:]
            if (y[b] - y[a]) * (x[c] - x[a]) < (y[c] - y[a]) * (x[b] - x[a]):
                break
            keep.pop()
        keep.append(c)
    return x[keep], y[keep]
