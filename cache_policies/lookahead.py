"""Next use in the known window, frequency below."""

from __future__ import annotations

import numpy as np

from cache_policies import buckets
from cache_policies.inner import inlined
from cache_policies.policy import UNKNOWN, Policy

_FIRST = -(1 << 62)  # before the negated sequence number of any known use
_EXACT = 1024  # frequencies from here on count in steps of a 64th at most
_POOL = 1 << 13  # buckets: 2,400 for all frequencies, the rest for batches of the window


@inlined
def _key(next_use, frequency):
    """Return the eviction order: rows of unknown next use by frequency, then by next use, furthest first."""
    if next_use != UNKNOWN:
        return -next_use
    step = 0
    while frequency >= _EXACT and frequency >> step >= 128:
        step += 1
    return _FIRST + (frequency >> step << step)


class Lookahead(Policy):
    """Evicts rows that no known batch uses (fewest uses first, then least recently used), then the row whose
    next use is furthest.

    Among rows of one next batch, rows whose use was announced go first (latest first), then the least
    recently used. This is Belady's rule (Belady, "A study of replacement algorithms for a virtual-storage
    computer", 1966) as far as the window sees, and LFU beyond it (exact below 1,024 uses, then in steps of a
    64th). A row whose announced
    use is called off counts as the least recent of its frequency.
    """

    name = "lookahead"
    uses_window = True

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        return buckets.new_buckets(capacity, _POOL)  # the spare word of a slot is how often it was used

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        for i in range(slots.size):
            buckets.fetch(s, slots, i)
            slot = slots[i]
            s.node[buckets.spare(s, slot)] += 1
            buckets.move(s, slot, _key(next_use[i], np.int64(s.node[buckets.spare(s, slot)])))

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for i in range(slots.size):
            slot = slots[i]
            s.node[buckets.spare(s, slot)] = 1
            buckets.add(s, slot, _key(next_use[i], np.int64(1)))

    @staticmethod
    def announce(s, slots, next_use, now):
        for i in range(slots.size):
            buckets.fetch(s, slots, i)
            slot = slots[i]
            key = _key(next_use[i], np.int64(s.node[buckets.spare(s, slot)]))
            if key != buckets.key_of(s, slot):
                buckets.place(s, slot, key)

    @staticmethod
    def remove(s, slots):
        buckets.remove(s, slots)

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        return buckets.evict(s, n, last_use, pinned_since, victims)
