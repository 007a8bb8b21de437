"""The tiers of one row layout, and the lookups that are planned in the first of them.

Rows are in one exclusive tier at most; the store has the last version that was written to it, which is the
valid one unless an exclusive tier has the row. Locks: a thread that moves rows holds ``order.planner()``;
``residency_lock`` guards the tiers' data structures and is never held while waiting for a release.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np

from cache_policies.live import LiveCurves
from tierstore import _core
from tierstore.cache.division import UseDivision
from tierstore.cache.layout import IdSegment, RowLayout, out_of_range
from tierstore.cache.lookup_order import LookupOrder
from tierstore.cache.pinned_rows import PinnedRows, ResidentRows, TierRows
from tierstore.cache.process import OwnProcess
from tierstore.cache.read_ahead_size import KnownAhead, ReadAheadSize
from tierstore.cache.resident_lookups import ResidentLookups
from tierstore.cache.row_moves import RowMoves
from tierstore.cache.stats import GroupStats
from tierstore.cache.tiers.memory import MemoryTier
from tierstore.cache.tiers.protocol import FoundRows, Keys, RowBytes, Tier
from tierstore.cache.tiers.stack import TierStack
from tierstore.cache.uninterrupted import uninterrupted
from tierstore.errors import ClosedError


class TierGroup:
    """The tiers of ``tables`` (indices) with one row layout; the first is a :class:`MemoryTier`. ``lock``
    becomes the residency lock."""

    def __init__(
        self,
        name: str,
        layout: RowLayout,
        tables: Sequence[int],
        tiers: Sequence[Tier],
        stats: GroupStats,
        lock: threading.RLock,
    ) -> None:
        assert isinstance(tiers[0], MemoryTier)
        self.name = name
        self.layout = layout
        self.tables = tables
        self.fast = tiers[0]
        self.device = tiers[0].plan.device
        self.device_name = self.device.name
        self.stack = TierStack(name, tiers)
        self.order = LookupOrder()
        self.window = self._new_window()
        self.curves = LiveCurves(tables)
        self.residency_lock = lock
        self.stats = stats
        stats.add_tiers(tier.name for tier in tiers)
        self.resident: ResidentLookups | None = None
        if not self.fast.plan.evicts:
            initial = None if self.stack.lower else layout.initial
            self.resident = ResidentLookups(self.fast, initial, stats, self.curves, lock, layout.dim)
            stats.count_rest = self.resident.count
        self.size: ReadAheadSize | None = None
        """Chooses the bytes of reading ahead, if they are automatic."""
        self.division: UseDivision | None = None
        self.prefetches: set[int] = set()
        """The prefetches that run, which may have lookups of this group also when none is in the window."""
        self._planned = -1
        self._rows_leave = bool(self.stack.lower) or self.fast.plan.evicts
        self._moves = RowMoves(self.fast, self.stack, layout, stats)
        self._policy_seconds = 0.0  # seconds counted so far
        self._process = OwnProcess()
        self._open_in = os.getpid()  # 0 when closed
        self.check_process = self._process.check
        """Raises ``ClosedError`` in a forked child, where no tier is."""

    # -- lookups -------------------------------------------------------------------------

    def batch(self, segments: Sequence[IdSegment]) -> _core.Batch:
        """Return the deduplicated ids of a lookup.

        Raises ``InputError``, which names the feature, the id and the bound of a wrong one.
        """
        self.check_open()
        begin = time.perf_counter()
        batch, bad, position, value = self.device.make_batch([segment[1:] for segment in segments])
        self.stats.counters.announce_seconds += time.perf_counter() - begin
        if bad >= 0:
            raise out_of_range(segments[bad].name, value, position, segments[bad].bound)
        return batch

    def lookup(self, batch: _core.Batch) -> TierRows:
        """Bring the rows into the fast tier now. A signal that raises meanwhile leaves all rows as before or
        after it."""
        if self.resident is not None and not self.stats.before and batch.is_whole:
            self.check_open()
            if (found := self.resident.find(batch)) is not None:
                return ResidentRows(self, batch, found, self.fast.rows)
        return uninterrupted(lambda: self._lookup(batch))

    def _lookup(self, batch: _core.Batch) -> PinnedRows:
        self.check_open()
        # The numbers of an announced window are taken: share the newest planned number.
        shared = self.window.lookups > 0 and self._planned >= 0
        seq = self._planned if shared else self.order.take()
        pinned = PinnedRows(self, batch, seq)
        self.plan(pinned, pinned_since=seq)
        return pinned

    def announce(self, seq: int, batch: _core.Batch) -> None:
        """Make the ids of coming lookup ``seq`` part of the window."""
        with self.residency_lock, self.stats.stage("announce_seconds"):
            self.check_open()
            self.stack.announce(self.window.announce(seq, batch), seq, self._planned)

    def grant_window(self, size: int, known: KnownAhead) -> None:
        """Leave ``size`` bytes of the memory for rows read ahead to the window, until the next call or until
        it is forgotten. Only the thread of a prefetch calls it."""
        with self.residency_lock:
            self.stack.grant_window(size)
            if self.size is not None:
                self.size.known = known

    def forget_window(self) -> None:
        """Forget announced lookups that were not planned and will not come. They are forgotten also if the
        call raises; a tier may then take rows for rows of the next lookups until they are looked up."""
        with self.residency_lock:
            keys = np.empty(0, np.uint64)
            try:
                keys = self.window.clear()
            except BaseException:
                self.window = self._new_window()  # the other one may still have some of the lookups
                raise
            finally:
                self.stack.forget(keys, self._planned)

    def _new_window(self) -> _core.Window:
        # Where no row leaves the fast tier, and none comes from below, nobody asks when rows are used.
        return _core.Window(knows_uses=self.fast.plan.evicts or bool(self.stack.lower))

    def plan(
        self,
        pinned: PinnedRows,
        pinned_since: int,
        *,
        announced: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """Bring the rows into the fast tier and pin them.

        Rows used by lookups from ``pinned_since`` on stay. If room is short, the plan waits for further
        releases, and at last uses overflow slots. Raises the tiers' errors; then nothing has changed.
        """
        with self.order.planner(), self.resident.planning() if self.resident else nullcontext():
            self.order.open(pinned.seq)
            try:
                self._plan(pinned, pinned_since, announced, stop)
            except BaseException:
                self.order.close(pinned.seq)
                raise
        pinned.grant()

    def _plan(
        self, pinned: PinnedRows, pinned_since: int, announced: bool, stop: Callable[[], bool] | None
    ) -> None:
        if self.division is not None:
            self.division.before_plan(self, pinned.seq, announced, stop)
        fast, keys, stage = self.fast.native, pinned.batch.unique, self.stats.stage
        plan, placed = self._begin(pinned, announced), False
        try:
            self._find_victims(plan, pinned_since, stop)
            with stage("wait_seconds"):
                self.stack.wait(pinned.seq)
            missing = keys[plan.absent]
            with self.residency_lock, self._adding(missing):
                found = self._moves.make_room(plan, missing)
                with stage("plan_seconds"):
                    fast.assign(keys, True, plan)
                placed = True
                try:
                    with stage("move_seconds"):
                        self._moves.fill(plan.slots[plan.absent], missing, found)
                        self.stack.end_lookup(pinned.seq, missing)
                    with stage("plan_seconds"):
                        self._count(plan, pinned, found)
                        if announced and self.size and self.size.lookup_done(self, int(found[-1].here.sum())):
                            self.stack.set_read_ahead(self.size.now)
                        if self.division is not None:
                            self.division.lookup_done(self)
                    with stage("move_seconds"):
                        pinned.place(plan.slots, self.fast.rows)
                except BaseException:
                    self._moves.take_back(plan, missing, found)
                    raise
        except BaseException:
            if not placed:
                with self.residency_lock:
                    self.fast.abort(plan)
            raise

    def _adding(self, missing: Keys) -> AbstractContextManager[None]:
        """Return a context in which ``missing`` may be added to the fast tier."""
        if self.resident is None or not len(missing):
            return nullcontext()
        return self.resident.adding()

    def _begin(self, pinned: PinnedRows, announced: bool) -> _core.Plan:
        seq = pinned.seq
        with self.residency_lock, self.stats.stage("plan_seconds"):
            self.check_open()
            if announced:
                pinned.before = self.stats.plans_ahead()
            elif not self.window.lookups:
                self.stats.plans_now()
            self.drain_overflow()
            next_use = self.window.take(seq) if announced else None
            pinned.csr = pinned.batch.transposed()
            self._planned = max(self._planned, seq)
            self.stack.begin_lookup(seq)
            return self.fast.native.begin(pinned.batch.unique, next_use, seq)

    def _find_victims(self, plan: _core.Plan, pinned_since: int, stop: Callable[[], bool] | None) -> None:
        """Choose victims. The call waits without ``residency_lock``: rows that have not moved are found."""
        since, seq = pinned_since, plan.now
        while True:
            with self.residency_lock, self.stats.stage("plan_seconds"):
                oldest = self.order.oldest_in_use(seq)  # first, so that draining sees all releases
                self.drain_overflow()
                needed = self.fast.evict(min(since, oldest), plan)
            if not needed or since >= seq:
                break
            since += 1
            with self.stats.stage("wait_seconds"):
                released = self.order.wait_released(since, is_planner=True, stop=stop)
            if not released:
                since = seq
        self.stats.counters.shrunk_plans += since > pinned_since

    def drain_overflow(self) -> bool:
        """Demote rows in overflow slots that no lookup uses any more; return whether that is all."""
        native, returned = self.fast.native, self.order.take_returned()
        if not native.overflow_in_use:
            return True
        for slots in returned:
            self.fast.release(slots)
        drained = native.drainable()
        self._moves.demote(drained, self._planned)
        self.fast.drained(drained[0])
        return not native.overflow_in_use

    def _count(self, plan: _core.Plan, pinned: PinnedRows, every: list[FoundRows]) -> None:
        assert pinned.csr is not None
        starts = pinned.csr[0]
        self.curves.observe(pinned.batch.unique, starts)
        self.stats.count(plan, pinned.batch.unique[plan.absent], starts, every)
        seconds = sum(tier.policy_seconds for tier in self.stack.exclusive)
        self.stats.counters.policy_seconds += seconds - self._policy_seconds
        self._policy_seconds = seconds

    def wake(self) -> None:
        """Let threads that wait for releases look again; a forked child has none of these threads."""
        if self._process.is_here:
            self.order.wake()

    # -- rows outside of training ----------------------------------------------------------

    def read(self, keys: Keys, rows: RowBytes) -> None:
        """Copy the rows of ``keys`` (n,), without repeats, to ``rows``; no tier changes."""
        copies, left = self.layout.view(rows), np.arange(len(keys), dtype=np.int32)
        with self.residency_lock:
            self.check_open()
            for found in self.stack.find(keys):
                for positions, data, source in found.pieces:
                    if found.codec is None:
                        copies.copy_in(left[positions], data, source)
                    else:
                        found.codec.decode(copies, data, left[positions], source)
                left = left[~found.here]
            self.stats.counters.read_rows += len(keys)
        self.layout.initialise(copies, left, keys[left])

    def is_empty(self) -> bool:
        """Return whether no exclusive tier holds a row."""
        return all(next(tier.keys(), None) is None for tier in self.stack.exclusive)

    # -- rows that were changed -----------------------------------------------------------

    def mark_updated(self, pinned: TierRows) -> None:
        """Make the calls of :meth:`marking`. Raises ``ClosedError`` when the change would be lost."""
        self.check_open()
        for call in self.marking(pinned):
            call()

    def marking(self, pinned: TierRows) -> list[partial[None]]:
        """Return native calls that note a change of pinned rows. The calls take no lock: pinned rows stay."""
        return [partial(self.fast.native.mark_dirty, pinned.slots)] if self._rows_leave else []

    def flush(self) -> None:
        """Write every dirty row down to the store; rows stay where they are."""
        if self.stack.lasting:
            uninterrupted(self._flush)

    def _flush(self) -> None:
        with self.order.planner(), self.residency_lock:
            self.check_open()
            self.drain_overflow()
            self.stack.flush()

    def uncommitted_rows(self) -> int:
        """Return how many rows changed since the last commit; a row that was written down and changed again
        counts twice."""
        return self.stack.dirty_rows() + self.stats.uncommitted_rows

    # -- end -----------------------------------------------------------------------------

    def buffer_bytes(self) -> int:
        """Return the bytes of rows on their way between tiers."""
        return self._moves.nbytes + sum(tier.stats().buffer_bytes for tier in self.stack.tiers)

    def check_open(self) -> None:
        """Raise ``ClosedError`` after :meth:`close`, which :meth:`Engine.go_to` calls too, and in a forked
        child."""
        if os.getpid() != self._open_in:
            self.check_process()
            raise ClosedError(
                "the tables are closed; build the module again to use them. If they went back to a commit "
                "since the forward call, make that call again"
            )

    def close(self) -> None:
        """Refuse further calls, and end the threads of the tiers."""
        with self.residency_lock:
            self._open_in = 0
        self.stack.close()
