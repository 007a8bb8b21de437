"""How rows come from the SSD on the CPU: those of many batches in one call, neighbours in one read.

The runtime reads ahead as many batches at a time as a block has room for (docs/design.md). The store goes
through a call's rows in the order of their places, and reads on over a gap that costs less than another read.
"""

from __future__ import annotations

import math

import numpy as np

from tierstore.placement import record_bytes
from tierstore.planner.allocate import Allocation
from tierstore.planner.costs import HELD_BYTES_PER_ROW, READ_AHEAD_BYTES, Problem, read_bytes
from tierstore.planner.curves import Floats
from tierstore.planner.topology import Topology

MERGED_READ_BYTES = 64 << 10  # the largest read that brings several rows
_FILE_BYTES = 2.0  # per live byte: compaction leaves as many superseded rows as live ones
_BLOCKS = 2  # of a row size


def saved_seconds(problem: Problem, caches: Allocation, misses: Floats) -> Floats:
    """Return what merged reads save each host's drives per step, against one read per row: (hosts,).

    ``misses``: rows per step that each shard reads from the SSD.
    """
    topology, work = problem.topology, problem.work
    saved = np.zeros(topology.hosts)
    if not topology.one_fetcher or work.rows_per_read is not None:
        return saved
    sizes, held, stored = caches.field("row_bytes").astype(int), caches.hbm_rows * caches.slot, caches.stored
    for r in range(topology.world_size):
        here = caches.rank == r
        layouts = np.unique(sizes[here & (caches.slot > 0)]).tolist()
        for size in layouts:
            tier = here & (sizes == size)
            lacking, record = float(misses[tier].sum()), record_bytes(size)
            if not lacking:
                continue
            block = min(READ_AHEAD_BYTES / len(layouts), 2 * float(held[tier].sum())) / _BLOCKS
            room = block / (size + HELD_BYTES_PER_ROW) / lacking
            batches = max(1, math.floor(min(room, work.window / 2 if work.window else room)))
            files = _FILE_BYTES * record * float(caches.rows[tier & stored].sum())
            alone = lacking * topology.read_seconds(read_bytes(record))
            merged = read_seconds(topology, lacking * batches, record, files) / batches
            saved[topology.host_of(r)] += max(0.0, alone - merged)
    return saved


def read_seconds(topology: Topology, rows: float, record: int, stored: float) -> float:
    """Return the seconds of the drives for one call of the store.

    It reads ``rows`` records of ``record`` bytes at random places among ``stored`` bytes of them.
    """
    block = read_bytes(record)
    small, large = topology.read_seconds(block), topology.read_seconds(MERGED_READ_BYTES)
    per_byte = max((large - small) / (MERGED_READ_BYTES - block), 1e-15)
    each = max(small - per_byte * block, 1e-15)
    gap = min(each / per_byte, MERGED_READ_BYTES - block)
    # Places are random, so distances between neighbours are distributed exponentially. A read goes on to the
    # next row while that is within the gap (`on`: how likely, `step`: how far then), up to the largest read.
    density, reach = max(rows, 1e-9) / max(stored, 1.0), gap + block
    on = -math.expm1(-density * reach)
    step = 1 / density - reach * (1 - on) / on
    most = 1 + (MERGED_READ_BYTES - block) / step
    together = (1 - on**most) / (1 - on) if on < 1 else most
    return rows / together * (each + per_byte * (block + step * (together - 1)))
