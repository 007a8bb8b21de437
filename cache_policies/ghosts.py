"""Keys of rows that were evicted, in lists with the oldest first: what ARC and S3-FIFO remember of the past.

A policy merges ``new_ghosts`` into its state and passes the state to the functions here. Lists are numbered
from 0. A key is a ghost at most once: policies forget a row's ghost when the row comes back.

Ghosts are found by open addressing in ``ghost_table``, whose words hold 32 bits of the key's hash beside the
entry's number: probing and erasing read no keys but the one that is looked for.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cache_policies.hashing import mix
from cache_policies.lists import fetch_oldest, new_lists, push_newest, unlink
from cache_policies.prefetch import prefetch

NO_GHOST = -1
UNASKED = 255  # recalled of a row that admit was not asked about
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_AHEAD = 16  # keys between a prefetch and its use


def new_ghosts(entries: int, lists: int) -> dict[str, np.ndarray]:
    """Arrays for at most ``entries`` (at least one) ghosts in ``lists`` lists."""
    prev, next_ = new_lists(entries, lists)
    return {
        "ghost_key": np.zeros(entries, np.uint64),
        "ghost_list": np.zeros(entries, np.uint8),
        "ghost_prev": prev,
        "ghost_next": next_,  # of free entries: the next free one
        "ghost_size": np.zeros(lists, np.int64),
        "ghost_free": np.full(1, -1, np.int32),  # given back last, -1 if there is none
        "ghost_fresh": np.zeros(1, np.int64),  # entries from here on were never used
        "ghost_table": np.zeros(entries + entries // 2 + 2, np.uint64),  # hash, entry + 1; 0: empty
    }


@njit(error_model="numpy", forceinline=True)
def _home(table, word):
    return np.int64(((word >> _HALF) * np.uint64(table.size)) >> _HALF)


@njit(error_model="numpy", forceinline=True)
def _after(table, at):
    return at + 1 if at + 1 < table.size else 0


@njit(error_model="numpy", forceinline=True)
def fetch(s, key):
    """``key`` will be looked for, remembered or forgotten soon."""
    prefetch(s.ghost_table, _home(s.ghost_table, mix(key)))


@njit(error_model="numpy", forceinline=True)
def fetch_next(s, keys, i):
    """Called for every ``i`` of ``keys`` that are looked for."""
    if i + 2 * _AHEAD < keys.size:
        fetch(s, keys[i + 2 * _AHEAD])
        word = s.ghost_table[_home(s.ghost_table, mix(keys[i + _AHEAD]))]
        prefetch(s.ghost_key, np.int64(word & _LOW) - 1)


@njit(error_model="numpy", forceinline=True)
def fetch_oldest_ghosts(s, list_, n):
    """The ``n`` oldest ghosts of a list will be forgotten soon."""
    sentinel = s.ghost_key.size + list_
    fetch_oldest(s.ghost_prev, s.ghost_next, sentinel, n, s.ghost_key)
    ghost = s.ghost_next[sentinel]
    for _ in range(n):
        if ghost == sentinel:
            break
        fetch(s, s.ghost_key[ghost])
        ghost = s.ghost_next[ghost]


@njit(error_model="numpy", forceinline=True)
def fetch_oldest_slots(s, sentinel, n, last_use):
    """The ``n`` oldest slots of a list of the policy will become ghosts soon."""
    fetch_oldest(s.prev, s.next, sentinel, n, s.key)
    slot = s.next[sentinel]
    for _ in range(n):
        if slot == sentinel:
            break
        prefetch(last_use, slot)
        fetch(s, s.key[slot])
        slot = s.next[slot]


@njit(error_model="numpy", forceinline=True)
def find(s, key):
    """The ghost of ``key``, or ``NO_GHOST``."""
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


@njit(error_model="numpy", forceinline=True)
def oldest(s, list_):
    """The oldest ghost of a list that is not empty."""
    return np.int64(s.ghost_next[s.ghost_key.size + list_])


@njit(error_model="numpy", forceinline=True)
def _erase(s, ghost):
    """Takes a ghost out of the table, moving later entries of its run back."""
    table = s.ghost_table
    hole = _home(table, mix(s.ghost_key[ghost]))
    while np.int64(table[hole] & _LOW) != ghost + 1:
        hole = _after(table, hole)
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


@njit(error_model="numpy", forceinline=True)
def _leave(s, ghost):
    _erase(s, ghost)
    unlink(s.ghost_prev, s.ghost_next, ghost)
    s.ghost_size[s.ghost_list[ghost]] -= 1


@njit(error_model="numpy", forceinline=True)
def forget(s, ghost):
    _leave(s, ghost)
    s.ghost_next[ghost] = s.ghost_free[0]
    s.ghost_free[0] = ghost


@njit(error_model="numpy", forceinline=True)
def _room(s, list_):
    """An entry to use: a free one, or that of the oldest ghost of the list (or, if it has none, of the first
    list that has), which is forgotten."""
    ghost = np.int64(s.ghost_free[0])
    if ghost >= 0:
        s.ghost_free[0] = s.ghost_next[ghost]
        return ghost
    if s.ghost_fresh[0] < s.ghost_key.size:
        s.ghost_fresh[0] += 1
        return s.ghost_fresh[0] - 1
    crowded = list_
    for other in range(s.ghost_size.size):
        if s.ghost_size[crowded] == 0:
            crowded = other
    ghost = oldest(s, crowded)
    _leave(s, ghost)
    return ghost


@njit(error_model="numpy", forceinline=True)
def remember(s, key, list_):
    """``key``, which is no ghost, becomes the newest ghost of a list."""
    ghost = _room(s, list_)
    hash_ = mix(key)
    at = _home(s.ghost_table, hash_)
    while s.ghost_table[at] != 0:
        at = _after(s.ghost_table, at)
    s.ghost_table[at] = (hash_ & ~_LOW) | np.uint64(ghost + 1)
    s.ghost_key[ghost] = key
    s.ghost_list[ghost] = list_
    push_newest(s.ghost_prev, s.ghost_next, s.ghost_key.size + list_, ghost)
    s.ghost_size[list_] += 1


def new_recollection(capacity: int) -> dict[str, np.ndarray]:
    """Arrays in which ``admit`` leaves a number (0 to 254) for each row that it admits, so that ``evict`` and
    ``insert`` of the same plan know it; nothing is left if the engine never calls ``admit``.
    """
    return {
        "known": np.zeros(capacity, np.uint8),  # of the admitted misses of this plan, in order
        "misses": np.zeros(1, np.int64),
        "asked": np.zeros(1, np.bool_),
    }


@njit(error_model="numpy", forceinline=True)
def note(s, i, known):
    """Of the ``i``-th admitted miss (those past the capacity get no slot anyway)."""
    s.asked[0] = True
    s.misses[0] = min(i + 1, s.known.size)
    if i < s.known.size:
        s.known[i] = known


@njit(error_model="numpy", forceinline=True)
def recall(s, i):
    """What was noted of the ``i``-th row that is inserted: 0 if nothing, ``UNASKED`` without ``admit``."""
    if not s.asked[0]:
        return np.uint8(UNASKED)
    return s.known[i] if i < s.misses[0] else np.uint8(0)
