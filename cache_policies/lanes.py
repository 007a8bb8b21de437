"""Divides the slots of a large cache into lanes, which the live engine plans side by side.

A hash of a row's key says in which lane the row is. Every lane has a policy of its own, so the number of
lanes decides what is evicted; it depends on the number of slots alone, never on threads. Lanes have so many
slots that hashing loses next to no hits. The native core says the same in ``csrc/cache/tier.h``.

A cache that has room for all rows evicts none, so its lanes decide nothing, and a simulation needs none.
There the row's id says in which lane the row is (``csrc/cache/lane_ids.h``).
"""

from __future__ import annotations

import numpy as np

from cache_policies.disk_cache import compiled
from cache_policies.hashing import mix

LEAST_SLOTS = 1 << 15
"""Slots of a lane, where there is more than one. What a plan reads of such a lane fits a core's second cache,
and tiers of 524,288 slots have a lane for each of 16 threads."""
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


@compiled
def lanes_of(keys, lanes):
    """Return the lane of each key (uint64), as uint8."""
    out = np.empty(keys.size, np.uint8)
    for i in range(keys.size):
        out[i] = ((mix(keys[i]) >> np.uint64(32)) * np.uint64(lanes)) >> np.uint64(32)
    return out
