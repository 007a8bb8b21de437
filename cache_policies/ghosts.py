"""Keys of rows that were evicted, by age, which ARC and S3-FIFO remember.

A policy merges ``new_ghosts`` into its state and passes the state to the functions here. Ghosts are in lists,
numbered from 0, each with an oldest; a key is a ghost at most once: policies forget a row's ghost when the
row comes back.

All lists share one ring in order of age, in which a forgotten ghost leaves a gap: the next to go are read in
order and fetched ahead. The ring has half as many entries again as there may be ghosts; when it is full, gaps
are closed. Ghosts are found by open addressing in ``ghost_table``, whose words hold 32 bits of the key's hash
beside the entry's number: probing and erasing read no keys but the one that is looked for.
"""

from __future__ import annotations

import numpy as np

from cache_policies.hashing import mix
from cache_policies.inner import called, inlined
from cache_policies.lists import fetch_oldest
from cache_policies.prefetch import AHEAD, prefetch

NO_GHOST = -1
UNASKED = 255  # recalled for a row that did not pass ``admit``
_GAP = 255
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def new_ghosts(capacity: int, lists: int) -> dict[str, np.ndarray]:
    """Return empty arrays for ``capacity`` (at least one) ghosts in ``lists`` (at most 255) lists."""
    room = capacity + capacity // 2 + AHEAD
    return {
        "ghost_key": np.zeros(room, np.uint64),
        "ghost_list": np.full(room, _GAP, np.uint8),
        "ghost_size": np.zeros(lists, np.int64),
        # Positions in the ring, which count on where it wraps: of each list one that is no younger than its
        # oldest ghost, the end, and how far that may go.
        "ghost_first": np.zeros(lists, np.int64),
        "ghost_end": np.zeros(1, np.int64),
        "ghost_full": np.array([room]),
        "ghost_capacity": np.array([capacity]),
        "ghost_table": np.zeros(capacity + 3 * capacity // 4 + 2, np.uint64),  # hash, entry + 1; 0: empty
    }


@inlined
def _home(table, word):
    return np.int64(((word >> _HALF) * np.uint64(table.size)) >> _HALF)


@inlined
def _after(table, at):
    return at + 1 if at + 1 < table.size else 0


@inlined
def _entry(s, position):
    room = s.ghost_key.size
    return position - room if position >= room else position


@inlined
def fetch(s, key):
    """Prefetch for ``key``, which will be looked for, remembered or forgotten soon."""
    prefetch(s.ghost_table, _home(s.ghost_table, mix(key)))


@inlined
def fetch_next(s, keys, i):
    """Prefetch for the lookup of ``keys``; call it for each ``i``."""
    if i + 2 * AHEAD < keys.size:
        fetch(s, keys[i + 2 * AHEAD])
        word = s.ghost_table[_home(s.ghost_table, mix(keys[i + AHEAD]))]
        prefetch(s.ghost_key, np.int64(word & _LOW) - 1)
        prefetch(s.ghost_list, np.int64(word & _LOW) - 1)


@inlined
def fetch_oldest_slots(s, sentinel, n, last_use):
    """Prefetch the ``n`` oldest slots of a list of the policy, which will become ghosts soon."""
    fetch_oldest(s.prev, s.next, sentinel, n, s.key)
    slot = s.next[sentinel]
    for _ in range(n):
        if slot == sentinel:
            break
        prefetch(last_use, slot)
        fetch(s, s.key[slot])
        slot = s.next[slot]


@inlined
def find(s, key):
    """Return the ghost of ``key``, or ``NO_GHOST``."""
    hash_ = mix(key)
    at = _home(s.ghost_table, hash_)
    while True:
        word = s.ghost_table[at]
        if word == 0:
            return NO_GHOST
        if word >> _HALF == hash_ >> _HALF:
            ghost = np.int64(word & _LOW) - 1
            if s.ghost_key[ghost] == key:
                return ghost
        at = _after(s.ghost_table, at)


@inlined
def oldest(s, list_):
    """Return the oldest ghost of a list that is not empty."""
    position = s.ghost_first[list_]
    while s.ghost_list[_entry(s, position)] != list_:
        position += 1
    s.ghost_first[list_] = position
    fetch(s, s.ghost_key[_entry(s, min(position + AHEAD, s.ghost_end[0]))])
    return _entry(s, position)


@inlined
def _word_of(s, ghost):
    """Return where a ghost is in the table."""
    at = _home(s.ghost_table, mix(s.ghost_key[ghost]))
    while np.int64(s.ghost_table[at] & _LOW) != ghost + 1:
        at = _after(s.ghost_table, at)
    return at


@inlined
def _erase(s, ghost):
    """Take a ghost out of the table, and move later entries of its run back."""
    table = s.ghost_table
    hole = _word_of(s, ghost)
    at = _after(table, hole)
    while table[at] != 0:
        home = _home(table, table[at])
        if (at - home if at >= home else at - home + table.size) >= (
            at - hole if at >= hole else at - hole + table.size
        ):
            table[hole] = table[at]
            hole = at
        at = _after(table, at)
    table[hole] = 0


@inlined
def forget(s, ghost):
    _erase(s, ghost)
    s.ghost_size[s.ghost_list[ghost]] -= 1
    s.ghost_list[ghost] = _GAP


@inlined
def _crowded(s, list_):
    """Return the list whose oldest ghost makes room for one more in ``list_``."""
    for other in range(s.ghost_size.size):
        if s.ghost_size[list_] == 0:
            list_ = other
    return list_


@called
def _make_room(s):
    """Free entries at the ring's end, if need be by closing gaps."""
    room, start = s.ghost_key.size, s.ghost_end[0]
    for list_ in range(s.ghost_size.size):
        if s.ghost_size[list_] > 0:
            oldest(s, list_)
            start = min(start, s.ghost_first[list_])
    if s.ghost_end[0] - start == room:
        _close_gaps(s, start)
    wrapped = room if start >= room else 0
    for list_ in range(s.ghost_size.size):
        s.ghost_first[list_] = max(start, s.ghost_first[list_]) - wrapped
    s.ghost_end[0] -= wrapped
    s.ghost_full[0] = start - wrapped + room


@called
def _close_gaps(s, start):
    end, to = s.ghost_end[0], start
    for position in range(start, end):
        fetch(s, s.ghost_key[_entry(s, min(position + AHEAD, end - 1))])
        old, new = _entry(s, position), _entry(s, to)
        if s.ghost_list[old] == _GAP:
            continue
        if new != old:
            at = _word_of(s, old)
            s.ghost_table[at] = (s.ghost_table[at] & ~_LOW) | np.uint64(new + 1)
            s.ghost_key[new], s.ghost_list[new] = s.ghost_key[old], s.ghost_list[old]
            s.ghost_list[old] = _GAP
        to += 1
    s.ghost_first[:] = start
    s.ghost_end[0] = to


@inlined
def remember(s, key, list_):
    """Make ``key``, which is no ghost, the newest ghost of a list.

    If all ghosts are in use, the oldest ghost of the list is forgotten, or of the first list that has a
    ghost.
    """
    if s.ghost_size.sum() == s.ghost_capacity[0]:
        forget(s, oldest(s, _crowded(s, list_)))
    if s.ghost_end[0] == s.ghost_full[0]:
        _make_room(s)
    ghost = _entry(s, s.ghost_end[0])
    s.ghost_end[0] += 1
    s.ghost_key[ghost] = key
    s.ghost_list[ghost] = list_
    s.ghost_size[list_] += 1
    hash_ = mix(key)
    at = _home(s.ghost_table, hash_)
    while s.ghost_table[at] != 0:
        at = _after(s.ghost_table, at)
    s.ghost_table[at] = (hash_ & ~_LOW) | np.uint64(ghost + 1)


def new_recollection(capacity: int) -> dict[str, np.ndarray]:
    """Return arrays in which ``admit`` leaves a number (0 to 254) for each row that it admits.

    ``evict`` and ``insert`` of the same plan read the numbers. The arrays stay empty if the engine never
    calls ``admit``.
    """
    return {
        "known": np.zeros(capacity, np.uint8),  # of the admitted misses of this plan, in order
        "misses": np.zeros(1, np.int64),
        "asked": np.zeros(1, np.bool_),
    }


@inlined
def note(s, i, known):
    """Note a number of the ``i``-th admitted miss; misses past the capacity get no slot anyway."""
    s.asked[0] = True
    s.misses[0] = min(i + 1, s.known.size)
    if i < s.known.size:
        s.known[i] = known


@inlined
def recall(s, i):
    """Return the number that ``admit`` noted for the ``i``-th inserted row: 0 for nothing, ``UNASKED``
    without ``admit``."""
    if not s.asked[0]:
        return np.uint8(UNASKED)
    return s.known[i] if i < s.misses[0] else np.uint8(0)
