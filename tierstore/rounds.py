"""What rounds of reading ahead cost the drives, how long windows are, and which memory reading ahead gets.

Reading ahead goes round the places of a store's rows, and reads at each place what the batches of a horizon
lack there (docs/design.md). A read goes on over a gap that costs less than another read. An automatic window
ends where its batches have taken what the rows leave that it asks for at once. The runtime and the planner
choose by this model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

MERGED_READ_BYTES = 64 << 10  # the largest read that brings several rows
GAP_BYTES = 8 << 10  # cost as much as a request does, until a store has measured its device
# Compaction leaves as many superseded rows as live ones, in files from all live to all superseded. Around a
# live row two thirds are live: the integral of x² from 0 to 1 over the integral of x.
FILE_BYTES = 1.5  # per live byte
BLOCK = 4096
_RECORD_HEADER = 16
HORIZON_ROWS, FILLED = 1.5, 0.9
"""Rows that the batches of the horizon lack together, per row that there is room for: at most; and the part
of the room that they fill on average.

With n batches in the horizon that lack m rows each, and rounds of r batches, m·(n - r/2) rows wait for their
batches on average.
"""
ROUND, SLACK = 15 / 16, 1.5
"""Batches that a round takes, per batch of the horizon; and batches that it takes fewer, at least. The rest
is the time that a read may take: rows are read while the batches before theirs are planned and moved."""
MAX_WINDOW = 1024
WINDOW_BYTES = 16 << 20
"""Bytes that the batches of a window, and their ids, take beside the memory for rows read ahead."""
WINDOW_ROWS = 1.9
"""Distinct rows in the window per row that there is room for, from which on a longer window brings nothing:
some of the rows are in the tiers above."""
ENTRIES = 1.25
"""Entries of the sweep, which goes round the places, per row that there is room for."""
BYTES_PER_ROW = 16 * 5 / 3 * 17 / 16  # of a distinct row in the window's index
MANY = 64  # batches whose distinct rows are known beside those of one
_SIZES = 11  # that are compared, each the next one's over the square root of 2
_GAIN = 0.02  # for less than this part of the cost a size is not changed


@dataclass(frozen=True)
class Ahead:
    """The batches of a prefetch and what they ask for; arrays are by table, or by row layout.

    ``batch_bytes``: of one batch and its lookups. ``unique``, ``unique_of_many``: distinct rows of one batch,
    of ``many`` batches. ``rows``: all rows. ``held_bytes``: of a row that is read ahead, its index included.
    ``read_ahead``: bytes. ``own``: bytes of a window that are not taken from these.
    """

    batch_bytes: float
    unique: FloatArray
    unique_of_many: FloatArray
    rows: FloatArray
    held_bytes: FloatArray
    read_ahead: float
    many: float = MANY
    own: float = WINDOW_BYTES

    def _distinct(self, batches: FloatArray) -> FloatArray:
        """Return the distinct rows of (n,) batches, by a power law through one and ``many``: (n, tables)."""
        growth = np.log(self.unique_of_many / self.unique) / math.log(self.many)
        return np.minimum(self.rows, self.unique * batches[:, None] ** growth)

    def beyond(self, batches: FloatArray) -> FloatArray:
        """Return the bytes that windows take of the memory for rows read ahead if nothing stops them."""
        taken = batches * self.batch_bytes + BYTES_PER_ROW * self._distinct(batches).sum(axis=1)
        return np.maximum(0.0, taken - self.own)

    def automatic(self) -> int:
        """Return the batches of an automatic window."""
        batches = np.arange(1.0, MAX_WINDOW + 1)
        asked = self._distinct(batches) @ self.held_bytes / WINDOW_ROWS
        free = np.clip(self.read_ahead - asked, 0.0, self.read_ahead / 2)
        return max(1, int((self.beyond(batches) <= free).sum()))

    def held_share(self, window: int) -> float:
        """Return the part of the memory that a window leaves to rows: half of it at least."""
        if not self.read_ahead:
            return 0.0
        return max(0.5, 1 - float(self.beyond(np.array([float(window)]))[0]) / self.read_ahead)

    def best(self, window: int | None, misses: Misses, device: Stored, now: int | None = None) -> int:
        """Return the bytes, of ``read_ahead``, that save the drives most; a memory tier could have the rest.

        ``window``: batches that are known ahead; None: an automatic window. ``misses(more)``: rows that a
        batch lacks if a memory tier has ``more`` bytes. ``now``: see :func:`best_size`.
        """
        held = float(self.unique @ self.held_bytes / self.unique.sum())

        def cost(size: float) -> float:
            ahead = replace(self, read_ahead=size)
            known = ahead.automatic() if window is None else window
            room = ahead.held_share(known) * size / held
            return batch_cost(misses(self.read_ahead - size), known, room, *device)

        return best_size(int(self.read_ahead), cost, now)


Misses = Callable[[float], float]
Stored = tuple[int, float]
"""The bytes of a record, and of all records of the store."""


Cost = tuple[float, float]
"""What a request costs, and each of its bytes."""
IN_BYTES: Cost = GAP_BYTES, 1.0


def horizon_batches(room: float, lacking: float) -> float:
    """Return the most batches that rows are read for, with room for ``room`` rows, of which a batch lacks
    ``lacking``."""
    held = room / lacking
    return max(1.0, min(HORIZON_ROWS * held, 2 * FILLED * held - SLACK))


def round_batches(window: float, room: float, lacking: float) -> float:
    """Return the batches of a round, with room for ``room`` rows, of which a batch lacks ``lacking``."""
    batches = min(window, horizon_batches(room, lacking))
    return max(1.0, min(ROUND * batches, batches - SLACK))


def record_bytes(row_bytes: int) -> int:
    """Return the bytes that a row of ``row_bytes`` bytes takes in the native store."""
    return -(-(_RECORD_HEADER + row_bytes) // 8) * 8


def read_bytes(record: int) -> int:
    """Return the bytes that the native store reads for one record: the blocks of 4 KiB that it lies in.

    In frames of one block no record crosses the end. In larger frames records lie anywhere
    (docs/reference/formats.md).
    """
    return BLOCK if record <= BLOCK and BLOCK % record <= BLOCK // 50 else BLOCK + record - 1


def merged_reads(gap: float, rows: float, record: int, stored: float) -> tuple[float, float]:
    """Return the (requests, bytes) of a round's reads, which go on over ``gap`` bytes at most.

    The round reads ``rows`` records of ``record`` bytes at random places among ``stored`` bytes of them.
    """
    block = read_bytes(record)
    # Places are random, so distances between neighbours are distributed exponentially. A read goes on to the
    # next row while that is within reach (`on`: how likely, `step`: how far then), up to the largest read.
    # Reads begin and end with blocks, so within reach are the gap's blocks, one more, and half a block.
    density, reach = max(rows, 1e-9) / max(stored, 1.0), gap // BLOCK * BLOCK + block + BLOCK / 2
    on = -math.expm1(-density * reach)
    step = 1 / density - reach * (1 - on) / on
    most = 1 + (MERGED_READ_BYTES - block) / step
    together = (1 - on**most) / (1 - on) if on < 1 else most
    return rows / together, rows / together * (block + step * (together - 1))


def batch_cost(
    lacking: float, window: float, room: float, record: int, stored: float, drive: Cost = IN_BYTES
) -> float:
    """Return what the reads for one batch cost the drives, in bytes or in seconds, as ``drive`` has it."""
    if lacking <= 0:
        return 0.0
    count, (request, byte) = round_batches(window, room, lacking), drive
    gap = min(request / byte, MERGED_READ_BYTES - read_bytes(record))
    requests, size = merged_reads(gap, lacking * count, record, stored)
    return (requests * request + size * byte) / count


def best_size(most: int, cost: Callable[[float], float], now: int | None = None) -> int:
    """Return which part of ``most`` bytes to give to reading ahead: the least with which a batch costs little
    more than with the best part.

    ``cost(size)``: what a batch costs if reading ahead has ``size`` bytes. If a memory tier has the rest, one
    more byte saves as much here as there at the least cost. ``now``: the present size, which stays where
    another one saves next to nothing.
    """
    sizes = [int(most / 2 ** (i / 2)) for i in range(_SIZES)]
    costs = [cost(size) for size in sizes]
    least = min(costs)
    if now is not None and least > (1 - _GAIN) * cost(now):
        return now
    return min(size for size, each in zip(sizes, costs, strict=True) if each <= (1 + _GAIN) * least)
