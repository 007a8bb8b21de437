"""S3-FIFO."""

from __future__ import annotations

import numpy as np
from numba import njit

from cache_policies import ghosts
from cache_policies.lists import fetch_oldest, new_lists, push_newest, unlink
from cache_policies.policy import Policy

_MOST_USES = 3
_USES_FOR_MAIN = 2


@njit(error_model="numpy", forceinline=True)
def _evict_small(s, last, last_use, pinned_since):
    """Go on behind slot ``last`` (the sentinel: from the oldest): (victim or -1, last pinned slot seen).

    Rows used twice since they came move to the main queue on the way.
    """
    sentinel = s.uses.size
    while s.next[last] != sentinel:
        slot = s.next[last]
        if last_use[slot] >= pinned_since:
            last = slot
            continue
        unlink(s.prev, s.next, slot)
        s.length[0] -= 1
        if s.uses[slot] < _USES_FOR_MAIN:
            ghosts.remember(s, s.key[slot], 0)
            return slot, last
        s.uses[slot] = 0
        s.in_main[slot] = True
        s.length[1] += 1
        push_newest(s.prev, s.next, sentinel + 1, slot)
    return np.int32(-1), last


@njit(error_model="numpy", forceinline=True)
def _evict_main(s, last, last_use, pinned_since):
    """As ``_evict_small``; rows used since they came by here last go to the end of the queue, once per
    use.
    """
    sentinel = s.uses.size + 1
    while s.next[last] != sentinel:
        slot = s.next[last]
        if last_use[slot] >= pinned_since:
            last = slot
            continue
        unlink(s.prev, s.next, slot)
        if s.uses[slot] == 0:
            s.length[1] -= 1
            return slot, last
        s.uses[slot] -= 1
        push_newest(s.prev, s.next, sentinel, slot)
    return np.int32(-1), last


@njit(error_model="numpy", forceinline=True)
def _returns(s, key):
    """Whether a missed row was evicted lately; its ghost has served its turn."""
    ghost = ghosts.find(s, key)
    if ghost == ghosts.NO_GHOST:
        return False
    ghosts.forget(s, ghost)
    return True


@njit(error_model="numpy")
def _fetch_victims(s, n, last_use):
    """What evicting ``n`` rows will most likely read."""
    if s.length[1] > s.uses.size - s.small[0]:
        fetch_oldest(s.prev, s.next, s.uses.size + 1, n, s.uses)
    else:
        ghosts.fetch_oldest_slots(s, s.uses.size, n, last_use)
        ghosts.fetch_oldest_ghosts(s, 0, n)


class S3Fifo(Policy):
    """A small queue that most rows leave soon, a main queue for those used in it, and a memory of those that
    left.

    Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. Choices that the paper leaves
    open are those of its authors' simulator: the small queue has 10 % of the slots; rows used twice move to
    the main queue, and start again there without uses; the ghost queue has 90 % as many keys as there are
    slots; before the first eviction, rows that the small queue has no room for go to the main one. Pinned
    rows keep their place.
    """

    name = "s3_fifo"

    def __init__(self, small: float = 0.1, ghost: float = 0.9) -> None:
        self.small = small
        self.ghost = ghost

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        prev, next_ = new_lists(capacity, 2)
        return {
            "prev": prev,
            "next": next_,
            "uses": np.zeros(capacity, np.uint8),
            "in_main": np.zeros(capacity, np.bool_),
            "key": np.zeros(capacity, np.uint64),
            **ghosts.new_recollection(capacity),
            "small": np.array([int(capacity * self.small)]),  # slots
            "length": np.zeros(2, np.int64),
            "evicted": np.zeros(1, np.bool_),
            **ghosts.new_ghosts(max(1, int(capacity * self.ghost)), 1),
        }

    @staticmethod
    def admit(s, keys, now, admitted):
        n = 0
        for i in range(keys.size):
            ghosts.fetch_next(s, keys, i)
            if admitted[i]:
                ghosts.note(s, n, _returns(s, keys[i]))
                n += 1

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        for slot in slots:
            s.uses[slot] = min(s.uses[slot] + 1, _MOST_USES)

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for i in range(slots.size):
            slot = slots[i]
            filling = not s.evicted[0] and s.length[0] >= s.small[0]
            returns = ghosts.recall(s, i)
            if returns == ghosts.UNASKED:
                returns = np.uint8(_returns(s, keys[i]))
            queue = 1 if filling or returns else 0
            push_newest(s.prev, s.next, s.uses.size + queue, slot)
            s.length[queue] += 1
            s.in_main[slot] = queue == 1
            s.uses[slot] = 0
            s.key[slot] = keys[i]
        s.misses[0] = 0

    @staticmethod
    def remove(s, slots):
        for slot in slots:
            unlink(s.prev, s.next, slot)
            s.length[1 if s.in_main[slot] else 0] -= 1

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        capacity = s.uses.size
        s.evicted[0] = True
        if n > 1:
            _fetch_victims(s, n, last_use)
        small, main = np.int32(capacity), np.int32(capacity + 1)
        count = 0
        while count < n:
            slot = np.int32(-1)
            from_main = s.length[1] > capacity - s.small[0] or s.next[small] == capacity
            if not from_main:
                slot, small = _evict_small(s, small, last_use, pinned_since)
                if slot < 0:
                    continue  # all that it had moved to the main queue, or is pinned
            if slot < 0:
                slot, main = _evict_main(s, main, last_use, pinned_since)
            if slot < 0:
                slot, small = _evict_small(s, small, last_use, pinned_since)
            if slot < 0:
                break
            victims[count] = slot
            count += 1
        return count
