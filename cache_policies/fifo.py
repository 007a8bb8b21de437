"""First in, first out."""

from __future__ import annotations

import numpy as np

from cache_policies.lists import new_lists, push_newest, unlink
from cache_policies.policy import Policy


class Fifo(Policy):
    """Evicts the row that has been resident longest. Pinned rows keep their place in the queue."""

    name = "fifo"

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        prev, next_ = new_lists(capacity, 1)
        return {"prev": prev, "next": next_}

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for slot in slots:
            push_newest(s.prev, s.next, s.next.size - 1, slot)

    @staticmethod
    def remove(s, slots):
        for slot in slots:
            unlink(s.prev, s.next, slot)

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        sentinel = s.next.size - 1
        count = 0
        slot = s.next[sentinel]
        while slot != sentinel and count < n:
            after = s.next[slot]
            if last_use[slot] < pinned_since:
                unlink(s.prev, s.next, slot)
                victims[count] = slot
                count += 1
            slot = after
        return count
