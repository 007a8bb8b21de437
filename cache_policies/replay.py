"""Single accesses at full speed: a loop over a trace into which numba inlines the hooks of one policy.

The simulator (``simulator.py``) calls hooks as the live engine does, a batch per call. Where every batch is
one access, calls and arguments would take longer than the hooks; here the same hooks are compiled into the
loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cache_policies import native
from cache_policies.policy import UNKNOWN, Policy
from cache_policies.prefetch import AHEAD, prefetch
from cache_policies.prepared import NEVER

#: Names of the loop's ``counts``, in their order.
COUNTS = ("misses", "compulsory", "overflowed", "refused", "fault", "last_plan")


def replay(
    policy: Policy,
    compiled: native.Compiled,
    trace: dict[str, np.ndarray],
    window: int,
    on_demand: int,
) -> dict[str, int]:
    """Run all accesses of ``trace`` and return what ``COUNTS`` names.

    ``trace`` has ``rows``, ``next_batch`` and ``keys`` as in ``PreparedTrace``, ``slot_of`` (int32 per row)
    and ``pending`` (int32 per row, or empty if nothing is announced), all -1, ``row_in`` (int32) and
    ``last_use`` (int64) per slot, all -1. Nothing is in flight, and no filter admits. Releases the GIL.
    """
    counts = np.zeros(len(COUNTS), np.int64)
    setting = np.array([window, on_demand])
    native.run_loop(policy, compiled, _loop, {**trace, "counts": counts, "setting": setting})
    return dict(zip(COUNTS, counts.tolist(), strict=True))


def _loop(hooks: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Make the loop over single accesses around ``hooks``, to be compiled."""
    touch, insert, announce, evict = (hooks[name] for name in ("touch", "insert", "announce", "evict"))
    admits = "admit" in hooks
    admit = hooks.get("admit", touch)

    def loop(s, t):
        window, on_demand = t.setting
        slots, next_use = np.empty(1, np.int32), np.empty(1, np.int64)
        admitted, victims = np.empty(1, np.uint8), np.empty(1, np.int32)
        used, seen, announced, i, end = 0, 0, on_demand, 0, t.rows.size
        misses, compulsory, overflowed, refused, fault = 0, 0, 0, 0, 0
        for i in range(end):
            known = i + window if i >= on_demand else i
            while t.pending.size and i >= on_demand and announced <= known and announced < end:
                row = t.rows[announced]
                if t.pending[row] < i and t.slot_of[row] >= 0:
                    slots[0], next_use[0] = t.slot_of[row], announced
                    announce(s, slots, next_use, i)
                t.pending[row] = announced
                announced += 1
            if i + AHEAD < end:
                prefetch(t.slot_of, t.rows[i + AHEAD])
                if admits:  # and so looks for keys
                    prefetch(t.keys, t.rows[i + AHEAD])
            row = t.rows[i]
            use = np.int64(t.next_batch[i])
            next_use[0] = UNKNOWN if use > known or use == NEVER else use
            keys = t.keys[row : row + 1]
            slot = t.slot_of[row]
            if slot >= 0:
                slots[0] = slot
                t.last_use[slot] = i
                touch(s, slots, keys, next_use, i)
                continue
            misses += 1
            if row >= seen:  # rows are numbered by first use
                compulsory += 1
                seen = row + 1
            if admits:
                admitted[0] = 1
                admit(s, keys, i, admitted)
                if not admitted[0]:
                    refused += 1
                    continue
            if used < t.row_in.size:
                slot = np.int32(used)
                used += 1
            else:
                n = evict(s, 1, t.last_use, i, victims)
                slot = victims[0]
                if n < 0 or n > 1:
                    fault = 1
                elif n == 0:
                    overflowed += 1
                    continue
                elif slot < 0 or slot >= t.row_in.size:
                    fault = 2
                if fault:
                    break
                t.slot_of[t.row_in[slot]] = -1
            t.row_in[slot] = row
            t.slot_of[row] = slot
            t.last_use[slot] = i
            slots[0] = slot
            insert(s, slots, keys, next_use, i)
        t.counts[0], t.counts[1], t.counts[2] = misses, compulsory, overflowed
        t.counts[3], t.counts[4], t.counts[5] = refused, fault, i

    return loop
