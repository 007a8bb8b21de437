"""Rows of a chain read, changed, reset and listed outside training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.ticket import ReadRows
from tierstore.cache.uninterrupted import uninterrupted
from tierstore.keys import make_keys, split

if TYPE_CHECKING:
    from tierstore.cache.chain import Chain

_CHUNK = 1 << 16  # rows changed at a time
_PIECE_BYTES = (
    4 << 20
)  # of rows that are read at a time, so that what is on its way does not grow with the ids


def read_rows(chain: Chain, batch: Any) -> ReadRows:
    """A copy of the rows wherever they are; no tier changes, no row is created."""
    chain.check_open()
    # The main thread never holds the chain's lock: a signal handler that commits would wait for it for ever.
    return uninterrupted(lambda: _read_rows(chain, batch))


def _read_rows(chain: Chain, batch: Any) -> ReadRows:
    keys = batch.unique
    rows = _core.rows_array(len(keys), chain.layout.row_bytes)
    step = rows_in_piece(chain)
    for begin in range(0, max(1, len(keys)), step):
        _read_piece(chain, keys[begin : begin + step], rows[begin : begin + step])
    return ReadRows(chain, batch, rows)


def rows_in_piece(chain: Chain) -> int:
    """How many rows are read at a time."""
    return max(1, _PIECE_BYTES // chain.layout.row_bytes)


def _read_piece(chain: Chain, keys: NDArray[np.uint64], rows: NDArray[np.uint8]) -> None:
    copies = _core.HostRows.view(rows)
    left = np.arange(len(keys), dtype=np.int32)
    with chain.moving:
        chain.check_open()
        for tier in chain.memory_tiers():
            slots = tier.find(keys[left])
            here = slots >= 0
            buffer = chain.below.buffer("found", int(here.sum()))
            tier.copy_out(slots[here], buffer)
            copies.copy_in(left[here], buffer)
            left = left[~here]
        store = chain.below.store
        if store is not None and len(left):
            fetched = chain.below.buffer("fetched", len(left))
            found = store.read(keys[left], fetched)
            source = np.flatnonzero(found).astype(np.int32)
            copies.copy_in(left[found], fetched, source)
            left = left[~found]
        chain.stats.counters.read_rows += len(keys)
    chain.layout.initialise(rows, left, keys[left])


def overwrite_rows(chain: Chain, batch: Any, change: Callable[[NDArray[np.uint8], slice], None]) -> None:
    """Changes rows in place: ``change(rows, part)`` gets rows of ``batch.unique[part]``, (n, row_bytes)."""
    keys = batch.unique
    step = max(1, min(_CHUNK, rows_in_piece(chain), chain.fast.capacity // 2))
    for begin in range(0, len(keys), step):
        part = slice(begin, min(begin + step, len(keys)))
        chunk = _core.batch_of_unique(np.ascontiguousarray(keys[part]))
        ticket = chain.lookup(chunk)
        try:
            rows = _core.rows_array(len(ticket.slots), chain.layout.row_bytes)
            chain.fast.copy_out(ticket.slots, rows)
            change(rows, part)
            chain.mark_updated(ticket)  # first: a changed row that is not known as one would be lost
            chain.fast.copy_in(ticket.slots, rows)
            chain.mark_updated(ticket)  # again: a flush meanwhile has seen the row as before
        finally:
            ticket.release()


def reset_rows(chain: Chain, table: int) -> None:
    """Gives every row of ``table`` that some tier holds its initial value and state again."""
    for ids in list(touched_ids(chain, table)):  # whole, since writing changes what the tiers hold
        keys = make_keys(table, ids)

        def change(rows: NDArray[np.uint8], part: slice, keys: NDArray[np.uint64] = keys) -> None:
            chain.layout.initialise(rows, None, keys[part])

        overwrite_rows(chain, _core.batch_of_unique(keys), change)


def touched_ids(chain: Chain, table: int) -> Iterator[NDArray[np.int64]]:
    """Ids of ``table`` that some tier holds, in chunks, each once."""
    chain.check_open()
    seen = uninterrupted(lambda: _resident_keys(chain))
    tables, ids = split(seen)
    seen = np.sort(seen[tables == table])
    if len(seen):
        yield ids[tables == table]
    if chain.below.store is not None:
        for keys in chain.below.store.keys(table):
            extra = keys[~np.isin(keys, seen, assume_unique=True)] if len(seen) else keys
            if len(extra):
                yield split(extra)[1]


def _resident_keys(chain: Chain) -> NDArray[np.uint64]:
    with chain.moving:
        chain.check_open()
        parts = [t.native.keys_of(slots) for t in chain.memory_tiers() for slots in t.resident()]
        return np.concatenate([np.empty(0, np.uint64), *parts])
