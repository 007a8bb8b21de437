"""Divides the slots of a large cache into lanes, which the live engine plans side by side.

A hash of a row's key says in which lane the row is. Every lane has a policy of its own, so the number of
lanes decides what is evicted; it depends on the number of slots alone, never on threads. Lanes have so many
slots that hashing loses next to no hits. The native core says the same in ``csrc/cache/tier.h``.

A cache that has room for all rows evicts none, so its lanes decide nothing. There the row's id says in which
lane the row is, so that no lane gets more rows than it has room for.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cache_policies.hashing import mix

LEAST_SLOTS = 1 << 16
"""Slots of a lane, where there is more than one."""
MOST_LANES = 16
MOST_LANES_IN_TIER = 4096
"""A tier of many tables with lanes of their own gives tables beyond this number one lane each: every lane
takes five of the 65,530 mappings that Linux grants a process."""


def lane_slots(slots: int) -> list[int]:
    """Return the slots of each lane of a cache of ``slots`` slots: their number is a power of two."""
    lanes = 1
    while lanes < MOST_LANES and slots >= 2 * lanes * LEAST_SLOTS:
        lanes *= 2
    each, more = divmod(slots, lanes)
    return [each + (lane < more) for lane in range(lanes)]


@njit(nogil=True, cache=True, error_model="numpy")
def lanes_of(keys, lanes):
    """Return the lane of each key (uint64), as uint8."""
    out = np.empty(keys.size, np.uint8)
    for i in range(keys.size):
        out[i] = ((mix(keys[i]) >> np.uint64(32)) * np.uint64(lanes)) >> np.uint64(32)
    return out


def lanes_by_id(ids: NDArray[np.int64], lanes: int) -> NDArray[np.int64]:
    """Return the lane of each id, where rows are divided by their ids: the XOR of the id's digits of 4 bits,
    modulo ``lanes``, which is a power of two. ``csrc/cache/lane_ids.h`` says the same."""
    for bits in (32, 16, 8, 4):
        ids = ids ^ (ids >> bits)
    return ids & (lanes - 1)


def slots_by_id(rows: Iterable[int], lanes: int) -> int:
    """Return the most rows of all tables that one of ``lanes`` lanes by id has, where a table of n rows has
    the ids 0 .. n - 1."""
    slots = np.zeros(lanes, np.int64)
    for n in rows:
        each, rest = divmod(n, lanes)
        slots += each  # every lane has one of ``lanes`` ids that lie side by side
        slots[lanes_by_id(np.arange(n - rest, n), lanes)] += 1
    return int(slots.max())
