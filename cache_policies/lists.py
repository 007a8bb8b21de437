"""Intrusive circular doubly linked lists over flat int32 arrays.

Node ``i`` of a list is a slot; a list's head is a sentinel node with an index behind the slots.
``next[sentinel]`` is the oldest element, ``prev[sentinel]`` the newest, and both are the sentinel when the
list is empty.
"""

from __future__ import annotations

import numpy as np

from cache_policies.inner import inlined
from cache_policies.prefetch import AHEAD, prefetch


def new_lists(capacity: int, lists: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(prev, next)`` of ``capacity`` slots and of ``lists`` empty lists' sentinels behind them."""
    prev = np.zeros(capacity + lists, np.int32)
    next_ = np.zeros(capacity + lists, np.int32)
    prev[capacity:] = next_[capacity:] = np.arange(capacity, capacity + lists, dtype=np.int32)
    return prev, next_


@inlined
def unlink(prev, next, node):
    before, after = prev[node], next[node]
    next[before] = after
    prev[after] = before


@inlined
def push_newest(prev, next, sentinel, node):
    newest = prev[sentinel]
    prev[node] = newest
    next[node] = sentinel
    next[newest] = node
    prev[sentinel] = node


@inlined
def push_oldest(prev, next, sentinel, node):
    oldest = next[sentinel]
    next[node] = oldest
    prev[node] = sentinel
    prev[oldest] = node
    next[sentinel] = node


@inlined
def fetch(prev, next, slots, i):
    """Prefetch for ``slots`` that are about to leave their place in a list; call it for each ``i``."""
    if i + 2 * AHEAD < slots.size:
        prefetch(prev, slots[i + 2 * AHEAD])
        prefetch(next, slots[i + 2 * AHEAD])
        slot = slots[i + AHEAD]
        prefetch(next, prev[slot])
        prefetch(prev, next[slot])


@inlined
def fetch_oldest(prev, next, sentinel, n, array):
    """Prefetch ``array`` and the neighbours of the ``n`` oldest of a list into the processor's cache."""
    node = next[sentinel]
    for _ in range(n):
        if node == sentinel:
            break
        prefetch(array, node)
        prefetch(prev, node)
        node = next[node]
