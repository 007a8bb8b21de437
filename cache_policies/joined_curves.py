"""The miss-ratio curve of a table from the curves of its shards of rows.

An LRU cache holds the rows that were used in its last T batches, whatever their shard (Denning, "The working
set model for program behavior", 1968). So a cache of the whole table is one of all shards with the same T. A
cache of c rows of one shard grows by its misses, so T is the sum of 1/misses(c) over its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache_policies.reuse import ReuseCurve
from cache_policies.table_curve import TableCurve

_MOST_SIZES = 4096
_LEAST_MISSES = 1e-9
"""Misses of a shard that every row of it fits: no batch makes it larger."""


def joined_curve(name: str, num_embeddings: int, shards: Sequence[TableCurve]) -> TableCurve:
    """Return the curve of a table whose rows are in ``shards``, which were counted over the same batches."""
    used = [shard for shard in shards if shard.accesses] or list(shards[:1])
    footprint = sum(shard.footprint for shard in used)
    uniques, accesses = (sum(getattr(s, kind) for s in used) for kind in ("uniques", "accesses"))
    curve = used[0].curve if len(used) == 1 else _joined(used, footprint)
    return TableCurve(name, num_embeddings, footprint, uniques, accesses, curve)


def _joined(shards: Sequence[TableCurve], footprint: int) -> ReuseCurve:
    rate = min(1.0, _MOST_SIZES / footprint, *(shard.curve.rate for shard in shards))
    sizes = np.arange(int(np.ceil(footprint * rate)) + 1) / rate
    ages = [_ages(shard) for shard in shards]
    every = np.unique(np.concatenate([age for age, _ in ages]))
    rows = np.sum([np.interp(every, age, held) for age, held in ages], axis=0)
    age_of = np.interp(sizes, rows, every)
    held = [np.interp(age_of, age, held) for age, held in ages]
    missed, accesses = (
        np.sum([_smooth(shard, kind, at) for shard, at in zip(shards, held, strict=True)], axis=0)
        for kind in ("misses", "access_misses")
    )
    counts = [np.maximum(0.0, -np.diff(values)) * rate for values in (missed, accesses)]
    uniques, whole = (sum(getattr(s.curve, kind) for s in shards) for kind in ("uniques", "accesses"))
    return ReuseCurve(
        counts[0], float(missed[-1]) * rate, counts[1], float(accesses[-1]) * rate, uniques, whole, rate
    )


def _ages(shard: TableCurve) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how many batches ago the oldest row of a shard's cache was used, and how many rows it has, for
    caches of all sizes."""
    rows = np.unique(np.linspace(0, max(1, shard.footprint), _MOST_SIZES))
    misses = np.maximum(_smooth(shard, "misses", (rows[:-1] + rows[1:]) / 2), _LEAST_MISSES)
    return np.concatenate([[0.0], np.cumsum(np.diff(rows) / misses)]), rows


def _smooth(shard: TableCurve, kind: str, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return misses at ``sizes``, which need not be whole numbers."""
    below = np.floor(sizes)
    low, high = (getattr(shard.curve, kind)(at) for at in (below, below + 1))
    found: NDArray[np.float64] = low + (high - low) * (sizes - below)
    return found
