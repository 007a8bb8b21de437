"""A trace made ready for simulation: batches without repeats, dense row numbers, and when each row is used
next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numba import njit

from cache_policies import hashing
from cache_policies.policy import PolicyError

#: ``next_batch`` of a row that the rest of the trace does not use.
NEVER = np.iinfo(np.int32).max
_CHUNK = 1 << 20  # keys per step of the builder; bounds its scratch memory


@dataclass(frozen=True)
class PreparedTrace:
    """Row ``r`` is the r-th distinct key of the trace; every batch lists its rows once, in order of first
    use.

    ``rows`` int32 and ``next_batch`` int32 (``NEVER`` if none) per unique row of a batch, all batches after
    another; batch ``i`` is ``offsets[i]:offsets[i+1]``, or row ``i`` alone when ``offsets`` is empty (one
    access per batch). ``keys`` uint64 per row. ``accesses`` counts repeats too.
    """

    rows: np.ndarray
    next_batch: np.ndarray
    offsets: np.ndarray
    keys: np.ndarray
    row_accesses: np.ndarray

    @property
    def accesses(self) -> int:
        """Uses of all rows, repeats within a batch included."""
        return int(self.row_accesses.sum())

    @property
    def batches(self) -> int:
        return self.offsets.size - 1 if self.offsets.size else self.rows.size

    @property
    def uniques(self) -> int:
        """Sum over batches of their distinct rows."""
        return self.rows.size

    @property
    def footprint(self) -> int:
        """Distinct rows of the whole trace."""
        return self.keys.size

    @property
    def largest_batch(self) -> int:
        """Distinct rows of the batch with the most."""
        if not self.offsets.size:
            return min(1, self.rows.size)
        return int(np.diff(self.offsets).max(initial=0))


def prepare(batches: Iterable[np.ndarray] | PreparedTrace) -> PreparedTrace:
    """From batches of integer keys (any integer dtype, 1-d, not negative); they are read once, in order."""
    if isinstance(batches, PreparedTrace):
        return batches
    builder = _Builder()
    for keys, offsets in _chunks(batches):
        builder.add(keys, offsets)
    return builder.finish()


def prepare_flat(keys: np.ndarray, batch_size: int) -> PreparedTrace:
    """From one array of keys cut into batches of ``batch_size`` accesses (the last may be shorter)."""
    if batch_size < 1:
        raise PolicyError(f"batch_size must be at least 1, got {batch_size}")
    keys = _as_keys(keys)
    builder = _Builder(single=batch_size == 1)
    step = max(1, _CHUNK // batch_size) * batch_size
    for start in range(0, keys.size, step):
        part = keys[start : start + step]
        builder.add(part, np.append(np.arange(0, part.size, batch_size), part.size))
    return builder.finish()


def select(trace: PreparedTrace, chosen: np.ndarray) -> PreparedTrace:
    """The trace of some rows only: ``chosen`` is a bool per row. Batches keep their numbers."""
    kept = chosen[trace.rows]
    number = np.cumsum(chosen, dtype=np.int32) - 1
    offsets = trace.offsets
    if not offsets.size:
        offsets = np.arange(trace.rows.size + 1)
    before = np.zeros(kept.size + 1, np.int64)
    np.cumsum(kept, out=before[1:])
    return PreparedTrace(
        number[trace.rows[kept]],
        trace.next_batch[kept],
        before[offsets],
        trace.keys[chosen],
        trace.row_accesses[chosen],
    )


def _as_keys(keys: np.ndarray) -> np.ndarray:
    keys = np.asarray(keys)
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise PolicyError(f"a batch must be a 1-d integer array, got {keys.dtype} with shape {keys.shape}")
    if keys.dtype.kind == "i" and keys.size and keys.min() < 0:
        raise PolicyError(f"keys must not be negative, got {keys.min()}")
    return np.ascontiguousarray(keys, np.uint64)


def _chunks(batches: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Small batches together, so that the compiled loop is entered once per many of them."""
    waiting: list[np.ndarray] = []
    size = 0
    for batch in batches:
        waiting.append(_as_keys(batch))
        size += waiting[-1].size
        if size >= _CHUNK:
            yield _joined(waiting)
            waiting, size = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(batches) + 1, np.int64)
    np.cumsum([batch.size for batch in batches], out=offsets[1:])
    return np.concatenate(batches), offsets


class _Builder:
    """Numbers the keys by first occurrence (open addressing) and drops the repeats of each batch."""

    def __init__(self, single: bool = False) -> None:
        self.single = single
        self.footprint = 0
        self.batches = 0
        self.keys = np.empty(1 << 12, np.uint64)
        self.seen = np.empty(1 << 12, np.int32)  # last batch of each row
        self.uses = np.zeros(1 << 12, np.int64)
        self.table = hashing.new_table(1 << 12)
        self.rows: list[np.ndarray] = []
        self.sizes: list[np.ndarray] = []

    def add(self, keys: np.ndarray, offsets: np.ndarray) -> None:
        self._reserve(self.footprint + keys.size)
        rows = np.empty(keys.size, np.int32)
        sizes = np.empty(offsets.size - 1, np.int64)
        batch = np.int64(self.batches)
        self.footprint, count = _dedup(
            keys, offsets, self.table, self.keys, self.seen, self.uses, self.footprint, batch, rows, sizes
        )
        self.rows.append(rows[:count].copy() if count < rows.size else rows)
        if not self.single:
            self.sizes.append(sizes)
        self.batches += sizes.size

    def _reserve(self, room: int) -> None:
        """Make place for ``room`` distinct keys."""
        if room > np.iinfo(np.int32).max:
            raise PolicyError("more than 2^31 distinct rows; sample the trace")
        if room > self.keys.size:
            more = max(room, 2 * self.keys.size) - self.keys.size
            self.keys = np.concatenate([self.keys, np.empty(more, np.uint64)])
            self.seen = np.concatenate([self.seen, np.empty(more, np.int32)])
            self.uses = np.concatenate([self.uses, np.zeros(more, np.int64)])
            self.table = hashing.new_table(self.keys.size)
            _rehash(self.table, self.keys[: self.footprint])

    def finish(self) -> PreparedTrace:
        del self.table, self.seen
        rows = np.concatenate(self.rows) if self.rows else np.empty(0, np.int32)
        self.rows = []
        offsets = np.empty(0, np.int64)
        if not self.single:
            offsets = np.zeros(self.batches + 1, np.int64)
            if self.sizes:
                np.cumsum(np.concatenate(self.sizes), out=offsets[1:])
        next_batch = np.empty(rows.size, np.int32)
        _next_batches(rows, offsets, next_batch, np.full(self.footprint, NEVER, np.int32))
        keys, uses = self.keys[: self.footprint].copy(), self.uses[: self.footprint].copy()
        return PreparedTrace(rows, next_batch, offsets, keys, uses)


@njit(nogil=True, cache=True, error_model="numpy")
def _rehash(table, keys):
    for row in range(keys.size):
        table[hashing.find(table, keys, keys[row])] = row + 1


@njit(nogil=True, cache=True, error_model="numpy")
def _dedup(keys, offsets, table, known, seen, uses, footprint, first_batch, rows, sizes):
    count = 0
    for i in range(offsets.size - 1):
        start = count
        for key in keys[offsets[i] : offsets[i + 1]]:
            at = hashing.find(table, known, key)
            row = table[at] - 1
            if row < 0:
                row = np.int32(footprint)
                known[row] = key
                seen[row] = -1
                footprint += 1
                table[at] = footprint
            uses[row] += 1
            if seen[row] != first_batch + i:
                seen[row] = first_batch + i
                rows[count] = row
                count += 1
        sizes[i] = count - start
    return footprint, count


@njit(nogil=True, cache=True, error_model="numpy")
def _next_batches(rows, offsets, next_batch, upcoming):
    if offsets.size == 0:
        for i in range(rows.size - 1, -1, -1):
            next_batch[i] = upcoming[rows[i]]
            upcoming[rows[i]] = i
    for i in range(offsets.size - 2, -1, -1):
        for at in range(offsets[i], offsets[i + 1]):
            next_batch[at] = upcoming[rows[at]]
            upcoming[rows[at]] = i
