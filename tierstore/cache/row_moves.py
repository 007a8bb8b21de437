"""Rows on their way between the fast tier and the lower tiers, for one plan at a time."""

from __future__ import annotations

import logging

import numpy as np

from tierstore import _core
from tierstore.cache.layout import RowLayout
from tierstore.cache.stats import GroupStats
from tierstore.cache.tiers.buffers import Buffer
from tierstore.cache.tiers.memory import MemoryTier
from tierstore.cache.tiers.protocol import FoundRows, Keys, Slots
from tierstore.cache.tiers.stack import TierStack
from tierstore.config import format_bytes
from tierstore.errors import TierFullError

logger = logging.getLogger("tierstore")

_PIECE = 1 << 13  # rows that are copied for the store at a time


class RowMoves:
    """Demotes the victims of a plan, and promotes the rows that it misses. The caller holds the residency
    lock."""

    def __init__(self, fast: MemoryTier, stack: TierStack, layout: RowLayout, stats: GroupStats) -> None:
        self.fast, self.stack, self.layout, self.stats = fast, stack, layout, stats
        below = stack.lower[0].codec if stack.lower else None
        self._victims = Buffer(layout.row_bytes if below is None else below.row_bytes)
        self._warned_overflow = False

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer for victims."""
        return self._victims.nbytes

    def make_room(self, plan: _core.Plan, missing: Keys) -> list[FoundRows]:
        """Take the missing rows out of the lower tiers, and demote the victims. Steps that can fail come
        before steps that only the store could undo."""
        with self.stats.stage("fetch_seconds"):
            every = self.stack.collect(missing)
        try:
            with self.stats.stage("move_seconds"):
                if plan.needed + plan.refused and not self.stack.lower:
                    # Rows in overflow slots need a lower tier when they are released.
                    raise TierFullError(
                        f"{self.stack.name}: the {self.fast.name} tier is full ({self.fast.capacity} rows of "
                        f"{self.layout.row_bytes} bytes) and there is no tier below; raise "
                        f"{self.fast.name}, or set ssd"
                    )
                self.fast.prepare(plan, use_overflow=True)
                self._count_overflow(plan.needed)
                victims = plan.victims
                self.demote(victims, plan.now)
                self.stats.counters.evicted_rows += len(victims[0])
        except BaseException:
            self.stack.restore(every, missing, plan.now)
            raise
        return every

    def take_back(self, plan: _core.Plan, missing: Keys, every: list[FoundRows]) -> None:
        """Undo a plan whose victims are in a lower tier already: the rows that it has missed leave again."""
        native, capacity = self.fast.native, self.fast.capacity
        slots = plan.slots[plan.absent]
        native.remove(slots[slots < capacity])
        self.fast.drained(slots[slots >= capacity])  # before the release, which forgets the drainable rows
        self.fast.release(np.delete(plan.slots, plan.absent))
        self.stack.restore(every, missing, plan.now)

    def demote(self, departures: _core.Departures, seq: int) -> None:
        """Give rows that leave the fast tier to the next lower tier."""
        # A row that was stored and then stays does no harm; in an exclusive tier the row would exist twice.
        slots, keys, dirty, next_use = departures
        below = self.stack.lower[0] if self.stack.lower else None
        whole = below is not None and (below.exclusive or below.takes(self.fast.rows))
        step = len(slots) if whole else _PIECE
        for begin in range(0, len(slots), max(1, step)):
            part = slice(begin, begin + step)
            some = slots[part], keys[part], dirty[part], next_use[part]
            self.stack.demote(1, seq, self.fast.departing(some, below, self._victims))

    def fill(self, slots: Slots, keys: Keys, every: list[FoundRows]) -> None:
        """Put rows at ``slots`` of the fast tier: found ones, and initial values for keys that no tier
        has."""
        for found in every:
            for positions, rows, source in found.pieces:
                self.fast.copy_in(slots[positions], rows, source, found.codec)
            if found.pieces or found.promoted is not None:
                at, left = np.flatnonzero(found.here), np.flatnonzero(~found.here)  # faster than by flags
                if found.promoted is not None:
                    self.fast.rows.copy_rows(slots[at], found.promoted.rows, found.promoted.slots)
                if found.dirty is not None:
                    self.fast.native.set_dirty(slots[at], found.dirty)
                slots, keys = slots[left], keys[left]
        if len(keys):
            self.layout.initialise(self.fast.rows, slots, keys)

    def _count_overflow(self, rows: int) -> None:
        self.stats.counters.overflow_rows += rows
        if rows and not self._warned_overflow:
            self._warned_overflow = True
            logger.warning(
                "%s: the rows in use at once exceed the %s tier (%d rows) by %d; they use overflow slots "
                "of %s outside the budget. Raise %s, or use smaller batches. (said once)",
                *(self.stack.name, self.fast.name, self.fast.capacity, rows),
                *(format_bytes(rows * self.layout.row_bytes), self.fast.name),
            )
