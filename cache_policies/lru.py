"""Least recently used."""

from __future__ import annotations

import numpy as np

from cache_policies.lists import new_lists, push_newest, unlink
from cache_policies.policy import Policy


class Lru(Policy):
    """Evicts the row whose last use is longest ago.

    One list in order of use: pinned rows are its newest ones, so the walk from the oldest ends at the first
    of them.
    """

    name = "lru"

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        prev, next_ = new_lists(capacity, 1)
        return {"prev": prev, "next": next_}

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        sentinel = s.next.size - 1
        for slot in slots:
            unlink(s.prev, s.next, slot)
            push_newest(s.prev, s.next, sentinel, slot)

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        sentinel = s.next.size - 1
        for slot in slots:
            push_newest(s.prev, s.next, sentinel, slot)

    @staticmethod
    def remove(s, slots):
        for slot in slots:
            unlink(s.prev, s.next, slot)

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        sentinel = s.next.size - 1
        count = 0
        while count < n:
            slot = s.next[sentinel]
            if slot == sentinel or last_use[slot] >= pinned_since:
                break
            unlink(s.prev, s.next, slot)
            victims[count] = slot
            count += 1
        return count
