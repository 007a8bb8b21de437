"""SIEVE."""

from __future__ import annotations

import numpy as np

from cache_policies.lists import new_lists, push_newest, unlink
from cache_policies.policy import Policy


class Sieve(Policy):
    """As CLOCK, but spared rows keep their place: new rows are sifted apart from those that have proven
    themselves.

    Zhang et al., "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web caches", NSDI
    2024. The hand goes from old to new and passes pinned rows, leaving their bit as it is.
    """

    name = "sieve"

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        prev, next_ = new_lists(capacity, 1)
        return {
            "prev": prev,
            "next": next_,
            "used": np.zeros(capacity, np.bool_),
            "hand": np.full(1, capacity, np.int64),  # the sentinel: start at the oldest
            "resident": np.zeros(1, np.int64),
        }

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        for slot in slots:
            s.used[slot] = True

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for slot in slots:
            push_newest(s.prev, s.next, s.used.size, slot)
            s.used[slot] = False
        s.resident[0] += slots.size

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
