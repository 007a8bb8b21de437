"""The batches that a prefetch has announced and not planned, and when they are enough.

A window of a given length is full when it has it. An automatic window is full when it is as long as the tiers
can use, or has the bytes that are left to it. So it is chosen anew for every plan, from the batches alone
(:mod:`cache_policies.windows`), and what a workload needs now does not depend on what it needed before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from tierstore import _core
from tierstore.cache.group import TierGroup
from tierstore.cache.read_ahead_size import KnownAhead
from tierstore.pipeline.planned import Planned
from tierstore.rounds import MAX_WINDOW, WINDOW_BYTES


class Window:
    """The window of one pass. ``length``: batches behind the next plan; None for an automatic window. Only
    the worker uses it."""

    def __init__(self, groups: Sequence[TierGroup], length: int | None) -> None:
        self.length = length
        self._groups = groups
        self._batches: deque[tuple[set[tuple[int, int]], int]] = deque()  # their memory, bytes of lookups
        self._sharing: Counter[tuple[int, int]] = Counter()  # by memory: the batches that have it
        self._bytes = 0

    @property
    def behind(self) -> int:
        """Batches that are known behind the next plan."""
        return max(0, len(self._batches) - 1)

    def add(self, planned: Planned) -> None:
        """Add a batch whose lookups are announced."""
        memory, lookups = planned.memory, planned.lookup_bytes
        self._batches.append((memory, lookups))
        self._bytes += lookups + sum(size for at, size in memory if not self._sharing[at, size])
        self._sharing.update(memory)

    def _remove_oldest(self) -> None:
        memory, lookups = self._batches.popleft()
        self._sharing.subtract(memory)
        self._bytes -= lookups + sum(size for at, size in memory if not self._sharing[at, size])
        for each in memory:
            if not self._sharing[each]:
                del self._sharing[each]

    def plan(self, planned: Planned, is_full: bool, depth: int) -> None:
        """Take the oldest batch out: it is being planned. Give the window the bytes that it has now."""
        self._grant()
        planned.behind, planned.fills = self.behind, is_full
        self._remove_oldest()
        for group in self._groups if self.length is None else ():
            depth_and_window = group.stats.prefetched
            # A window that has shrunk without being full is at the end of its pass.
            if depth_and_window is None or is_full or planned.behind > depth_and_window[1]:
                group.stats.prefetched = depth, planned.behind

    def is_full(self) -> bool:
        """Return whether the next plan needs no more batches behind it.

        What an automatic window takes of the memory for rows read ahead, it takes from these rows: it is
        longest where both have what they need.
        """
        if self.length is not None:
            return self.behind >= self.length
        if self.behind >= MAX_WINDOW:
            return True
        rows = self._rows()
        if all(have >= group.stack.window_rows() for have, group in zip(rows, self._groups, strict=True)):
            return True
        free = sum(group.stack.window_bytes(have) for have, group in zip(rows, self._groups, strict=True))
        return self._beyond(sum(rows)) > free

    def _grant(self) -> None:
        """Let the window take the bytes that it has now of the memory for rows read ahead."""
        beyond = self._beyond(sum(self._rows()))
        shares = [group.stack.window_bytes(0) for group in self._groups]
        for group, share in zip(self._groups, shares, strict=True):
            part = share / max(1, sum(shares))
            each = self._bytes / len(self._batches)
            known = KnownAhead(self.length, each * part, WINDOW_BYTES * part)
            group.grant_window(int(beyond * part), known)

    def _rows(self) -> list[int]:
        """Return the distinct rows in the window of each group. Only this thread adds to the windows, so no
        lock is needed."""
        return [group.window.distinct_rows for group in self._groups]

    def _beyond(self, rows: int) -> int:
        """Return the bytes that the window takes of the memory for rows read ahead."""
        return max(0, self._bytes + int(rows * _core.Window.BYTES_PER_ROW) - WINDOW_BYTES)
