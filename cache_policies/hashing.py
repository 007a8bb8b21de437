"""Open addressing from 64-bit keys to numbered entries.

``keys[e]`` is the key of entry ``e``; ``table`` int32 holds ``e + 1`` at or after the key's home, 0 where
empty. The caller numbers the entries and keeps the table at most two thirds full.
"""

from __future__ import annotations

import numpy as np

from cache_policies.inner import inlined


def new_table(entries: int) -> np.ndarray:
    """Return an empty table for at most ``entries`` entries."""
    return np.zeros(entries + entries // 2 + 2, np.int32)


@inlined
def mix(key):
    """Return a 64-bit hash (the finaliser of MurmurHash3)."""
    x = np.uint64(key)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


@inlined
def home(table, key):
    return np.int64(((mix(key) >> np.uint64(32)) * np.uint64(table.size)) >> np.uint64(32))


@inlined
def find(table, keys, key):
    """Return the position in ``table`` of ``key``, or of the empty place where it belongs."""
    at = home(table, key)
    while table[at] != 0 and keys[table[at] - 1] != key:
        at += 1
        if at == table.size:
            at = 0
    return at


@inlined
def erase(table, keys, key):
    """Delete ``key``, which is there, moving later entries of its run back."""
    hole = find(table, keys, key)
    at = hole
    while True:
        at += 1
        if at == table.size:
            at = 0
        if table[at] == 0:
            break
        first = home(table, keys[table[at] - 1])
        if (at - first if at >= first else at - first + table.size) >= (
            at - hole if at >= hole else at - hole + table.size
        ):
            table[hole] = table[at]
            hole = at
    table[hole] = 0
