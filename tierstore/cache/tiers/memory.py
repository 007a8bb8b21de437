"""One memory tier: its slots, the rows of a device at these slots, and the policy that chooses victims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from tierstore import _core
from tierstore.cache.device import DeviceRows
from tierstore.cache.tiers.buffers import Buffer
from tierstore.cache.tiers.codec import Codec
from tierstore.cache.tiers.protocol import (
    NEVER,
    Flags,
    FoundRows,
    Keys,
    MovingRows,
    RowBytes,
    RowsAt,
    Slots,
    Tier,
    TierStats,
)
from tierstore.cache.tiers.shares import Lanes, TierPlan
from tierstore.cache.tiers.sizes import AnyAdmission, AnyPolicy, as_policy, overflow_rows
from tierstore.errors import ConfigError, DeviceFullError, PolicyFaultError, TierFullError
from tierstore.keys import split

_PIECE = 1 << 13
_WINDOW_COVER = 5  # distinct rows in the window per slot (docs/reference/policies.md)


class MemoryTier(Tier):
    """Rows of one layout in memory.

    ``plan`` says how the slots are shared; of shares that cannot hold all of their tables' rows, ``policy``
    chooses the victims. ``tables``: how many there are in the engine. ``admission`` may refuse rows a slot;
    such rows, and rows of a batch that does not fit, are used from overflow slots. None: the tier has no
    overflow slots, and refuses no row.

    In the fast tier of a group lookups are planned, through ``native``; a lower tier gets rows by ``put``.

    Raises ``ConfigError`` when the system refuses the address space.
    """

    exclusive = True

    def __init__(
        self,
        name: str,
        plan: TierPlan,
        row_bytes: int,
        policy: AnyPolicy,
        tables: int,
        admission: AnyAdmission | None = None,
    ) -> None:
        self.name = name
        self.codec, self.leaving = plan.codec, plan.leaving or plan.codec
        self.row_bytes = row_bytes
        self.tables = tables
        self._policy, self._admission = as_policy(policy), admission
        self.uses_window = plan.evicts and self._policy.uses_window
        self.policy_name = self._policy.name if plan.evicts else "none"
        self._found = Buffer(row_bytes)
        self._leaving = Buffer(row_bytes if self.leaving is None else self.leaving.row_bytes)
        self._seconds_before = 0.0
        self._open(plan)

    def _open(self, plan: TierPlan) -> None:
        """Make empty slots. Nothing changes if the system refuses."""
        layout = Lanes(plan, self._policy, self._admission or "always", self.tables)
        overflow = 0 if self._admission is None else overflow_rows(self.row_bytes)
        overflow += -overflow % len(layout.lanes)  # every lane has as many
        try:
            native = _core.Tier(
                lanes=[[share.config() for share in lane] for lane in layout.lanes],
                grows=plan.holds_all and not plan.own,
                overflow_slots=overflow,
                share_of=layout.share_of,
                lanes_of=layout.lanes_of,
            )
            slots, kept = plan.capacity + overflow, plan.capacity
            rows = plan.device.allocate(slots, self.row_bytes, plan.weights, plan.dim, kept)
            rows.commit(native.committed)
        except _core.AddressSpaceError as refused:
            raise (ConfigError if plan.device.name == "cpu" else DeviceFullError)(
                f"{self.name}: no room for {plan.capacity} rows of {self.row_bytes} bytes, and {overflow} "
                f"overflow slots: {refused}. Raise the process's limit (ulimit -v), or lower {self.name}"
            ) from None
        self.plan, self.capacity, self.native, self.rows = plan, plan.capacity, native, rows
        # The compiled policies own the arrays that the native tier points to: keep them as long as the tier.
        self._shares = [share for lane in layout.lanes for share in lane]
        self._policy_bytes = sum(share.bytes for share in self._shares)
        self._staging: DeviceRows | None = None

    def empty(self, to: Tier, room: Buffer, demote: Callable[[MovingRows], None]) -> None:
        """Hand all rows down to the tier ``to``, in pieces. No lookup may use a row.

        Where ``demote`` raises, its rows and the rest stay.
        """
        for slots in self._resident():
            keys, dirty = self.native.keys_of(slots), self.native.dirty_of(slots)
            demote(self.departing((slots, keys, dirty, np.full(len(slots), NEVER)), to, room))
            self.native.remove(slots)

    def resize(self, slots: int) -> None:
        """Let the tables share ``slots`` slots, with a new policy. The tier is empty.

        Raises ``ConfigError`` when the system refuses; then the slots are as before.
        """
        self.rows.discard(0)  # first, so that the memory of both never exists at once
        seconds = self.policy_seconds
        self._open(replace(self.plan, slots=slots))
        self._seconds_before = seconds

    def __len__(self) -> int:
        return len(self.native)

    @property
    def window_rows(self) -> float:
        return _WINDOW_COVER * self.capacity if self.uses_window else 0.0

    @property
    def policy_seconds(self) -> float:
        return self._seconds_before + float(self.native.policy_seconds)

    # -- slots ---------------------------------------------------------------------------

    def slots_of(self, keys: Keys) -> Slots:
        """Return the slots of ``keys``, -1 where a row is not here."""
        return self.native.find(keys)

    def copy_out(self, slots: Slots, out: RowBytes) -> None:
        """Copy the rows at ``slots`` to ``out``, one after the other."""
        self.rows.copy_out(slots, out)

    def copy_in(
        self, slots: Slots, rows: RowBytes, source: Slots | None = None, codec: Codec | None = None
    ) -> None:
        """Copy row i of ``rows``, or row ``source[i]``, to ``slots[i]``, for all i. ``codec``: the form of
        ``rows``, the tier's or one of a lower tier."""
        if codec is self.codec:
            self.rows.copy_in(slots, rows, source)
        else:
            assert self.codec is None
            assert codec is not None
            codec.decode(self.rows, rows, slots, source)

    def copy_out_as(self, codec: Codec | None, slots: Slots, keys: Keys, out: RowBytes) -> None:
        """Copy the rows of ``keys`` at ``slots`` to ``out`` in the form ``codec``, the tier's or one of a
        lower tier."""
        if codec is self.codec:
            self.rows.copy_out(slots, out)
        else:
            assert self.codec is None
            assert codec is not None
            codec.encode(self.rows, keys, out, slots)

    def departing(self, departures: _core.Departures, to: Tier | None, room: Buffer) -> MovingRows:
        """Return rows that leave for the tier ``to``: where they are, if it takes them from there, or else
        copies in its form, valid until ``room`` is used again."""
        slots, keys, dirty, next_use = departures
        if to is not None and to.takes(self.rows):
            return MovingRows(keys, room.take(0), dirty, next_use, at=RowsAt(self.rows, slots))
        rows, form = room.take(len(slots)), None if to is None else to.codec
        self.copy_out_as(form, slots, keys, rows)
        return MovingRows(keys, rows, dirty, next_use, form)

    def evict(self, pinned_since: int, plan: _core.Plan) -> int:
        """Look for the plan's victims among rows last used before lookup ``pinned_since``.

        Returns how many are still needed. Raises ``PolicyFaultError`` if the policy breaks its contract;
        abort the plan then.
        """
        try:
            return self.native.evict(pinned_since, plan)
        except _core.PolicyFault as fault:
            raise PolicyFaultError(
                f"{self.name}: policy {self.policy_name!r} broke its contract in plan {plan.now}: {fault}. "
                "All rows are as they were. cache_policies.check(policy) finds such faults; "
                "built-in policies have none"
            ) from None

    def prepare(self, plan: _core.Plan, *, use_overflow: bool) -> None:
        """Take the memory that assigning the plan's slots needs, so that assigning cannot fail.

        Raises ``TierFullError``; abort the plan then.
        """
        try:
            self.rows.commit(self.native.prepare(use_overflow, plan))
        except (_core.OverflowFull, _core.AddressSpaceError) as refused:
            raise TierFullError(
                f"{self.name}: {refused}; raise {self.name}, or use smaller batches"
            ) from None

    def abort(self, plan: _core.Plan) -> None:
        """Keep the plan's victims, and give back what the plan has pinned."""
        self._move(self.native.abort(plan))

    def release(self, slots: Slots) -> None:
        """End a lookup that used ``slots``."""
        self._move(self.native.release(slots))

    def _move(self, moves: tuple[Slots, Slots]) -> None:
        if len(moves[0]):
            self.rows.move(*moves)

    def drained(self, slots: Slots) -> None:
        """Forget the rows at these overflow slots, which the caller has written down."""
        self.native.drained(slots)
        if not self.native.overflow_in_use:
            self.rows.discard(self.capacity)

    def _resident(self, *, only_dirty: bool = False) -> Iterator[Slots]:
        """Yield slots that hold rows, in order, in pieces; nothing may move meanwhile."""
        start = 0
        while len(slots := self.native.resident_slots(only_dirty, start, _PIECE)):
            yield slots
            start = int(slots[-1]) + 1

    # -- as a tier -------------------------------------------------------------------------

    def find(self, keys: Keys) -> FoundRows:
        return self._find(keys, self._copies)

    def promote(self, keys: Keys) -> FoundRows:
        if self._staging is None and self.codec is None:
            self._staging = self.plan.device.staging(self.capacity, self.row_bytes)
        return self._find(keys, self._copies if self._staging is None else self._promoted)

    def _find(self, keys: Keys, copies: Callable[[Slots], RowBytes | RowsAt]) -> FoundRows:
        slots = self.slots_of(keys)
        here = slots >= 0
        positions = np.flatnonzero(here)
        if not len(positions):
            return FoundRows(here, [])
        slots = slots[positions]
        rows, dirty = copies(slots), self.native.dirty_of(slots)
        if isinstance(rows, RowsAt):
            return FoundRows(here, [], dirty, slots, promoted=rows)
        return FoundRows(here, [(positions, rows, None)], dirty, slots, codec=self.codec)

    def _copies(self, slots: Slots) -> RowBytes:
        rows = self._found.take(len(slots))
        self.copy_out(slots, rows)
        return rows

    def _promoted(self, slots: Slots) -> RowsAt:
        """Copy rows to where the fast tier takes them from; their slots may be written again at once."""
        assert self._staging is not None
        at = np.arange(len(slots), dtype=np.int32)
        try:
            self._staging.commit(len(slots))
        except _core.AddressSpaceError as refused:
            raise TierFullError(
                f"{self.name}: no room for {len(slots)} rows on their way up: {refused}; lower hbm, or use "
                "smaller batches"
            ) from None
        self._staging.copy_rows(at, self.rows, slots)
        return RowsAt(self._staging, at)

    def takes(self, rows: DeviceRows) -> bool:
        return self.codec is None and self.plan.device.takes(rows)

    def holds(self, keys: Keys) -> Flags:
        return self.slots_of(keys) >= 0

    def take(self, found: FoundRows) -> None:
        if found.slots is not None:
            self.native.remove(found.slots)

    def put(self, rows: MovingRows, seq: int, demote: Callable[..., None]) -> None:
        native = self.native
        plan = native.begin(rows.keys, rows.next_use, seq, absent=True)
        try:
            self.evict(NEVER, plan)
            self.prepare(plan, use_overflow=False)
            # Rows that find no room here go to the lower tiers.
            past = plan.unplaced()
            slots, victims, dirty, next_use = plan.victims
            leaving = []
            if len(slots):
                copies = self._leaving.take(len(slots))
                self.copy_out_as(self.leaving, slots, victims, copies)
                leaving.append(MovingRows(victims, copies, dirty, next_use, self.leaving))
            if len(past):
                leaving.append(rows.part(past).converted(self.leaving))
            if leaving:
                demote(*leaving)
        except BaseException:
            self.abort(plan)
            raise
        native.assign(rows.keys, False, plan)
        stay = plan.slots >= 0
        slots, rows = (plan.slots, rows) if stay.all() else (plan.slots[stay], rows.part(stay))
        if rows.at is None:
            self.copy_in(slots, rows.rows, codec=rows.codec)
        else:
            self.rows.copy_rows(slots, rows.at.rows, rows.at.slots)
        native.set_dirty(slots, rows.dirty)

    def flush(self, write: Callable[[Keys, RowBytes], None]) -> None:
        for slots in self._resident(only_dirty=True):
            # Mark clean first: a row that an update changes after the copy stays dirty.
            self.native.mark_clean(slots)
            try:
                keys, rows = self.native.keys_of(slots), self._leaving.take(len(slots))
                self.copy_out_as(self.leaving, slots, keys, rows)
                write(keys, rows)
            except BaseException:
                self.native.mark_dirty(slots)
                raise

    def keys(self, table: int | None = None, *, only_dirty: bool = False) -> Iterator[Keys]:
        for slots in self._resident(only_dirty=only_dirty):
            keys = self.native.keys_of(slots)
            yield keys if table is None else keys[split(keys)[0] == table]

    def dirty_rows(self) -> int:
        return self.native.dirty_rows()

    def announce(self, keys: Keys, next_use: int, now: int) -> Keys:
        # Rows that never leave need no lower tier; of other rows a policy without a window knows no use.
        knows = self.uses_window or not self.plan.evicts
        return self.native.announce(keys, next_use, now) if knows else keys

    def stats(self) -> TierStats:
        """Return the tier's sizes; for each table its rows here, its own slots (None: it shares), and whether
        the tier holds all of its rows."""
        tables = []
        for index, rows in enumerate(self.native.table_rows()):
            own = self.plan.share_of(index)
            tables.append(
                {
                    "resident_rows": rows,
                    "slots": None if own is None or len(own.tables) > 1 else own.slots,
                    "holds_all": self.plan.holds_all if own is None else own.holds_all,
                }
            )
        memory = len(self) * self.row_bytes + self.native.metadata_bytes + self._policy_bytes
        return TierStats(memory, self._found.nbytes + self._leaving.nbytes, tables)
