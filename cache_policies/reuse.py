"""Miss-ratio curves of LRU for all cache sizes at once, from reuse distances.

The reuse distance of a use is how many other rows were used since the same row's last use (Mattson et al.,
"Evaluation techniques for storage hierarchies", 1970): an LRU cache hits if it has more slots than that. Rows
are sampled by a hash of their key, so that a sample of 1 % has 1 % of the rows and all of their uses
(Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015); distances and counts are scaled
back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cache_policies.disk_cache import compiled
from cache_policies.errors import PolicyError
from cache_policies.hashing import mix
from cache_policies.prepared import PreparedTrace, select
from cache_policies.simulator import missed_by_row

#: Row uses that simulating a cache smaller than a batch goes through at most, where fewer rows are sampled.
_QUICK_USES = 1 << 21


@dataclass(frozen=True)
class ReuseCurve:
    """Misses of LRU by size.

    ``counts[d]`` are uses at distance ``d`` (in sampled rows) per unique row of a batch, ``first`` the uses
    of rows not seen before; ``access_counts`` and ``first_accesses`` are the accesses behind these uses.
    ``rate`` is the share of rows that were sampled. ``uniques`` and ``accesses`` are of the whole trace: uses
    of the hottest rows that a sample caught beyond its share, or short of it, count as hits (SHARDS-adj).
    Caches smaller than a batch keep what their next batch happens to leave, which no distance tells;
    ``within_batch``, if present, simulates them.
    """

    counts: np.ndarray
    first: float
    access_counts: np.ndarray
    first_accesses: float
    uniques: int
    accesses: int
    rate: float
    within_batch: WithinBatch | None = None

    def misses(self, sizes: np.ndarray | list[int]) -> np.ndarray:
        """Return the trace's misses with ``sizes`` slots, which are whole numbers if all rows are sampled."""
        return np.minimum(self._missed(sizes, 0, self.counts, self.first), self.uniques)

    def access_misses(self, sizes: np.ndarray | list[int]) -> np.ndarray:
        """Return the missed accesses with ``sizes`` slots: all uses of a row that its batch missed."""
        return np.minimum(self._missed(sizes, 1, self.access_counts, self.first_accesses), self.accesses)

    def _missed(
        self, sizes: np.ndarray | list[int], kind: int, counts: np.ndarray, first: float
    ) -> np.ndarray:
        hits = np.concatenate([[0], np.cumsum(counts)])
        scaled = np.ceil(np.asarray(sizes, np.float64) * self.rate).astype(np.int64)
        missed = hits[-1] + first - hits[np.minimum(scaled, counts.size)]
        missed = missed if self.rate == 1 else missed / self.rate
        if self.within_batch is not None:
            for at in np.flatnonzero(np.asarray(sizes) < self.within_batch.largest_batch):
                missed[at] = self.within_batch.missed(int(sizes[at]))[kind]
        return missed

    def unique_miss_ratio(self, sizes: np.ndarray | list[int]) -> np.ndarray:
        """Return the misses per unique row of a batch."""
        return self.misses(sizes) / max(1, self.uniques)

    def capacity_miss_ratio(self, sizes: np.ndarray | list[int]) -> np.ndarray:
        """Return the misses per unique row of a batch, without first uses."""
        return (self.misses(sizes) - self.first / self.rate) / max(1, self.uniques)

    def miss_ratio(self, sizes: np.ndarray | list[int]) -> np.ndarray:
        """Return the missed accesses per access."""
        return self.access_misses(sizes) / max(1, self.accesses)


def sampled(keys: np.ndarray, rate: float) -> np.ndarray:
    """Tell which keys (uint64) a spatial sample of ``rate`` (0 to 1) keeps: always the same keys."""
    if not 0 < rate <= 1:
        raise PolicyError(f"a sampling rate must be above 0 and at most 1, got {rate}")
    return _below(np.ascontiguousarray(keys, np.uint64), np.uint64(min(2**64 - 1, int(rate * 2.0**64))))


@compiled
def _below(keys, threshold):
    chosen = np.empty(keys.size, np.bool_)
    for i in range(keys.size):
        chosen[i] = mix(keys[i] + np.uint64(0x632BE59BD9B4E019)) <= threshold
    return chosen


def sample(trace: PreparedTrace, rate: float) -> PreparedTrace:
    """Return the uses of the sampled rows of a trace.

    A cache of ``rate`` times the slots misses about as often on the sample as the cache on the trace.
    """
    return trace if rate == 1 else select(trace, sampled(trace.keys, rate))


class WithinBatch:
    """Misses of LRU with fewer slots than a batch has rows, by simulation of all rows or of a sample.

    The sample is larger than distances need, since a few rows decide how a batch overflows. Misses of first
    uses are counted on the whole trace. Other misses are counted on the sample, scaled, and corrected by the
    number of uses of the whole trace. A sample's error comes from the hottest rows, so a use that the sample
    lacks is taken to miss as often as the hottest rows' uses do (a regression estimator: Särndal, Swensson,
    Wretman, "Model assisted survey sampling", 1992).
    """

    def __init__(self, trace: PreparedTrace, rate: float) -> None:
        self.largest_batch = trace.largest_batch
        self.first = (trace.footprint, int(_first_uses(trace).sum()))
        self._reuses = (trace.uniques - self.first[0], trace.accesses - self.first[1])
        self._part = sample(trace, min(1.0, max(rate, _QUICK_USES / max(1, trace.uniques))))
        self._rate = self._part.footprint / max(1, trace.footprint) or 1.0
        self._known: dict[int, tuple[float, float]] = {}

    def missed(self, size: int) -> tuple[float, float]:
        """Return misses and missed accesses of the whole trace with ``size`` slots."""
        slots = max(1, math.ceil(size * self._rate))
        if slots not in self._known:
            missed = missed_by_row(self._part, "lru", slots)
            first = _first_uses(self._part)
            batches = np.bincount(self._part.rows, minlength=first.size)
            self._known[slots] = (
                self._whole(0, batches - 1, missed[0] - 1),
                self._whole(1, self._part.row_accesses() - first, missed[1] - first),
            )
        return self._known[slots]

    def _whole(self, kind: int, uses: np.ndarray, missed: np.ndarray) -> float:
        """Return all misses; ``uses`` and ``missed`` count after the first use, per row of the sample."""
        if self._rate == 1:
            return self.first[kind] + int(missed.sum())
        lacking = self._reuses[kind] - uses.sum() / self._rate
        miss_ratio_of_hot = (uses @ missed) / max(1, uses @ uses)
        return float(self.first[kind] + missed.sum() / self._rate + lacking * miss_ratio_of_hot)


def lru_curve(trace: PreparedTrace, rate: float = 1.0) -> ReuseCurve:
    """Return the curve of LRU, exact at ``rate`` 1 for single accesses.

    In batches, the state at the beginning of the batch decides what is hit. Rows of one batch count as used
    in order of their first use. A live cache treats its hits before its misses, which moves a curve by less
    than the rows of one batch.
    """
    part = sample(trace, rate)
    rate = part.footprint / trace.footprint if rate < 1 and part.footprint else rate  # what chance made of it
    rows, distances = part.rows, np.empty(part.rows.size, np.int32)
    offsets = part.offsets if part.offsets.size else np.arange(rows.size + 1)
    _distances(rows, offsets, part.footprint, distances)
    seen = distances >= 0
    counts = np.bincount(distances[seen], minlength=1)
    if not part.uses.size:
        first = int(rows.size - counts.sum())
        return ReuseCurve(counts, first, counts, first, trace.uniques, trace.accesses, rate)
    access_counts = np.bincount(distances[seen], part.uses[seen], 1).astype(np.int64)
    first, within_batch = part.footprint, WithinBatch(trace, rate)
    # Counted on the whole trace, since a few rows of one batch may have most of them.
    first_accesses = within_batch.first[1] * rate
    return ReuseCurve(
        counts, first, access_counts, first_accesses, trace.uniques, trace.accesses, rate, within_batch
    )


@compiled
def _first_uses_of(rows, uses, first):
    seen = 0
    for at in range(rows.size):
        if rows[at] >= seen:  # rows are numbered by first use
            seen = rows[at] + 1
            first[rows[at]] = uses[at]


def _first_uses(trace: PreparedTrace) -> np.ndarray:
    """Return per row of a trace in batches (int64) the accesses of the first batch that uses the row."""
    first = np.empty(trace.footprint, np.int64)
    _first_uses_of(trace.rows, trace.uses, first)
    return first


@compiled
def add_at(tree, at, amount):
    """Add to entry ``at`` of a Fenwick tree (Fenwick, 1994)."""
    at += 1
    while at < tree.size:
        tree[at] += amount
        at += at & -at


@compiled
def sum_to(tree, at):
    """Sum the entries before ``at``."""
    total = 0
    while at > 0:
        total += tree[at]
        at &= at - 1
    return total


@compiled
def _distances(rows, offsets, footprint, distances):
    """Return the distance of each use, -1 of a first use.

    Positions of last uses are counted in a Fenwick tree of twice as many positions as rows, which is
    renumbered whenever it is full.
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


@compiled
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
