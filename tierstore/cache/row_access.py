"""Rows of a group read, changed, reset and listed outside training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.pinned_rows import ReadRows
from tierstore.cache.uninterrupted import uninterrupted
from tierstore.keys import make_keys, split

if TYPE_CHECKING:
    from tierstore.cache.group import TierGroup

_CHUNK = 1 << 16  # rows changed at a time
_PIECE_BYTES = (
    4 << 20
)  # of rows that are read at a time, so that what is on its way does not grow with the ids


def read_rows(group: TierGroup, batch: Any) -> ReadRows:
    """A copy of the rows wherever they are; no tier changes, no row is created."""
    group.check_open()
    # The main thread never holds the group's lock: a signal handler that commits would wait for it for ever.
    return uninterrupted(lambda: _read_rows(group, batch))


def _read_rows(group: TierGroup, batch: Any) -> ReadRows:
    keys = batch.unique
    rows = _core.rows_array(len(keys), group.layout.row_bytes)
    step = rows_in_piece(group)
    for begin in range(0, max(1, len(keys)), step):
        _read_piece(group, keys[begin : begin + step], rows[begin : begin + step])
    return ReadRows(group, batch, rows)


def rows_in_piece(group: TierGroup) -> int:
    """How many rows are read at a time."""
    return max(1, _PIECE_BYTES // group.layout.row_bytes)


def _read_piece(group: TierGroup, keys: NDArray[np.uint64], rows: NDArray[np.uint8]) -> None:
    copies = _core.HostRows.view(rows)
    left = np.arange(len(keys), dtype=np.int32)
    with group.residency_lock:
        group.check_open()
        for tier in group.memory_tiers():
            slots = tier.find(keys[left])
            here = slots >= 0
            buffer = group.below.buffer("found", int(here.sum()))
            tier.copy_out(slots[here], buffer)
            copies.copy_in(left[here], buffer)
            left = left[~here]
        store = group.below.store
        if store is not None and len(left):
            fetched = group.below.buffer("fetched", len(left))
            found = store.read(keys[left], fetched)
            source = np.flatnonzero(found).astype(np.int32)
            copies.copy_in(left[found], fetched, source)
            left = left[~found]
        group.stats.counters.read_rows += len(keys)
    group.layout.initialise(rows, left, keys[left])


def overwrite_rows(group: TierGroup, batch: Any, change: Callable[[NDArray[np.uint8], slice], None]) -> None:
    """Changes rows in place: ``change(rows, part)`` gets rows of ``batch.unique[part]``, (n, row_bytes)."""
    keys = batch.unique
    step = max(1, min(_CHUNK, rows_in_piece(group), group.fast.capacity // 2))
    for begin in range(0, len(keys), step):
        part = slice(begin, min(begin + step, len(keys)))
        chunk = _core.batch_of_unique(np.ascontiguousarray(keys[part]))
        pinned = group.lookup(chunk)
        try:
            rows = _core.rows_array(len(pinned.slots), group.layout.row_bytes)
            group.fast.copy_out(pinned.slots, rows)
            change(rows, part)
            group.mark_updated(pinned)  # first: a changed row that is not known as one would be lost
            group.fast.copy_in(pinned.slots, rows)
            group.mark_updated(pinned)  # again: a flush meanwhile has seen the row as before
        finally:
            pinned.release()


def reset_rows(group: TierGroup, table: int) -> None:
    """Gives every row of ``table`` that some tier holds its initial value and state again."""
    for ids in list(touched_ids(group, table)):  # whole, since writing changes what the tiers hold
        keys = make_keys(table, ids)

        def change(rows: NDArray[np.uint8], part: slice, keys: NDArray[np.uint64] = keys) -> None:
            group.layout.initialise(rows, None, keys[part])

        overwrite_rows(group, _core.batch_of_unique(keys), change)


def touched_ids(group: TierGroup, table: int) -> Iterator[NDArray[np.int64]]:
    """Ids of ``table`` that some tier holds, in chunks, each once."""
    group.check_open()
    seen = uninterrupted(lambda: _resident_keys(group))
    tables, ids = split(seen)
    seen = np.sort(seen[tables == table])
    if len(seen):
        yield ids[tables == table]
    if group.below.store is not None:
        for keys in group.below.store.keys(table):
            extra = keys[~np.isin(keys, seen, assume_unique=True)] if len(seen) else keys
            if len(extra):
                yield split(extra)[1]


def _resident_keys(group: TierGroup) -> NDArray[np.uint64]:
    with group.residency_lock:
        group.check_open()
        parts = [t.native.keys_of(slots) for t in group.memory_tiers() for slots in t.resident()]
        return np.concatenate([np.empty(0, np.uint64), *parts])
