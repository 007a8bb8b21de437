"""How rows come from the SSD: those of many announced batches in one call of the store, neighbours in one
read.

The runtime reads ahead as many batches at a time as a block has room for (docs/design.md). The store goes
through a call's rows in the order of their places, and reads on over a gap that costs less than another read.
Rows that leave memory and come back within the window are kept, not read; their share is not known here.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tierstore.planner.allocate import Allocation
from tierstore.planner.costs import (
    HELD_BYTES_PER_ROW,
    MERGED_READ_BYTES,
    MOST_FILE_BYTES,
    READ_AHEAD_BYTES,
    STORE_SLACK,
    Workload,
    read_bytes,
    record_bytes,
)
from tierstore.planner.topology import Topology

_BLOCKS = 2  # of a row size
_CHANGED = 1.02  # below, planning again is not worth its while


def with_reading(topology: Topology, work: Workload, caches: Allocation) -> Workload:
    """``work`` with its ``rows_per_read`` and ``read_waits`` for such caches; ``work`` itself where they are
    not known for the device, or hardly matter."""
    if not topology.one_fetcher or caches.missing or not caches.stored.any():
        return work
    misses = caches.field("unique") * caches.reads()
    held = caches.hbm_rows * caches.slot
    sizes, rank = caches.field("row_bytes").astype(np.int64), caches.rank
    alone = together = waited = 0.0
    for r in np.unique(rank).tolist():
        groups = np.unique(sizes[rank == r]).tolist()
        files = _file_bytes(work, caches, rank == r)
        for size in groups:
            tier = (rank == r) & (sizes == size)
            lacking = float(misses[tier].sum())
            if not lacking or not caches.stored[tier].any():
                continue
            room = min(READ_AHEAD_BYTES / len(groups), 2 * float(held[tier].sum()))
            room /= _BLOCKS * (size + HELD_BYTES_PER_ROW)
            batches = 1.0
            if lacking <= room:
                batches = room / lacking if work.window is None else min(room / lacking, work.window / 2)
                batches = max(1.0, math.floor(batches))
            record = record_bytes(size)
            # The policy may hold more of one table than planned, so all rows of the tier are there.
            stored = record * float(caches.rows[tier].sum()) * files
            seconds = read_seconds(topology, lacking * batches, record, stored) / batches
            alone += lacking * topology.read_seconds(read_bytes(record))
            together += seconds
            waited += seconds if lacking > room else 0.0
    if not together:
        return work
    each = alone / together if work.rows_per_read is None else work.rows_per_read
    if max(each, 1 / each) < _CHANGED and waited < (_CHANGED - 1) * together:
        return work
    return replace(work, rows_per_read=max(1.0, each), read_waits=waited / together)


def _file_bytes(work: Workload, caches: Allocation, here: NDArray[np.bool_]) -> float:
    """Bytes of a rank's files per live byte, as they are in the long run: what was superseded stays until it
    is as much as what is live, or the room that the plan gives is used up."""
    live = float((caches.field("ssd_bytes") * caches.stored)[here].sum()) / work.disk_slack
    return min(MOST_FILE_BYTES, work.disk_slack + STORE_SLACK / live) if live else 1.0


def read_seconds(topology: Topology, rows: float, record: int, stored: float) -> float:
    """Seconds of the drives for one call that reads ``rows`` records of ``record`` bytes at random places
    among ``stored`` bytes of them."""
    block = read_bytes(record)
    small, large = topology.read_seconds(block), topology.read_seconds(MERGED_READ_BYTES)
    per_byte = max((large - small) / (MERGED_READ_BYTES - block), 1e-15)
    each = max(small - per_byte * block, 1e-15)
    gap = min(each / per_byte, MERGED_READ_BYTES - block)
    # Places are random, so distances between neighbours are distributed exponentially. A read goes on to the
    # next row while that is within the gap (`on`: how likely, `step`: how far then), up to the largest read.
    density, reach = rows / max(stored, 1.0), gap + block
    on = -math.expm1(-density * reach)
    step = 1 / density - reach * (1 - on) / on
    most = 1 + (MERGED_READ_BYTES - block) / step
    together = (1 - on**most) / (1 - on) if on < 1 else most
    return rows / together * (each + per_byte * (block + step * (together - 1)))
