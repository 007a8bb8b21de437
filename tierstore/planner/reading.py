"""How rows come from the SSD: those of many announced batches in one call of the store, neighbours in one
read.

The runtime reads ahead as many batches at a time as a block has room for (docs/design.md). The store goes
through a call's rows in the order of their places, and reads on over a gap that costs less than another read.
Rows that leave memory and come back within the window are kept, not read; their share is not known here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
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
    ShardCost,
    Workload,
    read_bytes,
    record_bytes,
)
from tierstore.planner.curves import Floats
from tierstore.planner.topology import Topology

_BLOCKS = 2  # of a row size
_POINTS, _AGES = 100, 24  # of a shard's curve; of all shards of a row size
_CHANGED = 1.02  # below, planning again is not worth its while


def with_reading(topology: Topology, work: Workload, caches: Allocation) -> Workload:
    """``work`` with its ``rows_per_read`` and ``read_waits`` for such caches; ``work`` itself where they are
    not known for the device, or hardly matter."""
    if not topology.one_fetcher or caches.missing or not caches.stored.any():
        return work
    misses = caches.field("unique") * caches.reads()
    held = caches.hbm_rows * caches.slot
    sizes, rank = caches.field("row_bytes").astype(np.int64), caches.rank
    need, given = caches.ssd_need(), caches.ssd_bytes()
    alone = together = waited = 0.0
    for r in np.unique(rank).tolist():
        groups = np.unique(sizes[rank == r]).tolist()
        files = _file_bytes(work, float(need[rank == r].sum()), float(given[rank == r].sum()))
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
            shards = np.flatnonzero(tier)
            seconds = call_seconds(topology, caches, shards, lacking * batches, record, files) / batches
            alone += lacking * topology.read_seconds(read_bytes(record))
            together += seconds
            waited += seconds if lacking > room else 0.0
    if not together:
        return work
    each = alone / together if work.rows_per_read is None else work.rows_per_read
    if max(each, 1 / each) < _CHANGED and waited < (_CHANGED - 1) * together:
        return work
    return replace(work, rows_per_read=max(1.0, each), read_waits=waited / together)


def _file_bytes(work: Workload, need: float, given: float) -> float:
    """Bytes of a rank's files per live byte, as they are in the long run: what was superseded stays until it
    is as much as what is live, or the room that the plan gives is used up. ``need``, ``given``: bytes of the
    SSD that the rank's shards take at least, and have."""
    live = need / work.disk_slack
    return min(MOST_FILE_BYTES, (given + STORE_SLACK) / live) if live else 1.0


def call_seconds(
    topology: Topology, caches: Allocation, shards: NDArray[np.int64], rows: float, record: int, files: float
) -> float:
    """Seconds of the drives for one call that reads ``rows`` records of ``record`` bytes that ``shards``, of
    one rank and row size, lack. ``files``: their store's bytes per live byte."""
    live, asked, stored = _by_age(caches, shards, files)
    sizes = record * live * stored
    return sum(
        read_seconds(topology, rows * part, record, size)
        for part, size in zip(asked.tolist(), sizes.tolist(), strict=True)
    )


def _by_age(caches: Allocation, shards: NDArray[np.int64], files: float) -> tuple[Floats, Floats, Floats]:
    """The store's rows of ``shards``, (ages,), by how long ago they left memory: live rows, the
    share of all misses that asks for them, and records in the files per live one.

    Rows are written as they leave, so that they lie by age. A memory for x rows loses what was not used for
    t(x) steps and grows by its misses, dx/dt = U·m(x) (Denning and Schwartz: Properties of the working-set
    model, 1972), so that m(x) - m(x + dx) of a step's rows are of that age. Of the records that were written
    so long ago, m(x) / m(memory) are live still; compaction, which keeps all files at ``files`` records per
    live row, works where least are. Rows in memory have an old record there, too.
    """
    live, misses = _ages([(caches.costs[i], float(caches.memory_rows[i])) for i in shards])
    rows, left = float(caches.rows[shards].sum()), (misses[1:] + misses[:-1]) / 2 / misses[0]
    records = 1 / np.maximum(left, 1e-9)
    newer = np.concatenate([[0.0], np.cumsum(live * records)[:-1]])
    others = np.maximum(rows - np.concatenate([[0.0], np.cumsum(live)[:-1]]), 1e-9)
    most = (files * rows - newer) / others  # if what is older is compacted
    compacted = most <= records
    if compacted.any():
        first = int(compacted.argmax())
        records[first:] = most[first]
    return live, -np.diff(misses) / max(misses[0] - misses[-1], 1e-12), records


def _ages(shards: Sequence[tuple[ShardCost, float]]) -> tuple[Floats, Floats]:
    """Rows of the store between one age and the next (ages,), and misses per step of rows that are older than
    each, (ages + 1,), of shards and the rows of them in memory."""
    grown = []
    for (cost, held), count in Counter(shards).items():
        rows = held + (cost.rows - held) * np.concatenate([[0.0], np.geomspace(1e-3, 1, _POINTS)])
        missed = cost.unique * np.interp(rows, cost.curve.rows, cost.curve.misses)
        middle = np.maximum((missed[1:] + missed[:-1]) / 2, 1e-9)
        age = np.concatenate([[0.0], np.cumsum(np.diff(rows) / middle)])
        grown.append((age, count * (rows - held), count * missed))
    first, last = min(age[1] for age, *_ in grown), max(age[-1] for age, *_ in grown)
    ages = np.concatenate([[0.0], np.geomspace(max(first, 1e-3), max(last, 1.0), _AGES)])
    rows, missed = (sum(np.interp(ages, each[0], each[i]) for each in grown) for i in (1, 2))
    return np.diff(rows), np.asarray(missed)


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
    density, reach = max(rows, 1e-9) / max(stored, 1.0), gap + block
    on = -math.expm1(-density * reach)
    step = 1 / density - reach * (1 - on) / on
    most = 1 + (MERGED_READ_BYTES - block) / step
    together = (1 - on**most) / (1 - on) if on < 1 else most
    return rows / together * (each + per_byte * (block + step * (together - 1)))
