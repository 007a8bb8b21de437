"""How the slots of a memory tier are divided: shares of tables, and lanes that threads plan side by side."""

from __future__ import annotations

from dataclasses import dataclass

from cache_policies import lanes
from cache_policies.policy import Policy
from tierstore import _core
from tierstore.cache.device import HOST, Device
from tierstore.cache.tiers.codec import Codec
from tierstore.cache.tiers.sizes import AnyAdmission, as_admission, lanes_of, policy_bytes


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
    dim: int = 0
    """The columns of such rows; 0: not known."""
    codec: Codec | None = None
    """The form of the rows; None is that of the fast tier."""
    leaving: Codec | None = None
    """The form of rows that leave, where it is not ``codec``."""
    has_lanes: bool = True
    """Whether many slots of rows that leave are divided into lanes. Where rows may find no room in lower
    tiers, a lane would be full before all lanes are."""
    lanes_by_id: int = 1
    """The lanes of a tier that holds all rows, which are divided by their ids; each has as many slots."""

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

    def slots_for(self, table: int) -> int:
        """Return how many slots rows of ``table`` may have."""
        own = self.share_of(table)
        return self.slots if own is None else own.slots


class Share:
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


class Lanes:
    """The lanes of a tier, each a list of shares. A share of many slots has lanes of its own; all other
    shares are in one lane. Rows of a tier that grows are in its lanes by id."""

    def __init__(self, plan: TierPlan, policy: Policy, admission: AnyAdmission, tables: int) -> None:
        self.lanes: list[list[Share]] = []
        self.share_of = [0] * tables  # of the tables in the lane of several shares
        shared = [table for table in range(tables) if plan.share_of(table) is None]
        parts = [(o.tables, o.slots, o.holds_all) for o in plan.own]
        if plan.slots or not parts:  # else every table of the group has slots of its own
            parts.insert(0, (tuple(shared), plan.slots, plan.holds_all))
        few: list[Share] = []
        ranges: list[tuple[int, int] | None] = [None] * tables
        for members, slots, holds_all in parts:
            chosen = None if holds_all else policy
            sizes = lanes_of(slots, chosen) if plan.has_lanes else [slots]
            if plan.lanes_by_id > 1:
                sizes = [slots // plan.lanes_by_id] * plan.lanes_by_id
            if len(self.lanes) + len(sizes) > lanes.MOST_LANES_IN_TIER:
                sizes = [slots]
            own = [Share(n, chosen, admission) for n in sizes]
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
