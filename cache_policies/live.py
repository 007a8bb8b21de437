"""Miss-ratio curves of LRU while batches pass by, from a small sample of each table's rows.

Rows are sampled by a hash of their key, at a rate that halves whenever a table's sample is full (fixed-size
SHARDS: Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015); reuse distances are taken
among the sampled rows of the same table, as ``lru_curve`` does for whole traces. Memory is bounded, and so is
the work per batch: beside one look at every key, a few sampled rows of each table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from cache_policies import hashing
from cache_policies.hashing import mix
from cache_policies.reuse import ReuseCurve, add_at, sum_to

_ROWS = 1 << 16  # sampled at most, of all tables together
_MOST, _FEWEST = 1 << 14, 1 << 8  # of one table
_PER_BATCH = 16  # a batch may use so much of a table's sample; if it uses more, the rate halves
_TABLE = np.uint64(48)  # keys are table << 48 | id


class LiveCurves:
    """The tables numbered ``tables`` (0 to 65,535), each for itself. Use from one thread at a time."""

    def __init__(self, tables: Sequence[int]) -> None:
        n = len(tables)
        rows = min(_MOST, max(_FEWEST, _ROWS // max(1, n)))
        self.tables = tuple(tables)
        self._number = np.zeros(max(tables, default=0) + 1, np.int32)
        self._number[list(tables)] = np.arange(n)
        self._batches = 0
        self._totals = np.zeros((n, 2), np.int64)  # rows of batches, accesses
        self._threshold = np.full(n, 2**64 - 1, np.uint64)
        self._live = np.zeros((n, 2), np.int64)  # sampled rows, next position
        self._keys = np.zeros((n, rows), np.uint64)
        self._position = np.zeros((n, rows), np.int32)
        self._index = np.zeros((n, hashing.new_table(rows).size), np.int32)
        self._row_at = np.full((n, 2 * rows), -1, np.int32)
        self._tree = np.zeros((n, 2 * rows + 1), np.int32)
        self._distances = np.zeros((n, 2, rows + 1))  # uses, accesses; at the last place first uses

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))

    def observe(self, keys: np.ndarray, uses: np.ndarray) -> None:
        """One batch: its rows (uint64 keys, each once) and how often it uses each (int64)."""
        self._batches += 1
        _observe(
            keys, uses, self._number, self._totals, self._threshold,
            (self._live, self._keys, self._position, self._index, self._row_at, self._tree, self._distances),
        )  # fmt: skip

    def per_batch(self, table: int) -> tuple[float, float]:
        """Mean distinct rows and accesses per batch."""
        rows, accesses = self._totals[self._number[table]] / max(1, self._batches)
        return float(rows), float(accesses)

    def footprint(self, table: int) -> int:
        """Rows used so far, estimated."""
        t = self._number[table]
        return round(int(self._live[t, 0]) / self.rate(table))

    def rate(self, table: int) -> float:
        """Share of the table's rows that is sampled now."""
        return (int(self._threshold[self._number[table]]) + 1) / 2**64

    def curve(self, table: int) -> ReuseCurve:
        """Of the batches since the beginning; counts are estimates."""
        t = self._number[table]
        uses, accesses = self._distances[t]
        uniques, all_accesses = (int(n) for n in self._totals[t])
        return ReuseCurve(
            uses[:-1].copy(), float(uses[-1]), accesses[:-1].copy(), float(accesses[-1]),
            uniques, all_accesses, self.rate(table),
        )  # fmt: skip


@njit(error_model="numpy", forceinline=True)
def _hash(key):
    return mix(key + np.uint64(0x632BE59BD9B4E019))


@njit(nogil=True, cache=True, error_model="numpy")
def _observe(keys, uses, number, totals, threshold, state):
    live, known, position, index, _, tree, distances = state
    rows = known.shape[1]
    chosen = np.empty(keys.size, np.int32)
    count = 0
    for i in range(keys.size):
        t = number[np.int64(keys[i] >> _TABLE)]
        totals[t, 0] += 1
        totals[t, 1] += uses[i]
        if _hash(keys[i]) <= threshold[t]:
            chosen[count] = i
            count += 1
    sampled = np.zeros(live.shape[0], np.int32)
    for i in chosen[:count]:  # as the rows stand before the batch
        t = number[np.int64(keys[i] >> _TABLE)]
        sampled[t] += 1
        entry = index[t, hashing.find(index[t], known[t], keys[i])]
        distance = rows
        if entry:
            distance = live[t, 0] - sum_to(tree[t], np.int64(position[t, entry - 1]) + 1)
        distances[t, 0, distance] += 1
        distances[t, 1, distance] += uses[i]
    for i in chosen[:count]:
        t = number[np.int64(keys[i] >> _TABLE)]
        if live[t, 0] == rows:
            _halve(t, threshold, state)
        if _hash(keys[i]) <= threshold[t]:
            _use(t, keys[i], threshold, state)
    for t in range(live.shape[0]):
        if sampled[t] > rows // _PER_BATCH:
            _halve(t, threshold, state)


@njit(nogil=True, cache=True, error_model="numpy")
def _use(t, key, threshold, state):
    """Makes ``key`` the table's most recent row; there is room for it."""
    live, known, position, index, row_at, tree, _ = state
    if live[t, 1] == row_at.shape[1]:
        _compact(t, threshold, state)
    at = hashing.find(index[t], known[t], key)
    entry = index[t, at] - 1
    if entry < 0:
        entry = np.int32(live[t, 0])
        known[t, entry] = key
        index[t, at] = entry + 1
        live[t, 0] += 1
    else:
        add_at(tree[t], np.int64(position[t, entry]), -1)
        row_at[t, position[t, entry]] = -1
    time = live[t, 1]
    position[t, entry] = time
    row_at[t, time] = entry
    add_at(tree[t], time, 1)
    live[t, 1] += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _halve(t, threshold, state):
    """Samples half as many of the table's rows from now on; distances and counts shrink with them."""
    distances = state[6]
    threshold[t] >>= np.uint64(1)
    _compact(t, threshold, state)
    for kind in range(2):
        row = distances[t, kind]
        for d in range(row.size - 1):
            half = row[d] / 2
            row[d] = 0
            row[d // 2] += half
        row[row.size - 1] /= 2


@njit(nogil=True, cache=True, error_model="numpy")
def _compact(t, threshold, state):
    """Drops rows that are not sampled any more and closes the gaps between positions."""
    live, known, position, index, row_at, tree, _ = state
    kept = np.empty(live[t, 0], np.uint64)
    count = 0
    for time in range(live[t, 1]):
        entry = row_at[t, time]
        if entry >= 0 and _hash(known[t, entry]) <= threshold[t]:
            kept[count] = known[t, entry]
            count += 1
    index[t, :] = 0
    row_at[t, :] = -1
    tree[t, :] = 0
    live[t, :] = count
    for entry in range(count):
        known[t, entry] = kept[entry]
        index[t, hashing.find(index[t], known[t], kept[entry])] = entry + 1
        position[t, entry] = entry
        row_at[t, entry] = entry
        add_at(tree[t], entry, 1)
