"""Least recently used."""

from __future__ import annotations

import numpy as np

from cache_policies import uses
from cache_policies.policy import Policy
from cache_policies.prefetch import AHEAD, prefetch


class Lru(Policy):
    """Evicts the row whose last use is longest ago.

    Rows in order of use: pinned rows are the newest ones, so the walk from the oldest ends at the first of
    them.
    """

    name = "lru"

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        return uses.new_uses(capacity)

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        for i in range(slots.size):
            uses.fetch(s, slots, i)
            uses.use(s, slots[i])

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for slot in slots:
            uses.use(s, slot)

    @staticmethod
    def remove(s, slots):
        for slot in slots:
            uses.drop(s, slot)

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        count = 0
        at = s.oldest[0]
        while count < n and at < s.end[0]:
            slot = s.use[at]
            if s.used_at[slot] == at:
                if last_use[slot] >= pinned_since:
                    break
                uses.drop(s, slot)
                victims[count] = slot
                count += 1
            at += 1
            if at + AHEAD < s.use.size:
                prefetch(s.used_at, s.use[at + AHEAD])
                prefetch(last_use, s.use[at + AHEAD])
        s.oldest[0] = at
        return count
