"""Miss-ratio curves of LRU for all cache sizes at once, from reuse distances.

The reuse distance of a use is how many other rows were used since the same row's last use (Mattson et al.,
"Evaluation techniques for storage hierarchies", 1970): an LRU cache hits if it has more slots than that. Rows
are sampled by a hash of their key, so that a sample of 1 % has 1 % of the rows and all of their uses
(Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015); distances and counts are scaled
back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from cache_policies.hashing import mix
from cache_policies.policy import PolicyError
from cache_policies.prepared import PreparedTrace, select
from cache_policies.simulator import simulate


@dataclass(frozen=True)
class ReuseCurve:
    """Misses of LRU by size.

    ``counts[d]`` are uses at distance ``d`` (in sampled rows) per unique row of a batch, ``first`` those of
    rows not seen before; ``access_counts`` and ``first_accesses`` are the accesses behind them. ``rate`` is
    the share of rows that were sampled; ``uniques`` and ``accesses`` are of the whole trace: what a sample
    has caught more or less of the hottest rows than its share counts as hits (SHARDS-adj). Caches smaller
    than a batch keep what their next batch happens to leave them, which no distance tells: there ``part``,
    the sample itself, is simulated if it is known.
    """

    counts: np.ndarray
    first: float
    access_counts: np.ndarray
    first_accesses: float
    uniques: int
    accesses: int
    rate: float
    part: PreparedTrace | None = None

    def misses(self, sizes: np.ndarray | list[int]) -> np.ndarray:
        """Misses in the whole trace with ``sizes`` slots; whole numbers if all rows were sampled."""
        missed = self._missed(self.counts, self.first, sizes, "misses")
        return np.minimum(missed, self.uniques)

    def access_misses(self, sizes: np.ndarray | list[int]) -> np.ndarray:
        """As ``misses``, of accesses: each use of a row that was missed by its batch."""
        missed = self._missed(self.access_counts, self.first_accesses, sizes, "access_misses")
        return np.minimum(missed, self.accesses)

    def _missed(
        self, counts: np.ndarray, first: float, sizes: np.ndarray | list[int], simulated: str
    ) -> np.ndarray:
        hits = np.concatenate([[0], np.cumsum(counts)])
        scaled = np.ceil(np.asarray(sizes, np.float64) * self.rate).astype(np.int64)
        missed = hits[-1] + first - hits[np.minimum(scaled, counts.size)]
        if self.part is None:
            return missed / self.rate
        for at in np.flatnonzero(scaled < self.part.largest_batch):
            missed[at] = getattr(simulate(self.part, "lru", max(1, int(scaled[at]))), simulated)
        return missed if self.rate == 1 else missed / self.rate

    def unique_miss_ratio(self, sizes: np.ndarray | list[int]) -> np.ndarray:
        """Per unique row of a batch."""
        return self.misses(sizes) / max(1, self.uniques)

    def capacity_miss_ratio(self, sizes: np.ndarray | list[int]) -> np.ndarray:
        """Per unique row of a batch, first uses left out."""
        return (self.misses(sizes) - self.first / self.rate) / max(1, self.uniques)

    def miss_ratio(self, sizes: np.ndarray | list[int]) -> np.ndarray:
        """Per access."""
        return self.access_misses(sizes) / max(1, self.accesses)


def sampled(keys: np.ndarray, rate: float) -> np.ndarray:
    """Which keys (uint64) a spatial sample of ``rate`` (0 to 1) keeps: always the same ones."""
    if not 0 < rate <= 1:
        raise PolicyError(f"a sampling rate must be above 0 and at most 1, got {rate}")
    return _below(np.ascontiguousarray(keys, np.uint64), np.uint64(min(2**64 - 1, int(rate * 2.0**64))))


@njit(nogil=True, cache=True, error_model="numpy")
def _below(keys, threshold):
    chosen = np.empty(keys.size, np.bool_)
    for i in range(keys.size):
        chosen[i] = mix(keys[i] + np.uint64(0x632BE59BD9B4E019)) <= threshold
    return chosen


def sample(trace: PreparedTrace, rate: float) -> PreparedTrace:
    """The uses of the sampled rows of a trace; a cache of ``rate`` times the slots misses about as often on
    it.
    """
    return trace if rate == 1 else select(trace, sampled(trace.keys, rate))


def lru_curve(trace: PreparedTrace, rate: float = 1.0) -> ReuseCurve:
    """The curve of LRU, exact at ``rate`` 1 for single accesses.

    In batches, rows are hit or missed as they stand when the batch begins. Rows of one batch count as used in
    order of their first use; a live cache treats its hits before its misses, which moves a curve by less than
    the rows of one batch.
    """
    part = sample(trace, rate)
    rate = part.footprint / trace.footprint if rate < 1 and part.footprint else rate  # what chance made of it
    rows, distances = part.rows, np.empty(part.rows.size, np.int32)
    offsets = part.offsets if part.offsets.size else np.arange(rows.size + 1)
    _distances(rows, offsets, part.footprint, distances)
    seen = distances >= 0
    counts = np.bincount(distances[seen], minlength=1)
    if part.uses.size:
        access_counts = np.bincount(distances[seen], part.uses[seen], 1).astype(np.int64)
    else:
        access_counts = counts
    first, first_accesses = int(rows.size - counts.sum()), int(part.accesses - access_counts.sum())
    return ReuseCurve(counts, first, access_counts, first_accesses, trace.uniques, trace.accesses, rate, part)


@njit(nogil=True, cache=True, error_model="numpy")
def add_at(tree, at, amount):
    """Add to entry ``at`` of a Fenwick tree (Fenwick, 1994)."""
    at += 1
    while at < tree.size:
        tree[at] += amount
        at += at & -at


@njit(nogil=True, cache=True, error_model="numpy")
def sum_to(tree, at):
    """Sum of the entries before ``at``."""
    total = 0
    while at > 0:
        total += tree[at]
        at &= at - 1
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _distances(rows, offsets, footprint, distances):
    """Distance of each use, -1 for first ones. Positions of last uses are counted in a Fenwick tree of twice
    as many positions as rows, renumbered whenever it is full.
    """
    size = max(2 * footprint, 1024)
    tree = np.zeros(size + 1, np.int32)
    row_at = np.full(size, -1, np.int32)  # the row last used at a position
    position = np.full(footprint, -1, np.int32)
    live, time = 0, 0
    for i in range(offsets.size - 1):
        first, last = offsets[i], offsets[i + 1]
        for at in range(first, last):
            where = position[rows[at]]
            distances[at] = -1 if where < 0 else live - sum_to(tree, np.int64(where) + 1)
        for at in range(first, last):
            if time == size:
                time = _renumber(tree, row_at, position)
            row = rows[at]
            where = np.int64(position[row])
            if where >= 0:
                add_at(tree, where, -1)
                row_at[where] = -1
            else:
                live += 1
            position[row] = time
            row_at[time] = row
            add_at(tree, time, 1)
            time += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _renumber(tree, row_at, position):
    """Close the gaps between positions; the first free one."""
    time = 0
    for at in range(row_at.size):
        row = row_at[at]
        if row >= 0:
            row_at[at] = -1
            row_at[time] = row
            position[row] = time
            time += 1
    tree[:] = 0
    for at in range(1, tree.size):
        tree[at] += 1 if at <= time else 0
        parent = at + (at & -at)
        if parent < tree.size:
            tree[parent] += tree[at]
    return time
