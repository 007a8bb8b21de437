"""Keys of rows that were evicted, in lists with the oldest first: what ARC and S3-FIFO remember of the past.

A policy merges ``new_ghosts`` into its state and passes the state to the functions here. Lists are numbered
from 0.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cache_policies import hashing
from cache_policies.lists import new_lists, push_newest, unlink

NO_GHOST = -1


def new_ghosts(entries: int, lists: int) -> dict[str, np.ndarray]:
    """Arrays for at most ``entries`` (at least one) ghosts in ``lists`` lists."""
    prev, next_ = new_lists(entries, lists + 1)
    return {
        "ghost_key": np.zeros(entries, np.uint64),
        "ghost_list": np.zeros(entries, np.uint8),
        "ghost_prev": prev,
        "ghost_next": next_,  # sentinels: the lists, then free entries
        "ghost_size": np.zeros(lists + 1, np.int64),
        "ghost_fresh": np.zeros(1, np.int64),  # entries from here on were never used
        "ghost_table": hashing.new_table(entries),
    }


@njit(error_model="numpy", forceinline=True)
def find(s, key):
    """The ghost of ``key``, or ``NO_GHOST``."""
    return np.int64(s.ghost_table[hashing.find(s.ghost_table, s.ghost_key, key)]) - 1


@njit(error_model="numpy", forceinline=True)
def oldest(s, list_):
    """The oldest ghost of a list that is not empty."""
    return np.int64(s.ghost_next[s.ghost_key.size + list_])


@njit(error_model="numpy", forceinline=True)
def _move(s, ghost, list_):
    unlink(s.ghost_prev, s.ghost_next, ghost)
    s.ghost_size[s.ghost_list[ghost]] -= 1
    _join(s, ghost, list_)


@njit(error_model="numpy", forceinline=True)
def _join(s, ghost, list_):
    push_newest(s.ghost_prev, s.ghost_next, s.ghost_key.size + list_, ghost)
    s.ghost_list[ghost] = list_
    s.ghost_size[list_] += 1


@njit(error_model="numpy", forceinline=True)
def forget(s, ghost):
    hashing.erase(s.ghost_table, s.ghost_key, s.ghost_key[ghost])
    _move(s, ghost, s.ghost_size.size - 1)  # to the free entries


@njit(error_model="numpy", forceinline=True)
def remember(s, key, list_):
    """``key`` becomes the newest ghost of a list. If all entries are in use, the oldest ghost of that list
    (or, if it has none, of the first list that has) is forgotten.
    """
    ghost = find(s, key)
    if ghost != NO_GHOST:
        _move(s, ghost, list_)
        return
    free = s.ghost_size.size - 1
    if s.ghost_size[free] == 0 and s.ghost_fresh[0] == s.ghost_key.size:
        crowded = list_
        for other in range(free):
            if s.ghost_size[crowded] == 0:
                crowded = other
        forget(s, oldest(s, crowded))
    if s.ghost_size[free] > 0:
        ghost = oldest(s, free)
        unlink(s.ghost_prev, s.ghost_next, ghost)
        s.ghost_size[free] -= 1
    else:
        ghost = s.ghost_fresh[0]
        s.ghost_fresh[0] += 1
    s.ghost_key[ghost] = key
    s.ghost_table[hashing.find(s.ghost_table, s.ghost_key, key)] = ghost + 1
    _join(s, ghost, list_)
