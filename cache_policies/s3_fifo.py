"""S3-FIFO."""

from __future__ import annotations

import numpy as np

from cache_policies import ghosts, queues
from cache_policies.inner import inlined
from cache_policies.policy import Policy
from cache_policies.prefetch import AHEAD, prefetch

_SMALL, _MAIN = 0, 1  # queues
_MAX_USES = 3
_USES_FOR_MAIN = 2


@inlined
def _fetch(s, queue, last_use):
    """Prefetch what looking at the next slots of a queue will read."""
    slot = queues.upcoming(s, queue, 2 * AHEAD)
    prefetch(s.place, slot)
    prefetch(s.uses, slot)
    prefetch(last_use, slot)
    if queue == _SMALL:
        prefetch(s.key, slot)
        ghosts.fetch(s, s.key[queues.upcoming(s, queue, AHEAD)])


@inlined
def _evict_small(s, last_use, pinned_since):
    """Return the next victim of the small queue, ``NO_SLOT`` if there is none.

    Rows used twice since they came move to the main queue on the way.
    """
    slot = queues.look(s, _SMALL)
    while slot != queues.NO_SLOT:
        _fetch(s, _SMALL, last_use)
        if last_use[slot] >= pinned_since:
            queues.keep(s, _SMALL, slot)
        else:
            queues.take(s, _SMALL, slot)
            if s.uses[slot] < _USES_FOR_MAIN:
                ghosts.remember(s, s.key[slot], 0)
                break
            s.uses[slot] = 0
            queues.push(s, _MAIN, slot)
        slot = queues.look(s, _SMALL)
    return slot


@inlined
def _evict_main(s, last_use, pinned_since):
    """Return the next victim of the main queue, ``NO_SLOT`` if there is none.

    A row used since it came by here last goes to the end of the queue, once per use.
    """
    slot = queues.look(s, _MAIN)
    while slot != queues.NO_SLOT:
        _fetch(s, _MAIN, last_use)
        if last_use[slot] >= pinned_since:
            queues.keep(s, _MAIN, slot)
        else:
            queues.take(s, _MAIN, slot)
            if s.uses[slot] == 0:
                break
            s.uses[slot] -= 1
            queues.push(s, _MAIN, slot)
        slot = queues.look(s, _MAIN)
    return slot


@inlined
def _returns(s, key):
    """Tell whether a missed row was evicted lately, and forget its ghost."""
    ghost = ghosts.find(s, key)
    if ghost == ghosts.NO_GHOST:
        return False
    ghosts.forget(s, ghost)
    return True


class S3Fifo(Policy):
    """A small queue that most rows leave soon, a main queue for its used rows, and ghosts of evicted rows.

    Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. Where the paper leaves a choice
    open, this policy does as its authors' simulator: the small queue has 10 % of the slots; rows used twice
    move to the main queue, and start again there without uses; the ghost queue has 90 % as many keys
    as there are slots; before the first eviction, rows that the small queue has no room for go to the main
    queue. Pinned rows keep their place.
    """

    name = "s3_fifo"

    def __init__(self, small: float = 0.1, ghost: float = 0.9) -> None:
        self.small = small
        self.ghost = ghost

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        return {
            **queues.new_queues(capacity),
            "uses": np.zeros(capacity, np.uint8),
            "key": np.zeros(capacity, np.uint64),
            **ghosts.new_recollection(capacity),
            "small": np.array([int(capacity * self.small)]),  # slots
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
        for i in range(slots.size):
            if i + AHEAD < slots.size:
                prefetch(s.uses, slots[i + AHEAD])
            s.uses[slots[i]] = min(s.uses[slots[i]] + 1, _MAX_USES)

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for i in range(slots.size):
            slot = slots[i]
            filling = not s.evicted[0] and s.length[_SMALL] >= s.small[0]
            returns = ghosts.recall(s, i)
            if returns == ghosts.UNASKED:
                returns = np.uint8(_returns(s, keys[i]))
            queues.push(s, _MAIN if filling or returns else _SMALL, slot)
            s.uses[slot] = 0
            s.key[slot] = keys[i]
        s.misses[0] = 0

    @staticmethod
    def remove(s, slots):
        for slot in slots:
            queues.drop(s, slot)

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        max_in_main = s.uses.size - s.small[0]
        s.evicted[0] = True
        count = 0
        while count < n:
            from_small = s.length[_MAIN] <= max_in_main and queues.look(s, _SMALL) != queues.NO_SLOT
            if from_small:
                slot = _evict_small(s, last_use, pinned_since)
                if slot == queues.NO_SLOT:
                    continue  # all its rows moved to the main queue, or are pinned
            else:
                slot = _evict_main(s, last_use, pinned_since)
                if slot == queues.NO_SLOT:
                    slot = _evict_small(s, last_use, pinned_since)
                if slot == queues.NO_SLOT:
                    break
            victims[count] = slot
            count += 1
        queues.finish(s)
        return count
