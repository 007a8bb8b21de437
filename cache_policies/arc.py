"""ARC, the adaptive replacement cache."""

from __future__ import annotations

import numpy as np

from cache_policies import ghosts
from cache_policies.inner import called, inlined
from cache_policies.lists import fetch, new_lists, push_newest, unlink
from cache_policies.policy import Policy

_ONCE, _OFTEN = 0, 1  # T1, T2 of the paper; as lists of ghosts B1, B2
_NEW, _WAS_ONCE, _WAS_OFTEN = 0, 1, 2  # the list in which a missed row was a ghost


@inlined
def _replace(s, once, prefer_once, last_use, pinned_since, leaves_ghost):
    """Evict the least recently used row of T1 (which counts ``once`` rows) or T2; -1 if all are pinned."""
    capacity = s.key.size
    target = s.target[0]
    queue = _ONCE if once > 0 and (once > target or (once == target and prefer_once)) else _OFTEN
    for _ in range(2):
        slot = s.next[capacity + queue]
        if slot < capacity and last_use[slot] < pinned_since:
            unlink(s.prev, s.next, slot)
            s.length[queue] -= 1
            if leaves_ghost:
                ghosts.remember(s, s.key[slot], queue)
            return slot
        queue = 1 - queue
    return np.int32(-1)


@called
def _fetch_victims(s, n, last_use):
    """Prefetch what evicting ``n`` rows will most likely read."""
    queue = _ONCE if s.length[_ONCE] > s.target[0] else _OFTEN
    ghosts.fetch_oldest_slots(s, s.key.size + queue, n, last_use)


@inlined
def _adapt(s, key):
    """Return the list in which a missed row was a ghost; shift the balance if a longer list would have kept
    the row."""
    ghost = ghosts.find(s, key)
    if ghost == ghosts.NO_GHOST:
        return _NEW
    once, often = s.ghost_size[_ONCE], s.ghost_size[_OFTEN]
    if s.ghost_list[ghost] == _ONCE:
        known = _WAS_ONCE
        s.target[0] = min(float(s.key.size), s.target[0] + max(1.0, often / once))
    else:
        known = _WAS_OFTEN
        s.target[0] = max(0.0, s.target[0] - max(1.0, once / often))
    ghosts.forget(s, ghost)
    return known


class Arc(Policy):
    """One LRU list of rows used once, one of rows used more often; misses of rows that either evicted lately
    shift the balance between the lists.

    Megiddo, Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. The shares shift by whole
    rows. The rows of one batch are taken one after another, except that all misses adapt the balance before
    the first victim is chosen. A list whose least recent row is pinned leaves the choice to the other.
    """

    name = "arc"

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        prev, next_ = new_lists(capacity, 2)
        return {
            "prev": prev,
            "next": next_,
            "often": np.zeros(capacity, np.bool_),
            "key": np.zeros(capacity, np.uint64),
            **ghosts.new_recollection(capacity),
            "incoming": np.zeros(2, np.int64),  # rows of this plan that T1 and T2 will have got
            "length": np.zeros(2, np.int64),
            "target": np.zeros(1, np.float64),  # rows that T1 should have
            **ghosts.new_ghosts(capacity, 2),
        }

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        capacity = s.key.size
        for i in range(slots.size):
            fetch(s.prev, s.next, slots, i)
            slot = slots[i]
            unlink(s.prev, s.next, slot)
            push_newest(s.prev, s.next, capacity + _OFTEN, slot)
            if not s.often[slot]:
                s.often[slot] = True
                s.length[_ONCE] -= 1
                s.length[_OFTEN] += 1

    @staticmethod
    def admit(s, keys, now, admitted):
        n = 0
        for i in range(keys.size):
            ghosts.fetch_next(s, keys, i)
            if admitted[i]:
                ghosts.note(s, n, _adapt(s, keys[i]))
                n += 1

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for i in range(slots.size):
            slot = slots[i]
            known = np.int64(ghosts.recall(s, i))
            if known == ghosts.UNASKED:
                known = np.int64(_adapt(s, keys[i]))
            queue = _ONCE if known == _NEW else _OFTEN
            push_newest(s.prev, s.next, s.key.size + queue, slot)
            s.length[queue] += 1
            s.often[slot] = queue == _OFTEN
            s.key[slot] = keys[i]
        s.misses[0] = 0

    @staticmethod
    def remove(s, slots):
        for slot in slots:
            unlink(s.prev, s.next, slot)
            s.length[_OFTEN if s.often[slot] else _ONCE] -= 1

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        capacity = s.key.size
        if n > 1:
            _fetch_victims(s, n, last_use)
        s.incoming[:] = 0
        first = max(0, s.misses[0] - n)  # earlier misses found free slots, or victims in an earlier call
        for i in range(first):
            s.incoming[_ONCE if s.known[i] == _NEW else _OFTEN] += 1
        for count in range(n):
            known = s.known[first + count] if first + count < s.misses[0] else np.uint8(_NEW)
            once = s.length[_ONCE] + s.incoming[_ONCE]
            leaves_ghost = True
            if known == _NEW:
                seen_once = once + s.ghost_size[_ONCE]
                seen = seen_once + s.length[_OFTEN] + s.incoming[_OFTEN] + s.ghost_size[_OFTEN]
                if seen_once >= capacity:
                    leaves_ghost = s.ghost_size[_ONCE] > 0
                    if leaves_ghost:
                        ghosts.forget(s, ghosts.oldest(s, _ONCE))
                    else:
                        once = capacity + 1  # T1 fills the cache: its oldest row goes, whatever share T1 has
                elif seen >= 2 * capacity and s.ghost_size[_OFTEN] > 0:
                    ghosts.forget(s, ghosts.oldest(s, _OFTEN))
            slot = _replace(s, once, known == _WAS_OFTEN, last_use, pinned_since, leaves_ghost)
            if slot < 0:
                return count
            victims[count] = slot
            s.incoming[_ONCE if known == _NEW else _OFTEN] += 1
        return n
