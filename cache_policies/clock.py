"""Second chance."""

from __future__ import annotations

from cache_policies.lists import push_newest, unlink
from cache_policies.ring import Ring


class Clock(Ring):
    """A hand goes around the rows in order of arrival and evicts the first row unused since its last pass.

    This is CLOCK with one reference bit (Corbató, "A paging experiment with the Multics system", 1968), kept
    as a queue in which the hand stands between newest and oldest. The hand passes pinned rows and leaves
    their bit as it is.
    """

    name = "clock"

    @staticmethod
    def remove(s, slots):
        for slot in slots:
            unlink(s.prev, s.next, slot)
        s.resident[0] -= slots.size

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        sentinel = s.used.size
        count, pinned = 0, 0  # pinned rows in a row: when they are all, nothing is left to evict
        while count < n and pinned < s.resident[0]:
            slot = s.next[sentinel]
            unlink(s.prev, s.next, slot)
            if last_use[slot] >= pinned_since:
                push_newest(s.prev, s.next, sentinel, slot)
                pinned += 1
                continue
            pinned = 0
            if s.used[slot]:
                s.used[slot] = False
                push_newest(s.prev, s.next, sentinel, slot)
            else:
                victims[count] = slot
                count += 1
                s.resident[0] -= 1
        return count
