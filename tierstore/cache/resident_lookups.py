"""Lookups in a fast tier that no row ever leaves: without a plan, and without waiting for other threads.

A plan runs in another thread than the main one, so that no signal cuts it in two, and handing it over takes
longer than a lookup whose rows are all in the tier. Such a lookup is one native call, which changes nothing
but counts, so any thread may make it. Where there is no lower tier, a missing row begins with its initial
value, and one native call adds it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from cache_policies.live import LiveCurves, is_loaded, load
from tierstore import _core
from tierstore.cache.at_exit import wait_at_exit
from tierstore.cache.stats import GroupStats
from tierstore.cache.tiers.memory import MemoryTier
from tierstore.cache.uninterrupted import soon
from tierstore.threads import Thread


class ResidentLookups:
    """Finds the rows of lookups in ``tier``, which evicts none. ``stats`` and ``curves`` learn of them
    later, all at once. ``initial``: the first values of missing rows; None where a lower tier may have them.
    ``lock``: the residency lock; ``dim``: the weights of a row."""

    def __init__(
        self,
        tier: MemoryTier,
        initial: _core.InitialValues | None,
        stats: GroupStats,
        curves: LiveCurves,
        lock: threading.RLock,
        dim: int,
    ) -> None:
        assert not tier.plan.evicts
        self._native = _core.ResidentLookups(tier.native, tier.tables)
        self._rows = tier.rows
        self.forward: tuple[_core.ResidentForward, _core.ResidentForward] | None = None
        """Make lookups of rows in this machine's memory in one call each, in training and outside of it.
        Whoever is told so by a call calls :meth:`count_soon`."""
        if isinstance(tier.rows, _core.HostRows):
            made = [_core.ResidentForward(self._native, tier.rows, dim, reads) for reads in (False, True)]
            self.forward = made[0], made[1]
        # Rows of another device than this machine's memory are added by plans.
        self._initial = initial if isinstance(tier.rows, _core.HostRows) else None
        self._stats = stats
        self._curves = curves
        self._lock = lock
        self._is_asked = False

    def find(self, batch: _core.Batch) -> _core.ResidentRows | None:
        """Return where the rows of ``batch`` are; None where a plan has to bring a missing row. Another
        thread counts the lookups so far, once enough of them wait to be counted."""
        found = self._native.find(batch)
        if found is None and self._initial is not None:
            assert isinstance(self._rows, _core.HostRows)
            found = self._native.add(batch, self._rows, self._initial, self._lock)
        if found is not None and self._native.due:
            self.count_soon()
        return found

    def count_soon(self) -> None:
        """Let another thread count the lookups so far."""
        if not self._is_asked:
            self._is_asked = True
            if is_loaded():
                soon(self.count)
            else:  # further work of the main thread would wait for the thread of soon()
                self._count_beside()

    def _count_beside(self) -> None:
        """Let a thread of its own load what counts, and count."""
        thread = Thread(target=soon, args=(self.count,), name="tierstore-curves", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system refuses threads
            soon(self.count)
        else:
            wait_at_exit(thread)

    def read(self, batch: _core.Batch) -> _core.ResidentRows | None:
        """Return where the rows of ``batch`` are, to read them outside of training.

        A row that is missing (slot -1) has its initial value. None where a lower tier may have it, or rows
        are being added."""
        return self._native.read(batch, self._initial is not None)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Let no lookup add rows: a plan counts on the rows that it has found missing."""
        self._native.begin_plan()
        try:
            yield
        finally:
            self._native.end_plan()

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Let no lookup find rows that are not filled in yet. Hold the residency lock."""
        self._native.hide()
        try:
            yield
        finally:
            self._native.show()

    def count(self) -> None:
        """Count the lookups so far."""
        if self._is_asked:  # lookups wait to be counted
            load()  # before the lock, which plans wait for
        self._is_asked = False
        with self._lock:
            lookups, table_rows, accesses, read_rows, (plan, announce, compute) = self._native.take()
            if len(lookups):
                self._curves.observe_at(lookups)
                self._stats.count_resident(len(lookups), np.array(table_rows, np.int64), accesses)
                self._stats.counters.plan_seconds += plan
            self._stats.counters.announce_seconds += announce
            self._stats.counters.compute_seconds += compute
            self._stats.counters.read_rows += read_rows
