"""What leaves memory and what comes back, plan by plan: no layout of the log changes that."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cache_policies
from cache_policies import PreparedTrace
from cache_policies.windows import automatic_windows
from tierstore.planner.costs import BYTES_PER_BAG, BYTES_PER_ID, HELD_BYTES_PER_ROW, slot_bytes
from tierstore.rounds import BYTES_PER_ROW, MAX_WINDOW, WINDOW_BYTES, WINDOW_ROWS

NEVER = np.iinfo(np.int32).max
"""Next use of a row that no lookup of the window uses."""
_UNKNOWN = np.iinfo(np.int64).max  # the same in calls of a policy
_COVER = 5  # distinct rows of a window per slot, from which on the policy needs no longer window
_DEPTH = 2

Rows = NDArray[np.int32]


@dataclass(frozen=True)
class Plan:
    """What one plan moves; arrays of row numbers, each row once.

    ``misses``: come from the store. ``victims``: leave memory, in the order of the policy. ``next_use``,
    ``uses``: the victims' next use as far as the window knows it, and how many batches have used them.
    ``announced``: rows out of memory that the window has newly learned of, and the lookup that asks for them.
    """

    misses: Rows
    victims: Rows
    next_use: Rows
    uses: Rows
    announced: list[tuple[Rows, int]]


@dataclass(frozen=True)
class Ahead:
    """``window``: lookups that are known ahead. ``room``: rows that may wait for their lookups. Both may be
    arrays, by plan."""

    window: int | NDArray[np.int64]
    room: int | NDArray[np.int64]


def slots_of(budget: float, row_bytes: int) -> int:
    """Return the slots of a memory tier of ``budget`` bytes."""
    return int(budget / slot_bytes(row_bytes))


def automatic(
    prepared: PreparedTrace, ids: int, row_bytes: int, slots: int, read_ahead: float, most: int = MAX_WINDOW
) -> Ahead:
    """Return the windows that the runtime chooses, and what they leave of ``read_ahead`` bytes.

    ``ids``: of one batch, one per bag. ``most``: batches of a window.
    """
    held = row_bytes + HELD_BYTES_PER_ROW
    beyond = np.zeros(prepared.batches)

    def is_full(first: int, end: int, distinct: int) -> bool:
        taken = (end - first) * ids * (BYTES_PER_ID + BYTES_PER_BAG) + BYTES_PER_ROW * distinct - WINDOW_BYTES
        beyond[first] = max(0.0, taken)
        free = max(0.0, min(read_ahead / 2, read_ahead - distinct / WINDOW_ROWS * held))
        is_useful = distinct < max(_COVER * slots, WINDOW_ROWS * read_ahead / held)
        return end - first > most or beyond[first] > free or not is_useful

    windows = automatic_windows(prepared, is_full, depth=_DEPTH)
    return Ahead(windows, ((read_ahead - np.minimum(beyond, read_ahead / 2)) / held).astype(np.int64))


class _Policy:
    """The hooks of a policy, called with NumPy arrays."""

    def __init__(self, name: str, capacity: int) -> None:
        self._compiled = cache_policies.get(name).compile(capacity)

    def call(self, hook: str, *arguments: Any) -> int:
        values = [
            ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_int64(a)
            for a in arguments
        ]
        function = ctypes.CFUNCTYPE(ctypes.c_int64)(self._compiled.hooks[hook])
        return int(function(ctypes.c_void_p(self._compiled.state_address), *values))


class Memory:
    """A memory tier: which row is in which slot, without the rows."""

    def __init__(self, rows: int, slots: int, policy: str) -> None:
        self._policy = _Policy(policy, slots)
        self._announces = cache_policies.get(policy).uses_window
        self._slot_of = np.full(rows, -1, np.int32)
        self._row_in = np.full(slots, -1, np.int32)
        self._next_use = np.full(slots, _UNKNOWN, np.int64)
        self._last_use = np.full(slots, -1, np.int64)
        self._uses = np.zeros(rows, np.int32)
        self._pending = np.full(rows, -1, np.int32)  # by row: the last lookup that the window has with it
        self._used = 0

    def announce(self, rows: Rows, seq: int, now: int) -> Rows:
        """Learn that lookup ``seq`` uses ``rows``. Return the rows that are not here and that no known lookup
        before it uses."""
        new = rows[self._pending[rows] < now]
        self._pending[rows] = seq
        slots = self._slot_of[new]
        here = slots[slots >= 0]
        self._next_use[here] = seq
        if self._announces and len(here):
            self._policy.call("announce", here, self._next_use[here], len(here), now)
        return new[slots < 0]

    def plan(self, rows: Rows, next_use: NDArray[np.int64], now: int) -> tuple[Rows, Rows, Rows, Rows]:
        """Bring ``rows`` in. Return misses, victims, and next uses and numbers of uses of the victims."""
        self._uses[rows] += 1
        slots = self._slot_of[rows]
        hit = slots >= 0
        self._put(slots[hit], rows[hit], next_use[hit], now, "touch")
        missing, next_uses = rows[~hit], next_use[~hit]
        free = np.arange(self._used, min(self._used + len(missing), len(self._row_in)), dtype=np.int32)
        self._used += len(free)
        slots = self._evict(len(missing) - len(free), now)
        # Rows without a slot use overflow slots, and leave them after the batch.
        victims = np.append(self._row_in[slots], missing[len(free) + len(slots) :])
        leaving = np.append(self._next_use[slots], next_uses[len(free) + len(slots) :])
        self._slot_of[victims] = -1
        slots = np.append(free, slots)
        self._put(slots, missing[: len(slots)], next_uses[: len(slots)], now, "insert")
        return missing, victims, np.minimum(leaving, NEVER).astype(np.int32), self._uses[victims]

    def _evict(self, n: int, now: int) -> Rows:
        """Return the slots of up to ``n`` victims; rows of fewer batches stay where room is short."""
        victims, got = np.empty(max(0, n), np.int32), 0
        for since in range(max(0, now - _DEPTH), now + 1):
            if got < n:
                part = victims[got:]
                got += self._policy.call("evict", n - got, self._last_use, since, part)
        return victims[:got]

    def _put(self, slots: Rows, rows: Rows, next_use: NDArray[np.int64], now: int, hook: str) -> None:
        self._slot_of[rows], self._row_in[slots] = slots, rows
        self._next_use[slots], self._last_use[slots] = next_use, now
        if len(slots):
            keys = rows.astype(np.uint64)
            self._policy.call(hook, slots, keys, np.ascontiguousarray(next_use), len(slots), now)


def plans(
    prepared: PreparedTrace, rows: int, slots: int, window: int | NDArray[np.int64], policy: str
) -> Iterator[Plan]:
    """Yield the plans of a training on ``prepared``, whose keys are numbers of ``rows`` rows, as long as the
    trace has all of the window."""
    known = np.broadcast_to(window, prepared.batches) + np.arange(prepared.batches)
    memory, announced = Memory(rows, slots, policy), 0
    numbers = prepared.keys.astype(np.int32)[prepared.rows]
    offsets = prepared.offsets
    for now in range(int((known < prepared.batches).sum())):
        last = int(known[now])
        asked = []
        for seq in range(announced, last + 1):
            asked.append((memory.announce(numbers[offsets[seq] : offsets[seq + 1]], seq, now), seq))
        announced = last + 1
        part = slice(offsets[now], offsets[now + 1])
        next_use = prepared.next_batch[part].astype(np.int64)
        next_use[next_use > last] = _UNKNOWN
        moved = memory.plan(numbers[part], next_use, now)
        yield Plan(*moved, announced=asked)
