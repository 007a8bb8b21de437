"""The order of lookups: which lookups are planned, which are still in use, and which thread may plan now.

One planner at a time; lookups are numbered, and every number is *released* once its rows have no update
pending. Planning ahead waits for releases here; a thread that needs a lookup now makes such a wait end
early, so that no order of forward and backward calls can deadlock.

In the main thread a signal may raise, or do other work, between any two steps. That thread therefore only
drops a use or calls :meth:`LookupOrder.wake`; neither takes a lock.
"""

from __future__ import annotations

import _thread
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from tierstore import _core

Slots = NDArray[np.int32]

_WAIT_SECONDS = 0.05  # a waiting thread looks this often for releases that did not wake it


class LookupOrder:
    """The lookups of one group, by number. The object is thread-safe. On-demand lookups between planned
    batches may share a number."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._planned = threading.Condition(self._lock)
        self._bell = _thread.allocate_lock()  # free: something has changed since a waiting thread looked
        self._next = 0
        self.uses = _core.Uses()
        """Every planned lookup adds a use here; uses that are over are counted at the next look."""
        self._returned: list[Slots] = []  # by lookups that are not counted any more
        self._in_use: Counter[int] = Counter()
        self._planning = False
        self._waiting = 0

    def take(self, count: int = 1) -> int:
        """Reserve ``count`` numbers for lookups that will be planned in this order, and return the first."""
        with self._lock:
            first = self._next
            self._next += count
            return first

    @property
    def last(self) -> int:
        """Return the number handed out last, -1 before the first."""
        return self._next - 1

    def open(self, seq: int) -> None:
        """Count the rows of lookup ``seq`` as in use from now on: it is being planned."""
        with self._lock:
            self._in_use[seq] += 1

    def close(self, seq: int) -> None:
        """Take :meth:`open` back: lookup ``seq`` was not planned after all."""
        with self._lock:
            self._close(seq)
        self.wake()

    def _close(self, seq: int) -> None:
        self._in_use[seq] -= 1
        if self._in_use[seq] <= 0:
            del self._in_use[seq]

    def _settle(self) -> None:
        for seq, slots in self.uses.take():
            self._close(seq)
            self._returned.append(slots)

    def take_returned(self) -> list[Slots]:
        """Return the slots of lookups that are over, each lookup's once."""
        with self._lock:
            self._settle()
            returned, self._returned = self._returned, []
            return returned

    def _oldest(self, default: int) -> int:
        self._settle()
        return min(list(self._in_use), default=default)

    def oldest_in_use(self, default: int) -> int:
        """Return the smallest number in use; ``default`` if there is none."""
        with self._lock:
            return self._oldest(default)

    def is_alone(self, seq: int) -> bool:
        """Return whether one lookup is in use, which has number ``seq``: the one that is being planned."""
        with self._lock:
            self._settle()
            return self._in_use == {seq: 1}

    def wait_released(
        self, before: int, *, is_planner: bool = False, stop: Callable[[], bool] | None = None
    ) -> bool:
        """Wait until no number below ``before`` is in use; return whether that is so.

        Returns False, early, when the caller is the planner and another thread has to plan, or when
        ``stop()`` (tested at every change; see :meth:`wake`).
        """

        def needed() -> bool:
            return (is_planner and self._waiting > 0) or (stop is not None and stop())

        while True:
            with self._lock:
                released = self._oldest(before) >= before
                if released or needed():
                    return released
            self._bell.acquire(timeout=_WAIT_SECONDS)

    def wake(self) -> None:
        """Let a waiting thread test its condition again; further waiting threads do so a little later."""
        with suppress(RuntimeError):  # it is awake already
            self._bell.release()

    @contextmanager
    def planner(self) -> Iterator[None]:
        """Hold the right to change which rows are where; other planners wait. The main thread must not call
        it (use ``uninterrupted``)."""
        with self._lock:
            self._waiting += 1
            self.wake()
            try:
                self._planned.wait_for(lambda: not self._planning)
            finally:
                self._waiting -= 1
            self._planning = True
        try:
            yield
        finally:
            with self._lock:
                self._planning = False
                self._planned.notify_all()
