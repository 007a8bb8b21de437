"""Least frequently used, exact."""

from __future__ import annotations

import numpy as np

from cache_policies import buckets
from cache_policies.policy import Policy


class Lfu(Policy):
    """Evicts the row with the fewest uses since it became resident; among equals, the least recently used.

    O(1) per use by lists of equal frequency (Matani, Shah, Mitra, "An O(1) algorithm for implementing the LFU
    cache eviction scheme", 2010). Frequencies count plans, and are forgotten on eviction.
    """

    name = "lfu"

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        return buckets.new_buckets(capacity)

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        for i in range(slots.size):
            buckets.fetch(s, slots, i)
            slot = slots[i]
            buckets.move(s, slot, buckets.key_of(s, slot) + 1)

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for slot in slots:
            buckets.add(s, slot, 1)

    @staticmethod
    def remove(s, slots):
        buckets.remove(s, slots)

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        return buckets.evict(s, n, last_use, pinned_since, victims)
