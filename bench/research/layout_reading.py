"""Reading ahead as the runtime does it, by counting lookups instead of the clock.

The runtime is ``tierstore/cache/tiers/read_ahead.py``; the names are its names, and the horizon is its own.
Its threads are always in time here, so that a part of a round is read as soon as it is due.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tierstore.cache.tiers.horizon import Horizon

from .layout_log import Log
from .layout_trace import Ahead, Plan

# Tests compare these with the runtime.
RESERVE = 1 / 16
PARTS = 64
MOST_AT_ONCE = 1 << 14
LEFT_TO_PLANS = 1 / 256
_NONE = -1

Rows = NDArray[np.int32]


class Reading:
    """Rows that wait for their lookups (``held``), and which lookup asks for a row (``want``)."""

    def __init__(self, log: Log, ahead: Ahead) -> None:
        self._log, self._rooms = log, ahead.room
        self.max_rows = 0 if isinstance(ahead.room, np.ndarray) else ahead.room
        rows = len(log.place)
        self.want = np.full(rows, _NONE, np.int32)
        self.held = np.zeros(rows, bool)
        self.waiting = np.zeros(rows, bool)  # has left memory and is not written yet
        self._entry = np.full(rows, _NONE, np.int64)  # where the sweep looks for the row
        self._strays: list[tuple[NDArray[np.int64], Rows]] = []  # entries that compaction has moved away from
        self._here = 0  # rows held
        self._at = self._round = 0
        self._horizon = Horizon()
        self.read_by_plans = 0

    @property
    def _rounds(self) -> float:
        return self._round + self._at / self._log.used

    def lookup(self, seq: int, plan: Plan) -> None:
        """Go on to lookup ``seq``: read what is due by then, and what its plan lacks nevertheless."""
        horizon = self._horizon
        if isinstance(self._rooms, np.ndarray):
            self.max_rows = int(self._rooms[seq])
        horizon.lookup_begun(seq, self._rounds, self._room(), self.max_rows)
        waits = horizon.until - self._rounds > LEFT_TO_PLANS
        if waits:
            horizon.due = max(horizon.due, horizon.until)
        while self._is_due(waits):
            self._next_part(seq if waits else seq + 1)
        lacking = plan.misses[~(self.held[plan.misses] | self.waiting[plan.misses])]
        self._log.read(lacking)
        self.read_by_plans += len(lacking)
        self._forget(plan.misses)
        horizon.lookup_filled(len(plan.misses))

    def announce(self, rows: Rows, seq: int) -> None:
        """Learn that lookup ``seq`` asks for ``rows``, which are out of memory."""
        self._horizon.announce(seq, len(rows))
        self.want[rows] = seq
        self._entry[rows] = np.where(self.waiting[rows], _NONE, self._log.place[rows])

    def leave(self, rows: Rows, next_use: Rows) -> None:
        """Keep rows that leave memory and are wanted again soon; the sweep comes by the others."""
        known = next_use <= self._horizon.last_announced
        rows, next_use = rows[known], next_use[known]
        soon = np.flatnonzero(next_use <= self._horizon.end)
        kept = rows[soon[max(0, len(soon) - (self.max_rows - self._here)) :]]
        self.held[kept] = True
        self._here += len(kept)
        self.want[rows] = next_use
        self._entry[rows] = _NONE

    def written(self, rows: Rows) -> None:
        """Learn that rows that have left memory are in the log now."""
        self._entry[rows] = self._log.place[rows]

    def compacted(self) -> None:
        """Learn what the log has moved: the sweep's entries stay where they are."""
        for rows, old in self._log.moved:
            strays = (self.want[rows] != _NONE) & (self._entry[rows] == old) & ~self.held[rows]
            if strays.any():
                self._strays.append((old[strays], rows[strays]))
        self._log.moved.clear()

    def _room(self) -> int:
        return self.max_rows - self._here - int(self.max_rows * RESERVE)

    def _is_due(self, waits: bool) -> bool:
        left = self._horizon.due - self._rounds
        has_room = self._room() >= max(1, self.max_rows // PARTS)
        return left > 0 and (waits or left >= 1 / PARTS) and has_room

    def _next_part(self, first: int) -> None:
        """Read what lookups from ``first`` to the horizon's end ask for in the next part of the round."""
        log, limit = self._log, min(self._room(), MOST_AT_ONCE)
        way = max(1, math.ceil((self._horizon.due - self._rounds) * log.used))
        end = min(log.used, self._at + way)
        rows = log.row_at[self._at : end]
        at = self._at + np.flatnonzero(rows >= 0)
        rows = rows[rows >= 0]
        there = self._entry[rows] == at
        at, rows = self._with_strays(at[there], rows[there], end)
        want = self.want[rows]
        wanted = (want >= first) & (want <= self._horizon.end) & ~self.held[rows]
        at, rows = at[wanted], rows[wanted]
        if len(rows) > limit:
            end, rows = int(at[limit]), rows[:limit]
        log.read(rows)
        self.held[rows] = True
        self._here += len(rows)
        self._drop_strays(end)
        self._at = end
        if end >= log.used:
            self._at, self._round = 0, self._round + 1

    def _with_strays(self, at: NDArray[np.int64], rows: Rows, end: int) -> tuple[NDArray[np.int64], Rows]:
        if not self._strays:
            return at, rows
        stray_at, stray = (np.concatenate(parts) for parts in zip(*self._strays, strict=True))
        self._strays = [(stray_at, stray)]
        here = (stray_at >= self._at) & (stray_at < end) & (self._entry[stray] == stray_at)
        at, rows = np.append(at, stray_at[here]), np.append(rows, stray[here])
        order = np.argsort(at, kind="stable")
        return at[order], rows[order]

    def _drop_strays(self, end: int) -> None:
        if self._strays:
            at, rows = self._strays[0]
            left = ((at < self._at) | (at >= end) | (self.want[rows] > self._horizon.end)) & (
                self._entry[rows] == at
            )
            self._strays = [(at[left], rows[left])] if left.any() else []

    def _forget(self, rows: Rows) -> None:
        self._here -= int(self.held[rows].sum())
        self.held[rows] = False
        self.want[rows] = _NONE
        self._entry[rows] = _NONE
