"""Access to rows outside of training: reads, overwrites, resets and lists rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.group import TierGroup
from tierstore.cache.pinned_rows import ReadRows, Rows, StayingRows
from tierstore.cache.tiers.protocol import Keys
from tierstore.cache.uninterrupted import uninterrupted
from tierstore.keys import ID_BITS, make_keys, split

_CHUNK = 1 << 16  # rows changed at a time
_PIECE_BYTES = 4 << 20
"""Bytes of rows that are read at a time, so that memory does not grow with the number of ids."""


def find_rows(group: TierGroup, batch: _core.Batch) -> Rows:
    """Return the rows where they are, or a copy if one might leave its place or is not in the fast tier.

    No tier changes, no row is created.
    """
    group.check_open()
    found = None if group.resident is None else group.resident.read(batch)
    if found is None:
        return read_rows(group, batch)
    if found.missing:
        return _with_initial_rows(group, batch, found.slots)
    return StayingRows(group, batch, found.slots, group.fast.rows)


def _with_initial_rows(group: TierGroup, batch: _core.Batch, slots: NDArray[np.int32]) -> ReadRows:
    """Return a copy of the rows at ``slots``, and of the initial rows where these are -1."""
    rows = _core.rows_array(len(slots), group.layout.row_bytes)
    copies, missing = group.layout.view(rows), slots < 0
    here, left = (np.flatnonzero(which).astype(np.int32) for which in (~missing, missing))
    kept = group.fast.rows
    assert isinstance(kept, _core.HostRows)
    copies.copy_rows(here, kept, slots[here])
    group.layout.initialise(copies, left, batch.unique[left])
    return ReadRows(group, batch, rows)


def read_rows(group: TierGroup, batch: _core.Batch) -> ReadRows:
    """Return a copy of the rows wherever they are; no tier changes, no row is created."""
    group.check_open()
    # The main thread never holds the group's lock: a signal handler that commits would wait for ever.
    return uninterrupted(lambda: _read_rows(group, batch))


def _read_rows(group: TierGroup, batch: _core.Batch) -> ReadRows:
    keys = batch.unique
    rows = _core.rows_array(len(keys), group.layout.row_bytes)
    step = _rows_in_piece(group)
    for begin in range(0, max(1, len(keys)), step):
        group.read(keys[begin : begin + step], rows[begin : begin + step])
    return ReadRows(group, batch, rows)


def read_columns(
    group: TierGroup,
    batch_of: Callable[[NDArray[np.int64]], _core.Batch],
    ids: NDArray[np.int64],
    columns: Sequence[slice],
) -> list[NDArray[np.float32]]:
    """Return copies of these columns of the rows of ``ids``, which ``batch_of`` makes batches of. The other
    columns take no room but that of a piece: a row of Adam has twice as much state as weights."""
    found = [np.empty((len(ids), which.stop - which.start), np.float32) for which in columns]
    step = _rows_in_piece(group)
    for begin in range(0, len(ids), step):
        part = slice(begin, begin + step)
        rows = read_rows(group, batch_of(ids[part]))
        values = group.layout.widened(rows.data)
        for into, which in zip(found, columns, strict=True):
            into[part] = values[rows.inverse, which]
    return found


def _rows_in_piece(group: TierGroup) -> int:
    """Return how many rows are read at a time."""
    return max(1, _PIECE_BYTES // group.layout.row_bytes)


def overwrite_rows(
    group: TierGroup, batch: _core.Batch, change: Callable[[NDArray[np.uint8], slice], None]
) -> None:
    """Change rows of one table in place: ``change(rows, part)`` gets rows of ``batch.unique[part]``, (n,
    row_bytes)."""
    keys = batch.unique
    if not len(keys):
        return
    room = group.fast.plan.slots_for(int(keys[0]) >> ID_BITS)
    step = max(1, min(_CHUNK, _rows_in_piece(group), room // 2))
    for begin in range(0, len(keys), step):
        part = slice(begin, min(begin + step, len(keys)))
        chunk = _core.batch_of_unique(np.ascontiguousarray(keys[part]))
        pinned = group.lookup(chunk)
        try:
            rows = _core.rows_array(len(pinned.slots), group.layout.row_bytes)
            group.fast.copy_out(pinned.slots, rows)
            change(rows, part)
            group.mark_updated(pinned)  # mark first: a changed row that is not marked would be lost
            group.fast.copy_in(pinned.slots, rows)
            group.mark_updated(pinned)  # mark again: a flush meanwhile may have seen the old row
        finally:
            pinned.release()


def reset_rows(group: TierGroup, table: int) -> None:
    """Give every row of ``table`` that some tier holds its initial value and state again."""
    for ids in list(touched_ids(group, table)):  # all ids first: writing moves rows
        keys = make_keys(table, ids)

        def change(rows: NDArray[np.uint8], part: slice, keys: NDArray[np.uint64] = keys) -> None:
            group.layout.initialise(group.layout.view(rows), None, keys[part])

        overwrite_rows(group, _core.batch_of_unique(keys), change)


def touched_ids(group: TierGroup, table: int) -> Iterator[NDArray[np.int64]]:
    """Yield the ids of ``table`` that some tier holds, in chunks, each once."""
    group.check_open()
    chunks = _touched_keys(group, table)
    while (keys := uninterrupted(lambda: next(chunks, None))) is not None:
        yield split(keys)[1]


def _touched_keys(group: TierGroup, table: int) -> Iterator[Keys]:
    stack = group.stack
    # While a plan is made, the rows that it has chosen to leave a tier are in no tier's list.
    with group.order.planner(), group.residency_lock:
        group.check_open()
        seen = stack.resident_keys(table)
    if len(seen):
        yield seen
    seen = np.sort(seen)
    for level, tier in enumerate(stack.lasting):
        for keys in tier.keys(table):
            extra = keys[~np.isin(keys, seen, assume_unique=True)] if len(seen) else keys
            for above in stack.lasting[:level]:
                with group.residency_lock:
                    extra = extra[~above.holds(extra)]
            if len(extra):
                yield extra
