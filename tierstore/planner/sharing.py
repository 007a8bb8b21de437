"""What shards miss that share their slots: a policy, not the plan, divides these slots among tables.

A plan gives each shard rows, and the rows of all shards of one row layout are the slots that they share.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierstore.planner.allocate import Allocation, corners
from tierstore.planner.curves import MissCurve
from tierstore.rounds import FloatArray

_HALVINGS = 60
_LONGEST = 1e12  # batches that a row may stay in host memory


def shared_misses(caches: Allocation, groups: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Return the misses of device memory, and of device and host memory together, per unique row of each
    shard: float64 (shards,). ``groups``: numbers from 0 on, equal for shards that share slots."""
    held = _held(caches, groups)
    return caches.misses(held), _missed_by_both(caches, groups, held)


def _held(caches: Allocation, groups: NDArray[np.int64]) -> FloatArray:
    """Return the rows of each shard in device memory.

    Shards keep their rows for about as many batches each. One that keeps c rows asks for m(c) other rows per
    batch, so c grows by m(c) per batch (Denning and Schwartz, "Properties of the working-set model", CACM
    1972). So each holds what it reaches in the same number of batches.
    """
    held = caches.hbm_rows.copy()
    for group in np.flatnonzero(np.bincount(groups) > 1):
        here = np.flatnonzero(groups == group)
        curves = [caches.costs[i].curve for i in here]
        times = [_times(curve, caches.costs[i].unique) for curve, i in zip(curves, here, strict=True)]
        every = np.unique(np.concatenate(times))
        sizes = [np.interp(every, time, curve.rows) for time, curve in zip(times, curves, strict=True)]
        reached = np.interp(held[here].sum(), np.sum(sizes, axis=0), every)
        held[here] = [np.interp(reached, every, size) for size in sizes]
    return held


def _times(curve: MissCurve, unique: float) -> FloatArray:
    """Return after how many batches a table alone reaches each size of its curve."""
    asked = np.maximum((curve.misses[1:] + curve.misses[:-1]) / 2 * unique, 1e-12)
    return np.append(0.0, np.cumsum(np.diff(curve.rows) / asked))


def _missed_by_both(caches: Allocation, groups: NDArray[np.int64], held: FloatArray) -> FloatArray:
    """Return the misses per unique row of each shard where host memory holds other rows than ``held``.

    A row that comes to host memory has lost the count of its uses, so the row that came first leaves first.
    The row stays as long as rows of the other shards. A row that the batches use at a rate r is used within t
    batches with probability 1 - exp(-r·t) (Che, Tung and Wang, "Hierarchical Web caching systems", JSAC
    2002). A curve of misses says of how many rows the rate is which: its slope.
    """
    shard, rows, rate = _rates(caches, held)
    of, count = groups[shard], int(groups.max()) + 1
    room = np.bincount(groups, caches.memory_rows - caches.hbm_rows, count)
    low, high = np.zeros(count), np.full(count, np.log2(_LONGEST))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        used = np.bincount(of, -rows * np.expm1(-rate * (2.0**middle - 1)[of]), count)
        low, high = np.where(used < room, middle, low), np.where(used < room, high, middle)
    missed = np.bincount(shard, rows * rate * np.exp(-rate * (2.0**low - 1)[of]), len(held))
    return missed / np.maximum(caches.field("unique"), 1e-12)


def _rates(caches: Allocation, held: FloatArray) -> tuple[NDArray[np.int64], FloatArray, FloatArray]:
    """Return (shard, rows, uses per batch of each row) for rows of equal rates that are not ``held``."""
    parts = []
    for i, (cost, begin) in enumerate(zip(caches.costs, held.tolist(), strict=True)):
        rows, misses = corners(cost, begin)
        count = np.diff(rows)
        rate = -np.diff(misses * cost.unique) / np.maximum(count, 1e-12)
        parts.append((np.full(len(count), i), count, rate))
    return tuple(np.concatenate(one) for one in zip(*parts, strict=True))  # type: ignore[return-value]
