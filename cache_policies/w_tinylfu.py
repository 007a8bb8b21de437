"""W-TinyLFU."""

from __future__ import annotations

import numpy as np

from cache_policies import lists
from cache_policies.hashing import mix
from cache_policies.inner import called, inlined
from cache_policies.lists import new_lists, push_newest, unlink
from cache_policies.policy import Policy
from cache_policies.prefetch import AHEAD, prefetch

_WINDOW, _PROBATION, _PROTECTED = 0, 1, 2
_ROWS = 4  # of the sketch
_MAX_COUNT = 15  # counters have four bits
_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)
_SAMPLE = 10  # uses per slot between halvings


@inlined
def _counter(hash_, row, width):
    """Return which of a row's ``width`` counters belongs to a 32-bit hash."""
    word = ((np.uint64(hash_) + np.uint64(1)) * _MULTIPLIERS[row]) >> np.uint64(32)
    return row * width + np.int64((word * np.uint64(width)) >> np.uint64(32))


@inlined
def _hash(key):
    return np.uint32(mix(key) >> np.uint64(32))


@inlined
def _fetch_counters(s, hash_):
    width = 2 * s.sketch.size // _ROWS
    for row in range(_ROWS):
        prefetch(s.sketch, _counter(hash_, row, width) >> 1)


@called
def _fetch_candidates(s, n):
    """Prefetch what comparing ``n`` rows of the window and of probation will read."""
    for queue in (_WINDOW, _PROBATION):
        sentinel = s.hash.size + queue
        lists.fetch_oldest(s.prev, s.next, sentinel, n, s.hash)
        slot = s.next[sentinel]
        for _ in range(min(n, s.length[_WINDOW])):  # only rows of the window are compared with other rows
            if slot == sentinel:
                break
            _fetch_counters(s, s.hash[slot])
            slot = s.next[slot]


@inlined
def _estimate(s, hash_):
    width = 2 * s.sketch.size // _ROWS
    lowest = _MAX_COUNT
    for row in range(_ROWS):
        at = _counter(hash_, row, width)
        lowest = min(lowest, (s.sketch[at >> 1] >> ((at & 1) * 4)) & _MAX_COUNT)
    return lowest


@inlined
def _count(s, hash_):
    width = 2 * s.sketch.size // _ROWS
    for row in range(_ROWS):
        at = _counter(hash_, row, width)
        shift = (at & 1) * 4
        if (s.sketch[at >> 1] >> shift) & _MAX_COUNT < _MAX_COUNT:
            s.sketch[at >> 1] += np.uint8(1 << shift)
    s.counted[0] += 1
    if s.counted[0] >= _SAMPLE * s.hash.size:
        s.counted[0] //= 2
        for i in range(s.sketch.size):
            s.sketch[i] = (s.sketch[i] >> 1) & 0x77


@inlined
def _join(s, slot, queue):
    push_newest(s.prev, s.next, s.hash.size + queue, slot)
    s.queue[slot] = queue
    s.length[queue] += 1


@inlined
def _leave(s, slot):
    unlink(s.prev, s.next, slot)
    s.length[s.queue[slot]] -= 1


@inlined
def _oldest(s, queue, last_use, pinned_since):
    """Return the oldest unpinned slot of a list, or the list's sentinel.

    The search goes on behind the pinned slots that it saw in the same call of ``evict``.
    """
    slot = s.next[s.behind[queue]]
    while slot != s.hash.size + queue and last_use[slot] >= pinned_since:
        s.behind[queue] = slot
        slot = s.next[slot]
    return slot


@inlined
def _choose(s, incoming, last_use, pinned_since):
    """Return the next victim when the window will get ``incoming`` more rows; -1 if all are pinned."""
    capacity = s.hash.size
    window = capacity + _WINDOW
    main = s.length[_PROBATION] + s.length[_PROTECTED]
    s.behind[_WINDOW] = window  # pinned rows leave the window, unlike the other lists
    while s.length[_WINDOW] > 0 and s.length[_WINDOW] + incoming >= s.share[_WINDOW] and main < s.main[0]:
        slot = s.next[window]
        _leave(s, slot)
        _join(s, slot, _PROBATION)
        main += 1
    victim = np.int32(capacity)
    for queue in (_PROBATION, _PROTECTED):
        if victim >= capacity:
            victim = _oldest(s, queue, last_use, pinned_since)
    if s.length[_WINDOW] > 0 and s.length[_WINDOW] + incoming >= s.share[_WINDOW]:
        candidate = s.next[window]
        pinned = last_use[candidate] >= pinned_since
        if victim >= capacity:
            victim = _oldest(s, _WINDOW, last_use, pinned_since)
        elif pinned or _estimate(s, s.hash[candidate]) > _estimate(s, s.hash[victim]):
            _leave(s, candidate)
            _join(s, candidate, _PROBATION)
        else:
            victim = candidate
    elif victim >= capacity:
        victim = _oldest(s, _WINDOW, last_use, pinned_since)
    if victim >= capacity:
        return np.int32(-1)
    _leave(s, victim)
    return victim


class WTinyLfu(Policy):
    """New rows pass a small LRU window; then the window's oldest row and the main part's next victim are
    compared by how often they were used lately, and the rarer one leaves.

    Einziger, Friedman, Manes, "TinyLFU: a highly efficient cache admission policy", ACM ToS 2017: a window of
    1 % of the slots, a segmented LRU of 20 % probation and 80 % protected rows, and a sketch of four rows of
    4-bit counters (16 per slot, halved after ten uses per slot) that also remembers rows which are not
    resident. The main part takes rows without contest while it has room. Ties keep the main part's row.
    """

    name = "w_tinylfu"

    def __init__(self, window: float = 0.01, protected: float = 0.8) -> None:
        self.window = window
        self.protected = protected

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        prev, next_ = new_lists(capacity, 3)
        window = max(1, int(capacity * self.window))
        main = capacity - window
        return {
            "prev": prev,
            "next": next_,
            "queue": np.zeros(capacity, np.uint8),
            "hash": np.zeros(capacity, np.uint32),
            "sketch": np.zeros(8 * capacity, np.uint8),
            "counted": np.zeros(1, np.int64),
            "length": np.zeros(3, np.int64),
            "share": np.array([window, 0, int(main * self.protected)]),
            "main": np.array([main]),
            "behind": np.zeros(3, np.int32),
        }

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        capacity = s.hash.size
        for i in range(slots.size):
            lists.fetch(s.prev, s.next, slots, i)
            if i + 2 * AHEAD < slots.size:
                prefetch(s.hash, slots[i + 2 * AHEAD])
                _fetch_counters(s, s.hash[slots[i + AHEAD]])
            slot = slots[i]
            _count(s, s.hash[slot])
            queue = s.queue[slot]
            _leave(s, slot)
            _join(s, slot, _WINDOW if queue == _WINDOW else _PROTECTED)
            if s.length[_PROTECTED] > s.share[_PROTECTED]:
                demoted = s.next[capacity + _PROTECTED]
                _leave(s, demoted)
                _join(s, demoted, _PROBATION)

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for i in range(slots.size):
            if i + AHEAD < slots.size:
                _fetch_counters(s, _hash(keys[i + AHEAD]))
            slot = slots[i]
            s.hash[slot] = _hash(keys[i])
            _count(s, s.hash[slot])
            _join(s, slot, _WINDOW)

    @staticmethod
    def remove(s, slots):
        for slot in slots:
            _leave(s, slot)

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        if n > 1:
            _fetch_candidates(s, n)
        for queue in range(3):
            s.behind[queue] = s.hash.size + queue
        for count in range(n):
            victim = _choose(s, count, last_use, pinned_since)
            if victim < 0:
                return count
            victims[count] = victim
        return n
