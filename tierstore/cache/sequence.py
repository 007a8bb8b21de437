"""The order of lookups: which are planned, which are still in use, and who may plan now.

One planner at a time; lookups are numbered, and every number is *released* once its rows have no update
pending. Planning ahead waits for releases here; a thread that needs a lookup now makes such a wait end
early, so that no order of forward and backward calls can deadlock.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ORPHAN_SECONDS = 0.05  # how often a waiting thread looks for orphans, which cannot wake it


class Sequence:
    """Thread-safe. Numbers are per chain; several lookups may share one (on-demand ones between planned
    batches)."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self.orphans: deque[int] = deque()
        """Numbers whose lookup was dropped by the garbage collector; counted as closed at the next look."""
        self._in_use: Counter[int] = Counter()
        self._planning = False
        self._waiting = 0
        self._demanded = -1

    def take(self, count: int = 1) -> int:
        """Reserves ``count`` numbers for lookups that will be planned in this order; returns the first."""
        with self._changed:
            first = self._next
            self._next += count
            return first

    @property
    def last(self) -> int:
        """The number handed out last, -1 before the first."""
        return self._next - 1

    def open(self, seq: int) -> None:
        """Lookup ``seq`` is being planned: from now on its rows are in use."""
        with self._changed:
            self._in_use[seq] += 1

    def close(self, seq: int) -> None:
        """Lookup ``seq`` is over."""
        with self._changed:
            self._close(seq)
            self._changed.notify_all()

    def _close(self, seq: int) -> None:
        self._in_use[seq] -= 1
        if self._in_use[seq] <= 0:
            del self._in_use[seq]

    def _oldest(self, default: int) -> int:
        while self.orphans:
            self._close(self.orphans.popleft())
        return min(list(self._in_use), default=default)

    def oldest_in_use(self, default: int) -> int:
        """The smallest number in use; ``default`` if there is none."""
        with self._changed:
            return self._oldest(default)

    def wait_released(
        self, below: int, planning: int, *, is_planner: bool = False, stop: Callable[[], bool] | None = None
    ) -> bool:
        """Waits until no number below ``below`` is in use.

        False, early, when somebody cannot go on before ``planning`` is planned, when the caller is the
        planner and somebody else has to plan, or when ``stop()`` (tested at every change; see
        :meth:`wake`).
        """

        def needed() -> bool:
            return (
                self._demanded >= planning
                or (is_planner and self._waiting > 0)
                or (stop is not None and stop())
            )

        with self._changed:
            while not (self._oldest(below) >= below or needed()):
                self._changed.wait(_ORPHAN_SECONDS)
            return self._oldest(below) >= below

    def wake(self) -> None:
        """Lets waiting threads test their conditions again."""
        with self._changed:
            self._changed.notify_all()

    def demand(self, seq: int) -> None:
        """The caller cannot go on before ``seq`` is planned."""
        with self._changed:
            self._demanded = max(self._demanded, seq)
            self._changed.notify_all()

    @contextmanager
    def planner(self) -> Iterator[None]:
        """The right to change which rows are where; others wait."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._planning)
            finally:
                self._waiting -= 1
            self._planning = True
        try:
            yield
        finally:
            with self._changed:
                self._planning = False
                self._changed.notify_all()
