"""Miss-ratio curves of LRU, estimated while training from a small sample of each table's rows.

Rows are sampled by a hash of their key, at a rate that halves whenever a table's sample is full (fixed-size
SHARDS: Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015); reuse distances are taken
among the sampled rows of the same table, as ``lru_curve`` does for whole traces. Memory is bounded, and so is
the work per batch: beside one look at every key, a few sampled rows of each table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import carray

from cache_policies.addresses import pointer
from cache_policies.disk_cache import compiled
from cache_policies.hashing import mix
from cache_policies.inner import called, inlined
from cache_policies.prefetch import AHEAD, prefetch
from cache_policies.reuse import ReuseCurve

_ROWS = 1 << 16  # the most sampled rows, summed over all tables
_MAX_ROWS, _MIN_ROWS = 1 << 14, 1 << 8  # of one table
_PER_BATCH = 16  # the largest share of a table's sample that a batch may use before the rate halves
_TABLE = np.uint64(48)  # keys are table << 48 | id
_FREE = np.uint64(2**64 - 1)  # no row: hashes above the first threshold are never sampled
_WORD = 64  # positions
_BLOCK = 64  # keys


def starts_of(uses: np.ndarray) -> np.ndarray:
    """Return where the uses of each row begin among all uses, and at last how many these are (int32,
    (n + 1,)), for rows that are used so often."""
    return np.concatenate([[0], np.cumsum(uses)]).astype(np.int32)


_is_loaded = False


def is_loaded() -> bool:
    """Return whether :func:`load` has nothing left to do."""
    return _is_loaded


def load() -> None:
    """Load or compile what :meth:`LiveCurves.observe` runs, which takes a second, once in a process.

    Whoever calls this first should hold no lock that other threads wait for."""
    global _is_loaded
    if not _is_loaded:
        LiveCurves([0]).observe(np.empty(0, np.uint64), np.zeros(1, np.int32))
        _is_loaded = True


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]  # array.ctypes takes three times as long
    return address


class LiveCurves:
    """Curves of each table numbered in ``tables`` (0 to 65,535). Use it from one thread at a time."""

    def __init__(self, tables: Sequence[int]) -> None:
        n = len(tables)
        rows = min(_MAX_ROWS, max(_MIN_ROWS, _ROWS // max(1, n)))
        self.tables = tuple(tables)
        self._number = np.zeros(max(tables, default=0) + 1, np.int32)
        self._number[list(tables)] = np.arange(n)
        self._batches = 0
        self._totals = np.zeros((n, 2), np.int64)  # rows of batches, accesses
        self._threshold = np.full(n, _FREE - np.uint64(1))
        self._live = np.zeros((n, 2), np.int64)  # sampled rows, next position
        # Rows are known by their hashes, each at or behind its home; positions tell the order of last uses.
        self._hashes = np.full((n, 2 * rows), _FREE)
        self._position = np.zeros((n, 2 * rows), np.int32)
        self._taken = np.zeros((n, 2 * rows // _WORD), np.uint64)  # a bit per position
        self._before = np.zeros((n, 2 * rows // _WORD), np.int32)  # taken positions before a word's
        self._distances = np.zeros((n, rows + 1, 2))  # uses, accesses; at the last place first uses

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))

    def observe(self, keys: np.ndarray, starts: np.ndarray) -> None:
        """Add one batch: its rows (uint64 keys, (n,), each once), and where the uses of each begin among all
        uses, and at last how many these are (int32, (n + 1,))."""
        keys, starts = np.ascontiguousarray(keys, np.uint64), np.ascontiguousarray(starts, np.int32)
        self.observe_at(np.array([[_address(keys), keys.size, _address(starts)]]))

    def observe_at(self, batches: np.ndarray) -> None:
        """Add batches as :meth:`observe` does, which lie in memory: int64 (batches, 3), with the address of
        the keys, their number, and the address of the starts. One call for many small batches takes little
        more time, and the lock of the interpreter is got back only once."""
        self._batches += len(batches)
        _observe(
            batches, self._number, self._totals, self._threshold,
            (self._live, self._hashes, self._position, self._taken, self._before, self._distances),
        )  # fmt: skip

    def per_batch(self, table: int) -> tuple[float, float]:
        """Return the mean distinct rows and accesses per batch."""
        rows, accesses = self._totals[self._number[table]] / max(1, self._batches)
        return float(rows), float(accesses)

    def footprint(self, table: int) -> int:
        """Estimate the rows used so far."""
        t = self._number[table]
        return round(int(self._live[t, 0]) / self.rate(table))

    def rate(self, table: int) -> float:
        """Return the share of the table's rows that is sampled now."""
        return (int(self._threshold[self._number[table]]) + 1) / 2**64

    def curve(self, table: int) -> ReuseCurve:
        """Return the curve of all batches so far; its counts are estimates."""
        t = self._number[table]
        uses, accesses = self._distances[t].T
        uniques, all_accesses = (int(n) for n in self._totals[t])
        return ReuseCurve(
            uses[:-1].copy(), float(uses[-1]), accesses[:-1].copy(), float(accesses[-1]),
            uniques, all_accesses, self.rate(table),
        )  # fmt: skip


@inlined
def _hash(key):
    return mix(key + np.uint64(0x632BE59BD9B4E019))


@inlined
def _home(hashes, hash_):
    """Return the place of a hash by its lower half: of sampled rows' hashes, the upper bits are 0."""
    return np.int64(((hash_ & np.uint64(0xFFFFFFFF)) * np.uint64(hashes.size)) >> np.uint64(32))


@inlined
def _find(hashes, hash_):
    """Return where ``hash_`` is, or the free place where it belongs."""
    at = _home(hashes, hash_)
    while hashes[at] != hash_ and hashes[at] != _FREE:
        at += 1
        if at == hashes.size:
            at = 0
    return at


@compiled
def _observe(batches, number, totals, threshold, state):
    for b in range(batches.shape[0]):
        count = batches[b, 1]
        keys = carray(pointer(batches[b, 0]), count, np.uint64)
        starts = carray(pointer(batches[b, 2]), count + 1, np.int32)
        _observe_one(keys, starts, number, totals, threshold, state)


@called
def _observe_one(keys, starts, number, totals, threshold, state):
    live, hashes, position, taken, before, distances = state
    rows = distances.shape[1] - 1
    chosen, runs = np.empty(keys.size, np.int32), np.empty((keys.size + 1, 2), np.int32)
    count = _choose(keys, starts, number, totals, threshold, chosen, runs)
    where = np.empty(chosen.size, np.int32)
    sampled = np.zeros(live.shape[0], np.int32)
    for r in range(count):  # as the rows stand before the batch
        t, part = runs[r, 0], slice(runs[r, 1], runs[r + 1, 1])
        if not sampled[t]:
            _number(taken[t], before[t])
        _measure(
            keys, starts, chosen[part], where[part],
            live[t, 0], hashes[t], position[t], taken[t], before[t], distances[t],
        )  # fmt: skip
        sampled[t] += runs[r + 1, 1] - runs[r, 1]
    for r in range(count):
        part = slice(runs[r, 1], runs[r + 1, 1])
        _use(keys, chosen[part], where[part], runs[r, 0], threshold, state)
    for t in range(live.shape[0]):
        if sampled[t] > rows // _PER_BATCH:
            _halve(t, threshold, state)


@called
def _choose(keys, starts, number, totals, threshold, chosen, runs):
    """Add to the totals, choose the sampled keys, and return the number of runs of keys of one table.

    Of each run, ``runs`` gets the table's number and where the run begins in ``chosen``.
    """
    i, run, sampled = 0, 0, np.empty((keys.size + 7) // 8 * 8, np.uint8)
    while i < keys.size:
        first, table = i, keys[i] >> _TABLE
        t = number[np.int64(table)]
        limit = threshold[t]
        runs[run, 0], runs[run, 1] = t, first
        while i < keys.size and _mark(keys[i : i + _BLOCK], table, limit, sampled[i : i + _BLOCK]):
            i += min(_BLOCK, keys.size - i)
        while i < keys.size and keys[i] >> _TABLE == table:
            i += 1
        totals[t, 0] += i - first
        totals[t, 1] += starts[i] - starts[first]
        run += 1
    sampled[keys.size :] = 0
    count = _list(sampled, keys.size, chosen)
    at = 0
    for r in range(run):  # np.searchsorted would take seconds to compile
        while at < count and chosen[at] < runs[r, 1]:
            at += 1
        runs[r, 1] = at
    runs[run, 1] = count
    return run


@inlined
def _mark(keys, table, limit, sampled):
    """Mark the keys that are sampled, and return whether all keys are of the table. The loop has no branch,
    so that the processor looks at several keys at once."""
    others = np.uint64(0)
    for i in range(keys.size):
        others |= (keys[i] >> _TABLE) ^ table
        sampled[i] = _hash(keys[i]) <= limit
    return others == 0


@inlined
def _list(sampled, size, chosen):
    """List the sampled keys, which are few, and return how many these are."""
    count, words = 0, sampled.view(np.uint64)
    for word in range(words.size):
        if words[word] != 0:
            for i in range(8 * word, min(8 * word + 8, size)):
                chosen[count] = i
                count += sampled[i]
    return count


@called
def _measure(keys, starts, chosen, where, live, hashes, position, taken, before, distances):
    """Count the uses of one table's rows by distance; fill in where their hashes are or belong."""
    for k in range(chosen.size):
        if k + AHEAD < chosen.size:
            home = _home(hashes, _hash(keys[chosen[k + AHEAD]]))
            prefetch(hashes, home)
            prefetch(position, home)
        hash_ = _hash(keys[chosen[k]])
        at = _find(hashes, hash_)
        where[k] = at
        distance = distances.shape[0] - 1
        if hashes[at] == hash_:
            distance = live - _taken_to(taken, before, position[at])
        distances[distance, 0] += 1
        distances[distance, 1] += starts[chosen[k] + 1] - starts[chosen[k]]


@called
def _use(keys, chosen, where, t, threshold, state):
    """Make rows of one table its most recent ones; ``where`` is where known rows were before."""
    live, hashes, position, taken = state[0][t], state[1][t], state[2][t], state[3][t]
    rows = state[5].shape[1] - 1
    for k in range(chosen.size):
        hash_, at = _hash(keys[chosen[k]]), where[k]
        if live[0] == rows:
            _halve(t, threshold, state)
        if hash_ > threshold[t]:
            continue
        if live[1] == taken.size * _WORD:
            _compact(t, state)
        if hashes[at] != hash_:
            at = _find(hashes, hash_)
        if hashes[at] != hash_:
            hashes[at] = hash_
            live[0] += 1
        else:
            _flip(taken, position[at])
        position[at] = live[1]
        _flip(taken, live[1])
        live[1] += 1


@inlined
def _ones(word):
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@called
def _number(taken, before):
    """Compute ``before`` for all words."""
    total = 0
    for word in range(taken.size):
        before[word] = total
        total += _ones(taken[word])


@inlined
def _taken_to(taken, before, position):
    """Count the taken positions up to ``position``, itself included."""
    word = position >> 6
    return before[word] + _ones(taken[word] << np.uint64(63 - (position & 63)))


@inlined
def _flip(taken, position):
    taken[position >> 6] ^= np.uint64(1) << np.uint64(position & 63)


@called
def _halve(t, threshold, state):
    """Sample half as many of the table's rows from now on; distances and counts shrink with them."""
    live, hashes, position, taken, _, distances = state
    threshold[t] >>= np.uint64(1)
    rows, old = hashes[t].copy(), position[t].copy()
    hashes[t, :] = _FREE
    live[t, 0] = 0
    for i in range(rows.size):
        if rows[i] <= threshold[t]:
            at = _find(hashes[t], rows[i])
            hashes[t, at], position[t, at] = rows[i], old[i]
            live[t, 0] += 1
        elif rows[i] != _FREE:
            _flip(taken[t], old[i])
    _compact(t, state)
    for kind in range(2):
        last = distances.shape[1] - 1
        for d in range(last):
            half = distances[t, d, kind] / 2
            distances[t, d, kind] = 0
            distances[t, d // 2, kind] += half
        distances[t, last, kind] /= 2


@called
def _compact(t, state):
    """Close the gaps between positions."""
    live, hashes, position, taken, before, _ = state
    _number(taken[t], before[t])
    for at in range(hashes.shape[1]):
        if hashes[t, at] != _FREE:
            position[t, at] = _taken_to(taken[t], before[t], position[t, at]) - 1
    taken[t, :] = 0
    for at in range(live[t, 0]):
        _flip(taken[t], at)
    live[t, 1] = live[t, 0]
