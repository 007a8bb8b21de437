"""Slots in order of use, as a log: a use is appended, and an entry whose slot was used again later is stale.

Compared with a linked list, a use writes one word beside the log's end, and looking for the oldest reads the
log in order: nothing waits for memory in turn. The log has room for twice as many entries as there are slots;
when it is full, stale entries are dropped, at least half of all.

A policy merges ``new_uses`` into its state and passes the state to the functions here.
"""

from __future__ import annotations

import numpy as np

from cache_policies.inner import called, inlined
from cache_policies.prefetch import AHEAD, prefetch

_GONE = -1


def new_uses(capacity: int) -> dict[str, np.ndarray]:
    """Return arrays for slots ``0 .. capacity - 1``, none of them used."""
    return {
        "use": np.zeros(2 * capacity + AHEAD, np.int32),  # the log: slots
        "used_at": np.full(capacity, _GONE, np.int32),  # per slot: position of its last use
        "oldest": np.zeros(1, np.int64),  # no entry before it counts
        "end": np.zeros(1, np.int64),
    }


@inlined
def fetch(s, slots, i):
    """Prefetch for ``slots`` that are about to be used; call it for each ``i``."""
    if i + AHEAD < slots.size:
        prefetch(s.used_at, slots[i + AHEAD])


@inlined
def use(s, slot):
    """Make ``slot`` the newest."""
    if s.end[0] == s.use.size:
        _drop_stale(s)
    end = s.end[0]
    s.use[end] = slot
    s.used_at[slot] = end
    s.end[0] = end + 1


@inlined
def drop(s, slot):
    """Forget the uses of ``slot``."""
    s.used_at[slot] = _GONE


@called
def _drop_stale(s):
    kept = 0
    for at in range(s.oldest[0], s.end[0]):
        if at + AHEAD < s.end[0]:
            prefetch(s.used_at, s.use[at + AHEAD])
        slot = s.use[at]
        used_at = s.used_at[slot]
        counts = used_at == at  # no branch: it would be mispredicted half of the time
        s.use[kept] = slot
        s.used_at[slot] = kept if counts else used_at
        kept += counts
    s.oldest[0] = 0
    s.end[0] = kept
