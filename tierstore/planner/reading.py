"""How rows come from the SSD on the CPU: those of many batches together, neighbours in one read.

The runtime goes round the places of a store's rows, and reads at each place what the batches of a horizon
lack there (docs/design.md). It reads on over a gap that costs less than another read.
"""

from __future__ import annotations

import math

import numpy as np

from tierstore.placement import record_bytes
from tierstore.planner.allocate import Allocation
from tierstore.planner.costs import HELD_BYTES_PER_ROW, Problem, read_bytes
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


def saved_seconds(problem: Problem, caches: Allocation, misses: Floats) -> Floats:
    """Return what merged reads save each host's drives per step, against one read per row: (hosts,).

    ``misses``: rows per step that each shard reads from the SSD.
    """
    topology, work = problem.topology, problem.work
    saved = np.zeros(topology.hosts)
    if not topology.one_fetcher or work.rows_per_read is not None:
        return saved
    sizes, stored = caches.field("row_bytes").astype(int), caches.stored
    table_bytes, ahead = sizes * caches.rows, caches.read_ahead_bytes()
    for r in range(topology.world_size):
        here = (caches.rank == r) & (caches.slot > 0)
        for size in np.unique(sizes[here]).tolist():
            tier = here & (sizes == size)
            lacking, record = float(misses[tier].sum()), record_bytes(size)
            if not lacking:
                continue
            part = float(table_bytes[tier].sum() / table_bytes[here].sum())  # as the runtime divides it
            held = part * problem.held_share * float(ahead[here].sum())
            room = held / (size + HELD_BYTES_PER_ROW)
            batches = round_batches(problem.window, room, lacking)
            files = FILE_BYTES * record * float(caches.rows[tier & stored].sum())
            alone = lacking * topology.read_seconds(read_bytes(record))
            merged = read_seconds(topology, lacking * batches, record, files) / batches
            saved[topology.host_of(r)] += max(0.0, alone - merged)
    return saved


def round_batches(window: float, room: float, lacking: float) -> float:
    """Return the batches of a round, with room for ``room`` rows, of which a batch lacks ``lacking``."""
    return max(1.0, ROUND * min(window, HORIZON_ROWS * room / lacking))


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
