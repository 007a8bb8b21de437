"""Reading ahead as the runtime does it, by counting lookups instead of the clock.

The runtime is ``tierstore/cache/tiers/read_ahead.py``; the names are its names. Its threads are always in
time here, so that a part of a round is read as soon as it is due.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from tierstore.planner.reading import HORIZON_ROWS, ROUND

from .layout_log import Log
from .layout_trace import Ahead, Plan

_FIRST_ROWS, _GROWTH, _RESERVE, _PARTS, _MOST_AT_ONCE, _LEFT_TO_PLANS = (
    1 << 18,
    2,
    1 / 16,
    64,
    1 << 14,
    1 / 16,
)
_NONE = -1

Rows = NDArray[np.int32]


class Reading:
    """Rows that wait for their lookups (``held``), and which lookup asks for a row (``want``)."""

    def __init__(self, log: Log, ahead: Ahead) -> None:
        self._log, self._window, self.max_rows = log, ahead.window, ahead.room
        rows = len(log.place)
        self.want = np.full(rows, _NONE, np.int32)
        self.held = np.zeros(rows, bool)
        self.waiting = np.zeros(rows, bool)  # has left memory and is not written yet
        self._entry = np.full(rows, _NONE, np.int64)  # where the sweep looks for the row
        self._strays: list[tuple[NDArray[np.int64], Rows]] = []  # entries that compaction has moved away from
        self._here = 0  # rows held
        self._at, self._round, self._due, self._until = 0, 0, 0.0, 0.0
        self._end, self._horizon, self._lacking = -1, 0, 0.0
        self._entered: deque[tuple[int, float]] = deque()
        self.read_by_plans = 0

    @property
    def _rounds(self) -> float:
        return self._round + self._at / self._log.used

    def lookup(self, seq: int, plan: Plan) -> None:
        """Go on to lookup ``seq``: read what is due by then, and what its plan lacks nevertheless."""
        self._begin(seq, plan.known)
        waits = self._until - self._rounds > _LEFT_TO_PLANS
        if waits:
            self._due = max(self._due, self._until)
        while self._is_due(waits):
            self._next_part(seq if waits else seq + 1)
        lacking = plan.misses[~(self.held[plan.misses] | self.waiting[plan.misses])]
        self._log.read(lacking)
        self.read_by_plans += len(lacking)
        self._forget(plan.misses)
        self._lacking += (len(plan.misses) - self._lacking) * (1 / 16 if self._lacking else 1.0)

    def announce(self, rows: Rows, seq: int) -> None:
        """Learn that lookup ``seq`` asks for ``rows``, which are out of memory."""
        self.want[rows] = seq
        self._entry[rows] = np.where(self.waiting[rows], _NONE, self._log.place[rows])

    def leave(self, rows: Rows, next_use: Rows) -> None:
        """Keep rows that leave memory and are wanted again soon; the sweep comes by the others."""
        known = next_use <= self._window_end
        rows, next_use = rows[known], next_use[known]
        soon = np.flatnonzero(next_use <= self._end)
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

    def _begin(self, seq: int, last: int) -> None:
        self._window_end = last
        while self._entered and self._entered[0][0] < seq:
            self._entered.popleft()
        self._until = self._entered[0][1] + 1 if self._entered else 0.0
        if not self._due:
            self._due = 1.0
            few = max(1, int(min(self._room(), _FIRST_ROWS) / max(1.0, self._lacking)))
            self._extend(min(last, seq + few), seq)
        self._extend(min(last, seq + self._room_for(), self._end + _GROWTH), seq)
        round_ = max(1.0, ROUND * min(self._horizon, self._room_for()))
        self._due = min(self._due + 1 / round_, self._rounds + 1)

    def _extend(self, end: int, seq: int) -> None:
        if end > self._end:
            self._end = end
            self._entered.append((end, self._rounds))
        self._horizon = max(self._horizon, self._end - seq + 1)

    def _room_for(self) -> int:
        return int(HORIZON_ROWS * self.max_rows / max(self._lacking, 1.0))

    def _room(self) -> int:
        return self.max_rows - self._here - int(self.max_rows * _RESERVE)

    def _is_due(self, waits: bool) -> bool:
        left = self._due - self._rounds
        has_room = self._room() >= max(1, self.max_rows // _PARTS)
        return left > 0 and (waits or left >= 1 / _PARTS) and has_room

    def _next_part(self, first: int) -> None:
        """Read what lookups from ``first`` to the horizon's end ask for in the next part of the round."""
        log, limit = self._log, min(self._room(), _MOST_AT_ONCE)
        way = max(1, math.ceil((self._due - self._rounds) * log.used))
        end = min(log.used, self._at + way)
        rows = log.row_at[self._at : end]
        at = self._at + np.flatnonzero(rows >= 0)
        rows = rows[rows >= 0]
        there = self._entry[rows] == at
        at, rows = self._with_strays(at[there], rows[there], end)
        want = self.want[rows]
        wanted = (want >= first) & (want <= self._end) & ~self.held[rows]
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
            left = ((at < self._at) | (at >= end) | (self.want[rows] > self._end)) & (self._entry[rows] == at)
            self._strays = [(at[left], rows[left])] if left.any() else []

    def _forget(self, rows: Rows) -> None:
        self._here -= int(self.held[rows].sum())
        self.held[rows] = False
        self.want[rows] = _NONE
        self._entry[rows] = _NONE
