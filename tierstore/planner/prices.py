"""Caches by price: what a shard would hold, and miss, if a byte of memory cost so many seconds per step.

At one price for all shards of a memory, what each holds is what the best division of that memory gives it. So
bytes and seconds as functions of the price add up over shards, and a rank or host is known by their sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstore.planner.curves import Floats
from tierstore.planner.options import ShardCost

GRID = 48


@dataclass(frozen=True, eq=False)
class Steps:
    """The best ways to spend bytes on a shard: corners of a convex curve of seconds over bytes, float64.

    ``rows``: held at the corner; ``stored``: False when no row needs the SSD there (only the last corner).
    """

    bytes: Floats
    seconds: Floats
    rows: Floats
    stored: NDArray[np.bool_]

    @property
    def density(self) -> Floats:
        """Seconds saved per byte between corners, falling."""
        gain = self.seconds[:-1] - self.seconds[1:]
        return np.minimum.accumulate(gain / np.maximum(np.diff(self.bytes), 1e-9))


def hbm_steps(cost: ShardCost, for_ssd: bool = False) -> Steps:
    """Return device bytes against seconds of the link, or of the drives if the step waits for these."""
    rows, misses = corners(cost, cost.hbm_floor)
    seconds = misses * cost.unique * (cost.ssd_s if for_ssd else cost.link_s)
    return Steps(rows * cost.slot_bytes, seconds, rows, np.zeros(len(rows), np.bool_))


def memory_steps(cost: ShardCost, at_least: float = 0.0) -> Steps:
    """Return memory bytes (device, host and the store's index) against seconds of the drives.

    They begin at ``at_least`` rows. With all rows in memory the index goes away, so the last corner may come
    early, in one long step that is worth little unless it is taken whole.
    """
    rows, misses = corners(cost, max(cost.memory_floor, at_least))
    seconds = misses * cost.unique * cost.ssd_s
    bytes_ = rows * cost.slot_bytes + cost.index_bytes
    stored = np.ones(len(rows), np.bool_)
    stored[-1] = False
    bytes_[-1] -= cost.index_bytes
    keep = np.arange(len(rows))
    if len(rows) > 2 or (len(rows) == 2 and bytes_[1] <= bytes_[0]):
        # The curve without its last corner is convex: cut across to that corner where it pays to.
        across = np.full(len(rows) - 1, np.inf)
        apart = bytes_[-1] - bytes_[:-1]
        np.divide(seconds[:-1] - seconds[-1], apart, out=across, where=apart > 0)
        along = -np.diff(seconds) / np.maximum(np.diff(bytes_), 1e-9)
        along[-1] = -np.inf
        first = int(np.argmax((across >= along) | (apart <= 0)))
        keep = np.append(keep[: first + (apart[first] > 0)], len(rows) - 1)
    return Steps(bytes_[keep], seconds[keep], rows[keep], stored[keep])


def corners(cost: ShardCost, floor: float) -> tuple[Floats, Floats]:
    """Return the corners of the miss curve behind ``floor`` rows, and the point there."""
    floor = min(floor, float(cost.rows))
    beyond = cost.curve.rows > floor
    rows = np.concatenate([[floor], cost.curve.rows[beyond]])
    return rows, np.concatenate([[cost.curve.at(floor)], cost.curve.misses[beyond]])


@dataclass(frozen=True, eq=False)
class PriceGrid:
    """Falling prices, seconds per byte: the first buys nothing but floors, the last everything."""

    link: Floats
    ssd: Floats


def price_grid(costs: Iterable[ShardCost]) -> PriceGrid:
    """Return prices between the highest and the lowest density of all shards."""
    steps = [(hbm_steps(cost).density, memory_steps(cost).density) for cost in costs]
    link, ssd = zip(*steps, strict=True)
    return PriceGrid(_grid(link), _grid(ssd))


def _grid(densities: Iterable[Floats]) -> Floats:
    values = np.concatenate(list(densities))
    values = values[values > 0]
    if not len(values):
        return np.concatenate([np.full(GRID - 1, np.inf), [-1.0]])
    # Quantiles follow where tables really compete for bytes; the ends are kept.
    inner = np.quantile(np.log(values), np.linspace(1, 0, GRID - 2))
    return np.concatenate([[np.inf], np.exp(inner), [-1.0]])


@dataclass(frozen=True, eq=False)
class Priced:
    """A shard's needs along a :class:`PriceGrid`, each float64 (GRID,).

    ``hbm_bytes`` and ``link_s`` are at prices of link time; ``held_bytes`` (device and host together) and
    ``host`` (3, GRID: bytes of the store's index, seconds and bytes of the drives) at prices of SSD time.
    """

    hbm_bytes: Floats
    link_s: Floats
    held_bytes: Floats
    host: Floats


def priced(cost: ShardCost, grid: PriceGrid) -> Priced:
    """Return what ``cost`` needs at every price."""
    fast, slow = hbm_steps(cost), memory_steps(cost)
    i, j = _bought(fast, grid.link), _bought(slow, grid.ssd)
    stored = slow.stored[j]
    host = np.array([stored * cost.index_bytes, slow.seconds[j], stored * cost.ssd_bytes], dtype=np.float64)
    return Priced(fast.bytes[i], fast.seconds[i], slow.rows[j] * cost.slot_bytes, host)


def _bought(steps: Steps, prices: Floats) -> NDArray[np.int64]:
    """Return the index of the corner reached at each price."""
    return np.searchsorted(-steps.density, -prices * (1 - 1e-12), side="right")
