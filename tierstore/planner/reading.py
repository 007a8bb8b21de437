"""How rows come from the SSD: the batches that are known ahead, and those of many read together.

The runtime goes round the places of a store's rows, and reads at each place what the batches of a horizon
lack there (docs/design.md). It reads on over a gap that costs less than another read. An automatic window
(:mod:`tierstore.pipeline.prefetch`) ends where its batches have taken what the rows leave that it asks for at
once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tierstore.planner.curves import Floats
from tierstore.planner.topology import Topology

MERGED_READ_BYTES = 64 << 10  # the largest read that brings several rows
# Compaction leaves as many superseded rows as live ones, in files from all live to all superseded. Around a
# live row two thirds are live: the integral of x² from 0 to 1 over the integral of x.
FILE_BYTES = 1.5  # per live byte
_BLOCK = 4096
# Tests compare these with the runtime.
HORIZON_ROWS = 1.5  # rows that the batches of the horizon lack together, per row that there is room for
ROUND = 15 / 16  # batches that a round takes, per batch of the horizon
MAX_WINDOW = 1024
WINDOW_BYTES = 16 << 20  # of the window, beside the memory for rows read ahead
WINDOW_ROWS = 1.9  # distinct rows of a window per row that it asks for at once
HELD_BYTES_PER_ROW = 13 + 8 * 2 + WINDOW_ROWS * 16  # of a row that is read ahead, beside its bytes

BYTES_PER_ID, BYTES_PER_BAG = 24, 16  # of a batch and its lookup; measured
BYTES_PER_ROW = 16 * 5 / 3 * 17 / 16  # of a distinct row in the window's index
MANY = 64  # batches whose distinct rows the model asks popularity for


@dataclass(frozen=True)
class Ahead:
    """The batches of one rank and what they ask for; arrays are by table.

    ``batch_bytes``: of one batch and its lookups. ``unique``, ``unique_of_many``: distinct rows of one batch,
    of MANY batches. ``rows``: all rows. ``held_bytes``: of a row that is read ahead, its index included.
    ``read_ahead``: bytes.
    """

    batch_bytes: float
    unique: Floats
    unique_of_many: Floats
    rows: Floats
    held_bytes: Floats
    read_ahead: float

    def _distinct(self, batches: Floats) -> Floats:
        """Return the distinct rows of (n,) batches, by a power law through one and MANY: (n, tables)."""
        growth = np.log(self.unique_of_many / self.unique) / math.log(MANY)
        return np.minimum(self.rows, self.unique * batches[:, None] ** growth)

    def beyond(self, batches: Floats) -> Floats:
        """Return the bytes that windows take of the memory for rows read ahead if nothing stops them."""
        taken = batches * self.batch_bytes + BYTES_PER_ROW * self._distinct(batches).sum(axis=1)
        return np.maximum(0.0, taken - WINDOW_BYTES)

    def automatic(self) -> int:
        """Return the batches of an automatic window."""
        batches = np.arange(1.0, MAX_WINDOW + 1)
        asked = self._distinct(batches) @ self.held_bytes / WINDOW_ROWS
        free = np.clip(self.read_ahead - asked, 0.0, self.read_ahead / 2)
        return max(1, int((self.beyond(batches) <= free).sum()))


def round_batches(window: float, room: float, lacking: float) -> float:
    """Return the batches of a round, with room for ``room`` rows, of which a batch lacks ``lacking``."""
    return max(1.0, ROUND * min(window, HORIZON_ROWS * room / lacking))


def read_bytes(record: int) -> int:
    """Return the bytes that the native store reads for one record: the blocks of 4 KiB that it lies in.

    In frames of one block no record crosses the end. In larger frames records lie anywhere
    (docs/reference/formats.md).
    """
    return _BLOCK if record <= _BLOCK and _BLOCK % record <= _BLOCK // 50 else _BLOCK + record - 1


def read_seconds(topology: Topology, rows: float, record: int, stored: float) -> float:
    """Return the seconds of the drives for one round of the store.

    It reads ``rows`` records of ``record`` bytes at random places among ``stored`` bytes of them.
    """
    block = read_bytes(record)
    small, large = topology.read_seconds(block), topology.read_seconds(MERGED_READ_BYTES)
    per_byte = max((large - small) / (MERGED_READ_BYTES - block), 1e-15)
    each = max(small - per_byte * block, 1e-15)
    requests, size = merged_reads(min(each / per_byte, MERGED_READ_BYTES - block), rows, record, stored)
    return requests * each + per_byte * size


def merged_reads(gap: float, rows: float, record: int, stored: float) -> tuple[float, float]:
    """Return the (requests, bytes) of a round's reads, which go on over ``gap`` bytes at most.

    ``rows``, ``record``, ``stored``: see :func:`read_seconds`.
    """
    block = read_bytes(record)
    # Places are random, so distances between neighbours are distributed exponentially. A read goes on to the
    # next row while that is within reach (`on`: how likely, `step`: how far then), up to the largest read.
    # Reads begin and end with blocks, so within reach are the gap's blocks, one more, and half a block.
    density, reach = max(rows, 1e-9) / max(stored, 1.0), gap // _BLOCK * _BLOCK + block + _BLOCK / 2
    on = -math.expm1(-density * reach)
    step = 1 / density - reach * (1 - on) / on
    most = 1 + (MERGED_READ_BYTES - block) / step
    together = (1 - on**most) / (1 - on) if on < 1 else most
    return rows / together, rows / together * (block + step * (together - 1))
