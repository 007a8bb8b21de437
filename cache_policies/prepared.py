"""A trace made ready for simulation: batches without repeats, dense row numbers, and when each row is used
next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cache_policies import hashing
from cache_policies.disk_cache import compiled
from cache_policies.errors import PolicyError
from cache_policies.prefetch import AHEAD, prefetch

#: ``next_batch`` of a row that the rest of the trace does not use.
NEVER = np.iinfo(np.int32).max
_CHUNK = 1 << 20  # keys per step of the builder; bounds its scratch memory


@dataclass(frozen=True)
class PreparedTrace:
    """Row ``r`` is the r-th distinct key of the trace; every batch lists its rows once, in order of first
    use.

    ``rows`` int32, ``uses`` uint32 (accesses of the row in the batch) and ``next_batch`` int32 (``NEVER`` if
    none) per unique row of a batch, all batches after another; batch ``i`` is ``offsets[i]:offsets[i+1]``.
    One access per batch: ``offsets`` and ``uses`` are empty, batch ``i`` is row ``i`` alone. ``keys`` uint64
    per row.
    """

    rows: np.ndarray
    uses: np.ndarray
    next_batch: np.ndarray
    offsets: np.ndarray
    keys: np.ndarray

    @property
    def accesses(self) -> int:
        """Return the uses of all rows, repeats within a batch included."""
        return int(self.uses.sum(dtype=np.int64)) if self.offsets.size else self.rows.size

    def row_accesses(self) -> np.ndarray:
        """Return how often each row is used, repeats within a batch included: int64 per row."""
        weights = self.uses if self.offsets.size else None
        return np.bincount(self.rows, weights, self.footprint).astype(np.int64)

    @property
    def batches(self) -> int:
        """The number of batches."""
        return self.offsets.size - 1 if self.offsets.size else self.rows.size

    @property
    def uniques(self) -> int:
        """Sum over batches of their distinct rows."""
        return self.rows.size

    @property
    def footprint(self) -> int:
        """Return the distinct rows of the whole trace."""
        return self.keys.size

    @property
    def largest_batch(self) -> int:
        """Return the distinct rows of the batch with the most distinct rows."""
        if not self.offsets.size:
            return min(1, self.rows.size)
        return int(np.diff(self.offsets).max(initial=0))


def prepare(batches: Iterable[np.ndarray] | PreparedTrace) -> PreparedTrace:
    """Prepare batches of integer keys (any integer dtype, 1-d, not negative), read once and in order."""
    if isinstance(batches, PreparedTrace):
        return batches
    builder = _Builder()
    for keys, offsets in _chunks(batches):
        builder.add(keys, offsets)
    return builder.finish()


def prepare_flat(keys: np.ndarray, batch_size: int) -> PreparedTrace:
    """Prepare one array of keys, cut into batches of ``batch_size`` accesses (the last may be shorter)."""
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
    """Return the trace of some rows only: ``chosen`` is a bool per row. Batches keep their numbers."""
    number = np.cumsum(chosen, dtype=np.int32) - 1
    positions = np.flatnonzero(chosen[trace.rows])
    return _part(trace, positions, number[trace.rows[positions]], trace.keys[chosen])


def first_batches(trace: PreparedTrace, batches: int) -> PreparedTrace:
    """Return the trace of the first batches. Rows keep their next use, which may be in a later batch."""
    single = not trace.offsets.size
    end = batches if single else int(trace.offsets[batches])
    rows = trace.rows[:end]
    keys = trace.keys[: int(rows.max(initial=-1)) + 1]  # rows are numbered by first use
    return PreparedTrace(
        rows, trace.uses[:end], trace.next_batch[:end], trace.offsets[: 0 if single else batches + 1], keys
    )


def split(trace: PreparedTrace, group: np.ndarray, groups: int) -> Iterator[PreparedTrace]:
    """Return the traces of each group of rows alone: ``group`` is 0 to ``groups`` - 1 per row."""
    uses = np.argsort(group[trace.rows], kind="stable")
    rows = np.argsort(group, kind="stable")
    use_ends = np.cumsum(np.bincount(group[trace.rows], minlength=groups))[:-1]
    row_ends = np.cumsum(np.bincount(group, minlength=groups))[:-1]
    number = np.empty(trace.footprint, np.int32)
    for positions, members in zip(np.split(uses, use_ends), np.split(rows, row_ends), strict=True):
        number[members] = np.arange(members.size, dtype=np.int32)
        yield _part(trace, positions, number[trace.rows[positions]], trace.keys[members])


def _part(trace: PreparedTrace, positions: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> PreparedTrace:
    """Return the uses at ``positions`` (ascending) of ``trace``, whose ``rows`` are numbered anew."""
    single = not trace.offsets.size
    offsets = np.arange(trace.rows.size + 1) if single else trace.offsets
    return PreparedTrace(
        rows,
        np.ones(positions.size, np.uint32) if single else trace.uses[positions],
        trace.next_batch[positions],
        np.searchsorted(positions, offsets),
        keys,
    )


def _as_keys(keys: np.ndarray) -> np.ndarray:
    keys = np.asarray(keys)
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise PolicyError(f"a batch must be a 1-d integer array, got {keys.dtype} with shape {keys.shape}")
    if keys.dtype.kind == "i" and keys.size and keys.min() < 0:
        raise PolicyError(f"keys must not be negative, got {keys.min()}")
    return np.ascontiguousarray(keys, np.uint64)


def _chunks(batches: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Group small batches, so that the compiled loop is entered once per many batches."""
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
        self.uniques = 0
        self.keys = np.empty(1 << 12, np.uint64)
        self.last = np.empty(1 << 12, np.int64)  # position of each row's last use among all unique uses
        self.table = hashing.new_table(1 << 12)
        self.rows: list[np.ndarray] = []
        self.uses: list[np.ndarray] = []
        self.sizes: list[np.ndarray] = []

    def add(self, keys: np.ndarray, offsets: np.ndarray) -> None:
        self._reserve(self.footprint + keys.size)
        rows = np.empty(keys.size, np.int32)
        uses = np.empty(keys.size, np.uint32)
        sizes = np.empty(offsets.size - 1, np.int64)
        self.footprint, count = _dedup(
            keys, offsets, self.table, self.keys, self.last, self.footprint, self.uniques, rows, uses, sizes
        )
        self.rows.append(rows[:count].copy() if count < rows.size else rows)
        if not self.single:
            self.uses.append(uses[:count].copy() if count < uses.size else uses)
            self.sizes.append(sizes)
        self.batches += sizes.size
        self.uniques += count

    def _reserve(self, room: int) -> None:
        """Make place for ``room`` distinct keys."""
        if room > np.iinfo(np.int32).max:
            raise PolicyError("more than 2^31 distinct rows; sample the trace")
        if room > self.keys.size:
            more = max(room, 2 * self.keys.size) - self.keys.size
            self.keys = np.concatenate([self.keys, np.empty(more, np.uint64)])
            self.last = np.concatenate([self.last, np.empty(more, np.int64)])
            self.table = hashing.new_table(self.keys.size)
            _rehash(self.table, self.keys[: self.footprint])

    def finish(self) -> PreparedTrace:
        del self.table, self.last
        rows = _joined_parts(self.rows, np.int32)
        uses = _joined_parts(self.uses, np.uint32)
        offsets = np.empty(0, np.int64)
        if not self.single:
            offsets = np.zeros(self.batches + 1, np.int64)
            np.cumsum(_joined_parts(self.sizes, np.int64), out=offsets[1:])
        next_batch = np.empty(rows.size, np.int32)
        _next_batches(rows, offsets, next_batch, np.full(self.footprint, NEVER, np.int32))
        return PreparedTrace(rows, uses, next_batch, offsets, self.keys[: self.footprint].copy())


def _joined_parts(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    """Join ``parts`` to one array, and free each part."""
    joined = np.concatenate(parts) if parts else np.empty(0, dtype)
    parts.clear()
    return joined


@compiled
def _rehash(table, keys):
    for row in range(keys.size):
        table[hashing.find(table, keys, keys[row])] = row + 1


@compiled
def _dedup(keys, offsets, table, known, last, footprint, before, rows, uses, sizes):
    """Fill ``rows``, ``uses``, ``sizes``; ``before`` unique uses came in earlier chunks. (footprint, unique
    uses)
    """
    count = 0
    for i in range(offsets.size - 1):
        start = count
        for j in range(offsets[i], offsets[i + 1]):
            if j + 2 * AHEAD < keys.size:
                prefetch(table, hashing.home(table, keys[j + 2 * AHEAD]))
                row = table[hashing.home(table, keys[j + AHEAD])] - 1
                prefetch(known, row)
                prefetch(last, row)
            key = keys[j]
            at = hashing.find(table, known, key)
            row = table[at] - 1
            if row < 0:
                row = np.int32(footprint)
                known[row] = key
                last[row] = -1
                footprint += 1
                table[at] = footprint
            if last[row] >= before + start:
                uses[last[row] - before] += 1
            else:
                last[row] = before + count
                rows[count] = row
                uses[count] = 1
                count += 1
        sizes[i] = count - start
    return footprint, count


@compiled
def _next_batches(rows, offsets, next_batch, upcoming):
    if offsets.size == 0:
        for i in range(rows.size - 1, -1, -1):
            prefetch(upcoming, rows[max(0, i - AHEAD)])
            next_batch[i] = upcoming[rows[i]]
            upcoming[rows[i]] = i
    for i in range(offsets.size - 2, -1, -1):
        for at in range(offsets[i], offsets[i + 1]):
            prefetch(upcoming, rows[min(at + AHEAD, rows.size - 1)])
            next_batch[at] = upcoming[rows[at]]
            upcoming[rows[at]] = i
