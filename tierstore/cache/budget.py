"""Divides the budgets of the memory tiers among tables and groups (one per row layout).

First come tables with bytes of their own (``TableOverride``): they get these slots, and no others. Then, in
``hbm``, small tables become wholly resident: tables of at most a sixteenth of the largest table's bytes,
smallest first, up to half of what is left where their whole row layout is small, else up to a 32nd. The other
tables of a group share its slots. Groups get bytes in proportion to their tables' bytes, and never more than
all of their rows take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cache_policies.lanes import lane_slots
from tierstore.cache.device import HOST, Device
from tierstore.cache.machine import check_lockable
from tierstore.cache.tiers.shares import OwnShare, TierPlan
from tierstore.cache.tiers.sizes import (
    MAX_SLOTS,
    MIN_SLOTS,
    AnyAdmission,
    AnyPolicy,
    bytes_for,
    slots_for,
)
from tierstore.config import TierConfig, format_bytes
from tierstore.errors import ConfigError, DeviceFullError

_HUGE = 1 << 62
SMALL = 1 / 16
"""A table up to this share of the largest table's size is small enough to be resident by default."""
RESIDENT_SHARE = 1 / 2
"""The share of the budget that small tables may take in all."""
RESIDENT_SHARE_OF_NEIGHBOURS = 1 / 32
"""The share of the budget for small tables whose row layout has larger tables, too: these layouts share
enough slots, and the policy knows better than sizes do which rows deserve a slot."""


@dataclass(frozen=True)
class TableDemand:
    """Rows of a table. ``own``: bytes of the tier for it alone. ``share``: its weight where the other bytes
    are divided (None: its bytes). ``is_whole``: its ids are 0 .. rows - 1, and not those of a shard."""

    index: int
    name: str
    rows: int
    own: int | None = None
    share: int | None = None
    is_whole: bool = True


@dataclass(frozen=True)
class GroupDemand:
    """The tables of one row layout."""

    name: str
    row_bytes: int
    tables: tuple[TableDemand, ...]

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)

    @property
    def weight(self) -> int:
        """The group's part of a budget is in proportion to this number."""
        shares = [table.share for table in self.tables]
        stated = [share for share in shares if share is not None]
        return sum(stated) if len(stated) == len(shares) else self.rows * self.row_bytes

    def without(self, tables: Iterable[int]) -> GroupDemand:
        """Return the same demand without some tables, by their indices."""
        gone = set(tables)
        return replace(self, tables=tuple(table for table in self.tables if table.index not in gone))


def divide(
    budget: int,
    demands: Sequence[GroupDemand],
    policy: AnyPolicy,
    tier: str,
    admission: AnyAdmission = "always",
    *,
    by_id: bool = False,
) -> list[TierPlan]:
    """Return the slots per group for ``budget`` bytes. A tier that holds all rows needs no bytes of a policy.
    ``by_id``: it has lanes by id, where it has room for them.

    Raises ``ConfigError`` with the minimum if the budget is too small for the tables' own bytes and
    ``MIN_SLOTS`` rows per group.
    """
    own: list[list[OwnShare]] = []
    taken = 0
    for demand in demands:
        shares = [_own_share(table, demand.row_bytes, policy, admission, tier) for table in demand.tables]
        own.append([share for share in shares if share is not None])
        taken += sum(_own_bytes(share, demand.row_bytes, policy, admission) for share in own[-1])
    rest = _without(demands, own)
    minimum = [_min_bytes(d, policy, admission) for d in rest]
    if taken + sum(minimum) > budget:
        total = taken + sum(minimum)
        raise ConfigError(
            f"the {tier} budget of {budget} bytes is below the minimum for these tables; raise it to at "
            f"least {total} bytes ({format_bytes(total)}: {taken} bytes that tables have to themselves, and "
            f"{MIN_SLOTS} rows and their metadata for each of {sum(map(bool, minimum))} row layouts)"
        )
    if tier == "hbm" and sum(_bytes_of_all(d) for d in rest) > budget - taken:
        resident = _small(budget - taken, rest, sum(minimum))
        for kept, demand, small in zip(own, rest, resident, strict=True):
            if small:
                rows = sum(table.rows for table in small)
                kept.append(OwnShare(tuple(table.index for table in small), rows, True))
                taken += bytes_for(rows, demand.row_bytes, None)
        rest = _without(demands, own)
    all_rows = [_all_rows(d, by_id and not shares) for d, shares in zip(rest, own, strict=True)]
    plans = _divide_shared(budget - taken, rest, all_rows, policy, admission)
    return [replace(plan, own=tuple(shares)) for plan, shares in zip(plans, own, strict=True)]


def _without(demands: Sequence[GroupDemand], own: Sequence[Sequence[OwnShare]]) -> list[GroupDemand]:
    """Return the demands of tables that share slots."""
    return [
        demand.without(index for share in shares for index in share.tables)
        for demand, shares in zip(demands, own, strict=True)
    ]


def _own_share(
    table: TableDemand, row_bytes: int, policy: AnyPolicy, admission: AnyAdmission, tier: str
) -> OwnShare | None:
    if table.own is None:
        return None
    if table.own >= bytes_for(table.rows, row_bytes, None):
        return OwnShare((table.index,), table.rows, True)
    minimum = bytes_for(min(MIN_SLOTS, table.rows), row_bytes, policy, admission)
    if table.own < minimum:
        raise ConfigError(
            f"table {table.name!r}: {tier} is {table.own} bytes; raise it to at least {minimum} bytes"
        )
    slots = slots_for(table.own, row_bytes, policy, admission)
    return OwnShare((table.index,), min(slots, table.rows), slots >= table.rows)


def _own_bytes(share: OwnShare, row_bytes: int, policy: AnyPolicy, admission: AnyAdmission) -> int:
    if share.holds_all:
        return bytes_for(share.slots, row_bytes, None)
    return bytes_for(share.slots, row_bytes, policy, admission)


def _min_bytes(demand: GroupDemand, policy: AnyPolicy, admission: AnyAdmission) -> int:
    least = bytes_for(min(MIN_SLOTS, demand.rows), demand.row_bytes, policy, admission)
    return min(least, _bytes_of_all(demand))


def _bytes_of_all(demand: GroupDemand, slots: int | None = None) -> int:
    """Return the bytes of a tier that holds all rows, in ``slots`` slots (None: one for each)."""
    if not demand.tables:
        return 0
    return min(_HUGE, bytes_for(demand.rows if slots is None else slots, demand.row_bytes, None))


def _all_rows(demand: GroupDemand, by_id: bool, most: int = MAX_SLOTS) -> TierPlan:
    """Return a tier of all rows; with lanes ``by_id``, which take some slots more, in ``most`` slots."""
    lanes = len(lane_slots(demand.rows))
    if by_id and lanes > 1 and all(table.is_whole for table in demand.tables):
        # Of a table's ids every lane has one of so many (csrc/cache/lane_ids.h).
        slots = lanes * sum(-(-table.rows // lanes) for table in demand.tables)
        if slots <= most:
            return TierPlan(slots, True, lanes_by_id=lanes)
    return TierPlan(min(demand.rows, most), True)


def _small(budget: int, demands: Sequence[GroupDemand], minimum: int) -> list[list[TableDemand]]:
    """Return the tables of each group that become wholly resident; ``minimum``: bytes that all groups need
    beside these tables."""
    found: list[list[TableDemand]] = [[] for _ in demands]
    sizes = [
        (table.rows * demand.row_bytes, group, table)
        for group, demand in enumerate(demands)
        for table in demand.tables
    ]
    largest = max((size for size, _, _ in sizes), default=0)
    has_larger = {group for size, group, _ in sizes if size > largest * SMALL}
    left = min(budget * RESIDENT_SHARE, budget - minimum)
    left_of_neighbours = budget * RESIDENT_SHARE_OF_NEIGHBOURS
    for size, group, table in sorted(sizes, key=lambda item: (item[0], item[2].index)):
        cost = bytes_for(table.rows, demands[group].row_bytes, None)
        if size > largest * SMALL or cost > left:
            break
        if table.share is not None:
            continue
        if group in has_larger:
            if cost > left_of_neighbours:
                continue
            left_of_neighbours -= cost
        found[group].append(table)
        left -= cost
    return found


def _divide_shared(
    budget: int,
    demands: Sequence[GroupDemand],
    all_rows: Sequence[TierPlan],
    policy: AnyPolicy,
    admission: AnyAdmission,
) -> list[TierPlan]:
    """Return the slots that the tables of each group share; ``all_rows``: of groups whose rows all fit."""
    minimum = [_min_bytes(d, policy, admission) for d in demands]
    weight, whole = [d.weight for d in demands], [_bytes_of_all(d) for d in demands]
    with_lanes = [_bytes_of_all(d, plan.slots) for d, plan in zip(demands, all_rows, strict=True)]
    # Slots that lanes have beyond the rows get what no group's rows need.
    shares = fill(budget, fill(budget, minimum, whole, weight), with_lanes, weight)
    divided = []
    for i, (demand, bytes_) in enumerate(zip(demands, shares, strict=True)):
        if bytes_ >= with_lanes[i]:
            divided.append(all_rows[i])
        elif bytes_ >= whole[i]:
            divided.append(TierPlan(demand.rows, True))
        else:
            slots = slots_for(bytes_, demand.row_bytes, policy, admission)
            divided.append(TierPlan(min(demand.rows, slots), False))
    return divided


def fill(budget: int, minimum: list[int], maximum: list[int], weight: list[int]) -> list[int]:
    """Return shares in proportion to ``weight`` within [minimum, maximum]; what a capped group cannot use
    goes to the groups that are not capped."""
    share = list(minimum)
    while True:
        open_ = [i for i in range(len(share)) if share[i] < maximum[i]]
        rest = budget - sum(share)
        if not open_ or rest < len(open_):
            return share
        total = max(1, sum(weight[i] for i in open_))
        before = sum(share)
        for i in open_:
            share[i] = min(maximum[i], share[i] + rest * weight[i] // total)
        if sum(share) == before:
            return share


def fast_tiers(
    config: TierConfig, demands: Sequence[GroupDemand], policy: AnyPolicy, device: Device = HOST
) -> list[TierPlan]:
    """Return the ``hbm`` tiers, whose rows are on ``device``. With ``hbm="all"`` each may grow to all its
    rows, or to what the device's memory holds. In this machine's memory a tier that holds all rows has no
    lanes by id, since there a lookup is one native call on one lane (``csrc/cache/resident_lookups.h``).

    Raises ``ConfigError`` if a GPU has no room for the rows now.
    """
    by_id = device is not HOST
    if config.keeps_all:
        memory = device.memory()[1]
        maximum = [min(MAX_SLOTS, max(MIN_SLOTS, memory // d.row_bytes)) for d in demands]
        plans = [_all_rows(d, by_id, most) for d, most in zip(demands, maximum, strict=True)]
    else:
        plans = divide(int(config.hbm), demands, policy, "hbm", config.admission, by_id=by_id)
    if config.on_gpu and not config.keeps_all and not config.overcommit:
        rows = sum(d.row_bytes * plan.capacity for d, plan in zip(demands, plans, strict=True))
        _check_gpu(device, int(config.hbm), rows)
    return [replace(plan, device=device) for plan in plans]


def _check_gpu(device: Device, budget: int, rows: int) -> None:
    free, total = device.memory()
    if rows > free:
        raise DeviceFullError(
            f"hbm is {format_bytes(budget)}, and its rows take {format_bytes(rows)} of {device.name}, of "
            f"which {format_bytes(free)} of {format_bytes(total)} are free; lower hbm, or end what else "
            "uses the GPU (nvidia-smi shows it)"
        )


def _check_managed(device: Device, budget: int, rows: int) -> None:
    """Raise ``ConfigError`` for more managed memory than the GPU could hold: beyond that
    a GPU may hang, whatever advice the driver was given."""
    free, total = device.memory()
    if rows > free:
        raise DeviceFullError(
            f"uvm is {format_bytes(budget)}, and its rows take {format_bytes(rows)} of managed memory, of "
            f"which {device.name} could hold {format_bytes(free)} of {format_bytes(total)} now; use "
            "uvm_kind='pinned', lower uvm, or set overcommit=True"
        )


def host_tiers(
    config: TierConfig,
    demands: Sequence[GroupDemand],
    policy: AnyPolicy,
    fast: Sequence[TierPlan],
    device: Device = HOST,
) -> list[TierPlan | None]:
    """Return the ``uvm`` tiers; None where there is none. Tables that stay in ``hbm`` need no ``uvm``.
    ``device``: of ``hbm``.

    Raises ``ConfigError`` if a GPU is to use more memory of the host than there is.
    """
    if config.uvm_kind == "managed" and not config.on_gpu:
        raise ConfigError(
            "uvm_kind is 'managed', but the tables are on the CPU, which has no such memory; leave it out, "
            "or give device='cuda'"
        )
    if not config.uvm:
        return [None] * len(demands)
    rest = [
        demand.without(index for share in plan.own if share.holds_all for index in share.tables)
        for demand, plan in zip(demands, fast, strict=True)
    ]
    plans = divide(int(config.uvm), rest, policy, "uvm", by_id=True)
    if config.on_gpu and not config.overcommit:
        rows = sum(d.row_bytes * p.capacity for d, p in zip(rest, plans, strict=True))
        check_lockable(int(config.uvm), rows)
        if config.uvm_kind == "managed":
            _check_managed(device, int(config.uvm), rows)
    place = device.uvm(config.uvm_kind)
    return [replace(plan, device=place) if plan.capacity else None for plan in plans]
