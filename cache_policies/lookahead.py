"""Next use in the known window, frequency below."""

from __future__ import annotations

import numpy as np
from numba import njit

from cache_policies import buckets
from cache_policies.policy import UNKNOWN, Policy

_FIRST = -(1 << 62)  # before the negated sequence number of any known use


@njit(error_model="numpy", forceinline=True)
def _key(next_use, frequency):
    """Eviction order: rows without a known next use by frequency, then the others, furthest use first."""
    return _FIRST + frequency if next_use == UNKNOWN else -next_use


class Lookahead(Policy):
    """Evicts rows that no known batch uses (fewest uses first, then least recently used), then the row whose
    next use is furthest; among those used next by one batch, rows of which that was announced (latest first)
    and then the least recently used.

    Belady's rule (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966) as far as
    the window sees, exact LFU behind it. A row whose announced use is called off counts as the least recent
    of its frequency.
    """

    name = "lookahead"
    uses_window = True

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        return {"frequency": np.zeros(capacity, np.uint32), **buckets.new_buckets(capacity)}

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        for i in range(slots.size):
            slot = slots[i]
            s.frequency[slot] += 1
            buckets.move(s, slot, _key(next_use[i], np.int64(s.frequency[slot])))

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for i in range(slots.size):
            slot = slots[i]
            s.frequency[slot] = 1
            buckets.add(s, slot, _key(next_use[i], np.int64(1)))

    @staticmethod
    def announce(s, slots, next_use, now):
        for i in range(slots.size):
            slot = slots[i]
            key = _key(next_use[i], np.int64(s.frequency[slot]))
            if key != buckets.key_of(s, slot):
                buckets.place(s, slot, key)

    @staticmethod
    def remove(s, slots):
        for slot in slots:
            buckets.take(s, slot)

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        return buckets.evict(s, n, last_use, pinned_since, victims)
