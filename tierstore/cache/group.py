"""The group of tiers for tables of one row layout: fast tier → host tier → row store.

Rows are in exactly one memory tier or in none; the store holds the last version that was written down,
which is the valid one unless a memory tier has the row. Locks: ``sequence.planner()`` is held by whoever
changes which rows are where; ``residency_lock`` guards the tiers' data structures and is never held while
waiting for a release.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_policies.live import LiveCurves
from tierstore import _core
from tierstore.cache.layout import RowLayout, Segment
from tierstore.cache.lookup_order import LookupOrder
from tierstore.cache.pinned_rows import PinnedRows
from tierstore.cache.process import OwnProcess
from tierstore.cache.stats import GroupStats
from tierstore.cache.tiers.memory import Flags, Keys, MemoryTier
from tierstore.cache.tiers.read_ahead import ReadAhead
from tierstore.cache.tiers.stack import Below, LowerTiers
from tierstore.cache.uninterrupted import uninterrupted
from tierstore.config import format_bytes
from tierstore.errors import ClosedError, InputError, TierFullError
from tierstore.store.protocol import RowStore

logger = logging.getLogger("tierstore")

_PIECE = 1 << 13  # rows that leave for the store at a time


class TierGroup:
    """Tiers of tables with one row layout. ``host`` and ``store`` may be missing."""

    def __init__(
        self,
        name: str,
        layout: RowLayout,
        fast: MemoryTier,
        host: MemoryTier | None,
        store: RowStore | None,
        tables: Sequence[int],
        read_ahead_bytes: int = 0,
    ) -> None:
        self.name = name
        self.layout = layout
        self.tables = tables
        self.fast = fast
        self.order = LookupOrder()
        self.window = _core.Window()
        self.curves = LiveCurves(tables)
        self._planned = -1
        self.residency_lock = threading.RLock()
        ahead = None
        if store is not None and read_ahead_bytes:
            tiers = [fast] if host is None else [fast, host]
            resident = None if all(tier.uses_window for tier in tiers) else self._resident
            ahead = ReadAhead(store, layout.row_bytes, read_ahead_bytes, self.residency_lock, resident)
        named = {"hbm": fast, "uvm": host, "ssd": store}
        self.stats = GroupStats((tier for tier, there in named.items() if there is not None), fast.tables)
        self.below = LowerTiers(name, layout.row_bytes, host, store, ahead, self.stats)
        self._closed = False
        self._process = OwnProcess()
        self._warned_overflow = False

    # -- what is counted -----------------------------------------------------------------

    def _count(self, plan: Any, pinned: PinnedRows, found: Below) -> None:
        assert pinned.csr is not None
        weight = np.diff(pinned.csr[0])
        self.curves.observe(pinned.batch.unique, weight)
        missing = pinned.batch.unique[plan.absent]
        self.stats.count(plan, missing, weight, [("uvm", found.in_host), ("ssd", found.in_store)])

    @contextmanager
    def _planning_time(self) -> Iterator[None]:
        begin, hooks = time.perf_counter(), self._policy_seconds()
        try:
            yield
        finally:
            self.stats.counters.plan_seconds += time.perf_counter() - begin
            self.stats.counters.policy_seconds += self._policy_seconds() - hooks

    def _policy_seconds(self) -> float:
        return sum(tier.native.policy_seconds for tier in self.memory_tiers())

    # -- lookups -------------------------------------------------------------------------

    def batch(self, segments: Sequence[Segment]) -> Any:
        """Deduplicated ids of a lookup; ``InputError`` names the feature, the id and the bound of a
        wrong one."""
        self.check_open()
        batch, bad, position, value = _core.make_batch(
            [(s.address, s.count, s.is_int32, s.table, s.bound, s.padding) for s in segments]
        )
        if bad >= 0:
            segment = segments[bad]
            raise InputError(
                f"{segment.name}: id {value} at position {position} is out of range [0, {segment.bound})"
            )
        return batch

    def lookup(self, batch: Any) -> PinnedRows:
        """Plans and fetches now. A signal that raises meanwhile leaves all rows as before or after it."""
        return uninterrupted(lambda: self._lookup(batch))

    def _lookup(self, batch: Any) -> PinnedRows:
        self.check_open()
        # While a window is announced its numbers are taken: share the newest planned one.
        shared = self.window.lookups > 0 and self._planned >= 0
        seq = self._planned if shared else self.order.take()
        pinned = PinnedRows(self, batch, seq)
        self.plan(pinned, pinned_since=seq)
        return pinned

    def announce(self, seq: int, batch: Any) -> None:
        """Lookup ``seq`` will come: its ids become part of the window."""
        with self.residency_lock, self._planning_time():
            self.check_open()
            first_seen = self.window.announce(seq, batch)
            self.below.announce(seq, self._announce(first_seen, seq))

    def _announce(self, keys: Keys, next_use: int) -> Keys:
        """Tells the tiers when rows that they may hold are used next; the others, as far as they know."""
        for tier in self.memory_tiers():
            if tier.uses_window:
                keys = tier.native.announce(keys, next_use, self._planned)
        return keys

    def forget_window(self) -> None:
        """Announced lookups that were not planned will not come."""
        with self.residency_lock:
            keys = self.window.clear()
            self._announce(keys, np.iinfo(np.int64).max)
            if self.below.ahead is not None:
                self.below.ahead.forget()

    def plan(
        self,
        pinned: PinnedRows,
        pinned_since: int,
        *,
        announced: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """Brings the pinned's rows into the fast tier and pins them.

        Rows used by lookups from ``pinned_since`` on stay. If room is short, waits for further releases,
        and at last uses the transient pad. Raises what the tiers raise; then nothing has changed.
        """
        with self.order.planner():
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
        fast, keys, ahead = self.fast.native, pinned.batch.unique, self.below.ahead
        plan, placed = self._begin(pinned, announced), False
        try:
            self._find_victims(plan, pinned_since, stop)
            if ahead is not None:
                ahead.wait(pinned.seq)
            with self.residency_lock, self._planning_time():
                missing = keys[plan.absent]
                found = self._make_room(plan, missing)
                fast.assign(keys, True, plan)
                placed = True
                try:
                    self._fill(plan.slots[plan.absent], missing, found)
                    if ahead is not None:
                        ahead.taken(pinned.seq, missing)
                    self._count(plan, pinned, found)
                    pinned.slots, pinned.device_rows = plan.slots, self.fast.rows
                except BaseException:
                    self._take_back(plan, missing, found)
                    raise
        except BaseException:
            if not placed:
                with self.residency_lock:
                    self.fast.abort(plan)
            raise

    def _begin(self, pinned: PinnedRows, announced: bool) -> Any:
        seq = pinned.seq
        with self.residency_lock, self._planning_time():
            self.check_open()
            if announced:
                pinned.before = self.stats.plans_ahead()
            elif not self.window.lookups:
                self.stats.plans_now()
            self._drain_pad()
            next_use = self.window.take(seq) if announced else None
            pinned.csr = _core.build_csr(pinned.batch.inverse, len(pinned.batch.unique))
            self._planned = max(self._planned, seq)
            if self.below.ahead is not None:
                self.below.ahead.begun(seq)
            return self.fast.native.begin(pinned.batch.unique, next_use, seq)

    def _find_victims(self, plan: Any, pinned_since: int, stop: Callable[[], bool] | None) -> None:
        """Chooses victims. Does not hold ``residency_lock`` while it waits: until the rows move, they are
        found where they were."""
        since, seq = pinned_since, plan.now
        while True:
            with self.residency_lock, self._planning_time():
                oldest = self.order.oldest_in_use(seq)  # first: what is over by now, the pad must know
                self._drain_pad()
                needed = self.fast.evict(min(since, oldest), plan)
            if not needed or since >= seq:
                break
            since += 1
            if not self.order.wait_released(since, is_planner=True, stop=stop):
                since = seq
        self.stats.counters.shrunk_plans += since > pinned_since

    def _make_room(self, plan: Any, missing: Keys) -> Below:
        """Takes the missing rows from below, and hands the victims down: whatever can fail comes before
        anything that cannot be undone without the store."""
        found = self.below.collect(missing)
        try:
            if plan.needed + plan.refused and not self.below.exist:
                # Rows in the pad have to go somewhere when they are released.
                raise TierFullError(
                    f"{self.name}: the hbm tier is full ({self.fast.capacity} rows of "
                    f"{self.layout.row_bytes} bytes) and there is no tier below; raise hbm, or set ssd"
                )
            self.fast.prepare(plan, use_pad=True)
            self._count_overflow(plan.needed)
            self._demote(plan, plan.now)
        except BaseException:
            self.below.restore(found, missing, plan.now)
            raise
        return found

    def _take_back(self, plan: Any, missing: Keys, found: Below) -> None:
        """Undoes a plan whose victims are below already: the rows that it has missed leave again."""
        native, capacity = self.fast.native, self.fast.capacity
        slots = plan.slots[plan.absent]
        native.remove(slots[slots < capacity])
        self.fast.drained(slots[slots >= capacity])  # before the others: it forgets what is drainable
        self.fast.release(np.delete(plan.slots, plan.absent))
        self.below.restore(found, missing, plan.now)

    def _demote(self, plan: Any, seq: int) -> None:
        """Hands the plan's victims to the tiers below."""
        victims = plan.victims
        self._hand_down(victims, seq)
        self.stats.counters.evicted_rows += len(victims[0])

    def _hand_down(self, departures: tuple[Any, Keys, Any, Any], seq: int) -> None:
        """Gives rows that leave the fast tier to the tiers below."""
        slots, keys, dirty, next_use = departures
        # A row that was stored and then stays does no harm; in a memory tier it would be there twice.
        step = _PIECE if self.below.host is None else len(slots)
        for begin in range(0, len(slots), max(1, step)):
            part = slice(begin, begin + step)
            rows = self.below.buffer("victims", len(slots[part]))
            self.fast.copy_out(slots[part], rows)
            self.below.demote(keys[part], rows, dirty[part], next_use[part], seq)

    def _count_overflow(self, rows: int) -> None:
        self.stats.counters.overflow_rows += rows
        if rows and not self._warned_overflow:
            self._warned_overflow = True
            logger.warning(
                "%s: the rows in use at once exceed the hbm tier (%d rows) by %d; they use a transient pad "
                "of %s outside the budget. Raise hbm, or use smaller batches. (said once)",
                self.name,
                self.fast.capacity,
                rows,
                format_bytes(rows * self.layout.row_bytes),
            )

    def wake(self) -> None:
        """Lets threads that wait for releases look again; a forked child has none of these threads."""
        if self._process.is_here:
            self.order.wake()

    # -- moving rows ---------------------------------------------------------------------

    def memory_tiers(self) -> Iterator[MemoryTier]:
        yield self.fast
        if self.below.host is not None:
            yield self.below.host

    def is_empty(self) -> bool:
        """Whether no memory tier holds a row."""
        return not any(len(tier) for tier in self.memory_tiers())

    def _resident(self, keys: Keys) -> Flags:
        here = self.fast.find(keys) >= 0
        if self.below.host is not None:
            others = np.flatnonzero(~here)
            here[others] = self.below.host.find(keys[others]) >= 0
        return here

    def _drain_pad(self) -> None:
        """Writes down rows of the pad that no lookup uses any more."""
        native, returned = self.fast.native, self.order.take_returned()
        if not native.pad_in_use:
            return
        for slots in returned:
            self.fast.release(slots)
        drained = native.drainable()
        self._hand_down(drained, self._planned)
        self.fast.drained(drained[0])

    def _fill(self, slots: NDArray[np.int32], keys: Keys, below: Below) -> None:
        """Puts rows at ``slots`` of the fast tier: those from below, and initial values for the others."""
        if below.in_host is not None and below.lifted is not None and below.dirty is not None:
            lifted = slots[below.in_host]
            self.fast.copy_in(lifted, below.lifted)
            self.fast.native.set_dirty(lifted, below.dirty)
            slots, keys = slots[~below.in_host], keys[~below.in_host]
        if below.in_store is not None:
            for positions, rows, source in below.pieces:
                self.fast.rows.copy_in(slots[positions], rows, source)
            slots, keys = slots[~below.in_store], keys[~below.in_store]
        if len(keys):
            self.fast.rows.initialise(self.layout.initial, slots, keys)

    # -- rows that were changed -----------------------------------------------------------

    def mark_updated(self, pinned: PinnedRows) -> None:
        """The pinned's rows were changed. Needs no lock: the rows are pinned by the pinned.

        Raises ClosedError when the change would be lost."""
        self.check_open()
        self.fast.native.mark_dirty(pinned.slots)

    def flush(self) -> None:
        """Writes every dirty row down to the store; rows stay where they are."""
        if self.below.store is not None:
            uninterrupted(self._flush)

    def _flush(self) -> None:
        with self.order.planner(), self.residency_lock:
            self.check_open()
            self._drain_pad()
            for tier in self.memory_tiers():
                for slots in tier.resident(only_dirty=True):
                    # First: what an update changes after the copy, while this goes on, stays dirty.
                    tier.native.mark_clean(slots)
                    try:
                        rows = self.below.buffer("written", len(slots))
                        tier.copy_out(slots, rows)
                        self.below.write(tier.native.keys_of(slots), rows)
                    except BaseException:
                        tier.native.mark_dirty(slots)
                        raise

    # -- end -----------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raises ``ClosedError`` in a forked child, where no tier is."""
        self._process.check()

    def check_open(self) -> None:
        self._process.check()
        if self._closed:
            raise ClosedError("the tables are closed; build the module again to use them")

    def close(self) -> None:
        with self.residency_lock:
            self._closed = True
        if self.below.ahead is not None:
            self.below.ahead.close()
