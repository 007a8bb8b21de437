"""SIEVE."""

from __future__ import annotations

import numpy as np

from cache_policies.lists import unlink
from cache_policies.ring import Ring


class Sieve(Ring):
    """As CLOCK, but spared rows keep their place, which sifts new rows from proven rows.

    Zhang et al., "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web caches", NSDI
    2024. The hand goes from old to new and passes pinned rows, leaving their bit as it is.
    """

    name = "sieve"

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        # the hand is at the sentinel: start at the oldest
        return {**super().state(capacity), "hand": np.full(1, capacity, np.int64)}

    @staticmethod
    def remove(s, slots):
        for slot in slots:
            if s.hand[0] == slot:
                s.hand[0] = s.next[slot]
            unlink(s.prev, s.next, slot)
        s.resident[0] -= slots.size

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        sentinel = s.used.size
        hand = s.hand[0]
        count, pinned = 0, 0  # pinned rows in a row: when they are all, nothing is left to evict
        while count < n and pinned < s.resident[0]:
            if hand == sentinel:
                hand = np.int64(s.next[sentinel])
            slot, hand = hand, np.int64(s.next[hand])
            if last_use[slot] >= pinned_since:
                pinned += 1
                continue
            pinned = 0
            if s.used[slot]:
                s.used[slot] = False
            else:
                unlink(s.prev, s.next, slot)
                victims[count] = slot
                count += 1
                s.resident[0] -= 1
        s.hand[0] = hand
        return count
