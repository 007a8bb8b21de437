"""One memory tier: its slots, the rows of a device at these slots, and the policy that chooses victims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cache_policies import lanes
from cache_policies.policy import Policy
from tierstore import _core
from tierstore.cache.device import HOST, Device
from tierstore.cache.tiers.buffers import Buffer
from tierstore.cache.tiers.codec import Codec
from tierstore.cache.tiers.protocol import (
    NEVER,
    Flags,
    FoundRows,
    Keys,
    MovingRows,
    RowBytes,
    Slots,
    Tier,
    TierStats,
)
from tierstore.cache.tiers.sizes import (
    AnyAdmission,
    AnyPolicy,
    as_admission,
    as_policy,
    lanes_of,
    overflow_rows,
    policy_bytes,
)
from tierstore.errors import ConfigError, PolicyFaultError, TierFullError
from tierstore.keys import split

_PIECE = 1 << 13
_WINDOW_COVER = 5  # distinct rows in the window per slot (docs/reference/policies.md)


@dataclass(frozen=True)
class OwnShare:
    """Slots that ``tables`` (indices) have to themselves; ``holds_all``: they hold every row of these
    tables, so nothing is ever evicted."""

    tables: tuple[int, ...]
    slots: int
    holds_all: bool


@dataclass(frozen=True)
class TierPlan:
    """Slots of one memory tier that its tables share, except the slots in ``own``; ``holds_all``: every row
    of the tables that share fits, so nothing is ever evicted there."""

    slots: int
    holds_all: bool
    own: tuple[OwnShare, ...] = ()
    device: Device = HOST
    """The device that has the rows."""
    weights: str = "fp32"
    """The dtype of weights that kernels work on, in rows of no other form."""
    codec: Codec | None = None
    """The form of the rows; None is that of the first tier."""
    leaving: Codec | None = None
    """The form of rows that leave, where it is not ``codec``."""
    has_lanes: bool = True
    """Whether many slots are divided into lanes. Where rows cannot leave, a lane would be full before all
    lanes are."""

    @property
    def capacity(self) -> int:
        """Return the number of all slots."""
        return self.slots + sum(share.slots for share in self.own)

    @property
    def evicts(self) -> bool:
        """Return whether any row may have to leave."""
        return not (self.holds_all and all(share.holds_all for share in self.own))

    def share_of(self, table: int) -> OwnShare | None:
        """Return the slots that ``table`` has to itself, if any."""
        return next((share for share in self.own if table in share.tables), None)


class _Share:
    """A policy and a filter for some slots, compiled; they own arrays that the native tier points to."""

    def __init__(self, slots: int, policy: Policy | None, admission: AnyAdmission) -> None:
        self.slots = slots
        self.policy = None if policy is None else policy.compile(slots)
        filter_ = None if policy is None else as_admission(admission)
        self.filter = None if filter_ is None else filter_.compile(slots)
        self.bytes = policy_bytes(policy, slots) + policy_bytes(filter_, slots)

    def config(self) -> _core.ShareConfig:
        return _core.ShareConfig(
            slots=self.slots,
            policy_state=0 if self.policy is None else self.policy.state_address,
            policy_hooks=None if self.policy is None else self.policy.hooks,
            filter_state=0 if self.filter is None else self.filter.state_address,
            filter_admit=0 if self.filter is None else self.filter.hooks["admit"],
        )


class _Lanes:
    """The lanes of a tier, each a list of shares. A share of many slots has lanes of its own; all other
    shares are in one lane."""

    def __init__(self, plan: TierPlan, policy: Policy, admission: AnyAdmission, tables: int) -> None:
        self.lanes: list[list[_Share]] = []
        self.share_of = [0] * tables  # of the tables in the lane of several shares
        shared = [table for table in range(tables) if plan.share_of(table) is None]
        parts = [(o.tables, o.slots, o.holds_all) for o in plan.own]
        if plan.slots or not parts:  # else every table of the group has slots of its own
            parts.insert(0, (tuple(shared), plan.slots, plan.holds_all))
        few: list[_Share] = []
        ranges: list[tuple[int, int] | None] = [None] * tables
        for members, slots, holds_all in parts:
            chosen = None if holds_all else policy
            sizes = lanes_of(slots, chosen) if plan.has_lanes else [slots]
            if len(self.lanes) + len(sizes) > lanes.MOST_LANES_IN_TIER:
                sizes = [slots]
            own = [_Share(n, chosen, admission) for n in sizes]
            for table in members:
                self.share_of[table] = len(few) if len(own) == 1 else 0
                ranges[table] = None if len(own) == 1 else (len(self.lanes), len(own))
            if len(own) == 1:
                few += own
            else:
                self.lanes += [[share] for share in own]
        if few:
            self.lanes.append(few)
        self.lanes_of = [span or (len(self.lanes) - 1, 1) for span in ranges]


class MemoryTier(Tier):
    """Rows of one layout in memory.

    ``plan`` says how the slots are shared; of shares that cannot hold all of their tables' rows, ``policy``
    chooses the victims. ``tables``: how many there are in the engine. ``admission`` may refuse rows a slot;
    such rows, and rows of a batch that does not fit, are used from overflow slots. None: the tier has no
    overflow slots, and refuses no row.

    In the first tier of a group lookups are planned, through ``native``; a lower tier gets rows by ``put``.

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
        self.plan = plan
        self.codec, self.leaving = plan.codec, plan.leaving or plan.codec
        self.capacity = capacity = plan.capacity
        self.row_bytes = row_bytes
        self.tables = tables
        policy = as_policy(policy)
        self.uses_window = plan.evicts and policy.uses_window
        self.policy_name = policy.name if plan.evicts else "none"
        # The compiled policies own the arrays that the native tier points to: keep them as long as the tier.
        layout = _Lanes(plan, policy, admission or "always", tables)
        self._shares = [share for lane in layout.lanes for share in lane]
        self._policy_bytes = sum(share.bytes for share in self._shares)
        self._found = Buffer(row_bytes)
        self._leaving = Buffer(row_bytes if self.leaving is None else self.leaving.row_bytes)
        overflow = 0 if admission is None else overflow_rows(row_bytes)
        overflow += -overflow % len(layout.lanes)  # every lane has as many
        try:
            self.native = _core.Tier(
                lanes=[[share.config() for share in lane] for lane in layout.lanes],
                grows=plan.holds_all and not plan.own,
                overflow_slots=overflow,
                share_of=layout.share_of,
                lanes_of=layout.lanes_of,
            )
            self.rows = plan.device.allocate(capacity + overflow, row_bytes, plan.weights)
            self.rows.commit(self.native.committed)
        except _core.AddressSpaceError as refused:
            raise ConfigError(
                f"{name}: no room for {capacity} rows of {row_bytes} bytes, and {overflow} overflow slots: "
                f"{refused}. Raise the process's limit (ulimit -v), or lower {name}"
            ) from None

    def __len__(self) -> int:
        return len(self.native)

    @property
    def window_rows(self) -> float:
        return _WINDOW_COVER * self.capacity if self.uses_window else 0.0

    @property
    def policy_seconds(self) -> float:
        seconds: float = self.native.policy_seconds
        return seconds

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
        slots = self.slots_of(keys)
        here = slots >= 0
        positions = np.flatnonzero(here)
        if not len(positions):
            return FoundRows(here, [])
        slots = slots[positions]
        rows = self._found.take(len(slots))
        self.copy_out(slots, rows)
        dirty = self.native.dirty_of(slots)
        return FoundRows(here, [(positions, rows, None)], dirty, slots, codec=self.codec)

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
        self.copy_in(slots, rows.rows, codec=rows.codec)
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
