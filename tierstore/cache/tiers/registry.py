"""The list of tiers, the fastest first, and how each is made for a row layout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cache_policies.policy import Policy
from tierstore.cache.stats import GroupStats
from tierstore.cache.tiers.codec import Codec
from tierstore.cache.tiers.memory import MemoryTier, TierPlan
from tierstore.cache.tiers.protocol import Tier
from tierstore.cache.tiers.read_ahead import ReadAhead
from tierstore.cache.tiers.stack import resident
from tierstore.cache.tiers.store import StoreTier
from tierstore.config import TierConfig
from tierstore.store.protocol import RowStore


@dataclass(frozen=True)
class TierRequest:
    """What is needed to make the tiers of one row layout.

    ``slots``: by tier, its share of the budget in ``config`` (None: there is no such tier). ``row_bytes``: of
    rows in the fast tier; ``weights``: the dtype of their ``dim`` weights; ``codecs``: by tier, the form of
    its rows where it is another one. ``tables``: how many the engine has. ``read_ahead_bytes``: what rows
    that are read ahead may take. ``lock``: the residency lock. ``above``: the tiers that are made already.
    """

    config: TierConfig
    policy: Policy
    row_bytes: int
    weights: str
    dim: int
    tables: int
    slots: Mapping[str, TierPlan | None]
    store: RowStore | None
    read_ahead_bytes: int
    lock: threading.RLock
    stats: GroupStats
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    above: list[Tier] = field(default_factory=list)

    def row_bytes_of(self, tier: str) -> int:
        """Return the bytes of a row in a tier."""
        codec = self.codecs.get(tier)
        return self.row_bytes if codec is None else codec.row_bytes


TierFactory = Callable[[TierRequest], Tier | None]
"""Makes a tier; None where the configuration has no such tier."""


def _memory(name: str, request: TierRequest) -> Tier | None:
    plan = request.slots[name]
    if plan is None:
        return None
    is_first = not request.above
    admission = request.config.admission if is_first and plan.evicts else None
    codecs = request.codecs
    plan = replace(plan, codec=codecs.get(name), leaving=codecs.get("ssd"), weights=request.weights)
    plan = replace(plan, dim=request.dim, has_lanes=_has_room_below(name, request))
    size = request.row_bytes_of(name)
    return MemoryTier(name, plan, size, request.policy, request.tables, admission)


def _has_room_below(name: str, request: TierRequest) -> bool:
    """Return whether lower tiers take every row that leaves a tier."""
    lower = request.slots["uvm"] if name == "hbm" else None
    return request.store is not None or (lower is not None and not lower.evicts)


def store_tier(request: TierRequest, reads: type[ReadAhead] = ReadAhead) -> Tier | None:
    """Return the tier of ``request.store``; ``reads``: what reads ahead of it."""
    if request.store is None:
        return None
    ahead, size = None, request.row_bytes_of("ssd")
    if request.read_ahead_bytes:
        above = partial(resident, [tier for tier in request.above if tier.exclusive])
        ahead = reads(request.store, size, request.read_ahead_bytes, request.lock, above)
    return StoreTier("ssd", request.store, size, request.stats, ahead, request.codecs.get("ssd"))


TIERS: list[TierFactory] = [partial(_memory, "hbm"), partial(_memory, "uvm"), store_tier]
"""The first factory must make a :class:`MemoryTier`. Add a tier by a factory in this list: exclusive tiers
before the store, lasting tiers behind it."""


def make_tiers(request: TierRequest, factories: Sequence[TierFactory] | None = None) -> list[Tier]:
    """Return the tiers of one row layout, the fastest first. ``factories``: :data:`TIERS` if None."""
    for make in TIERS if factories is None else factories:
        tier = make(request)
        if tier is not None:
            request.above.append(tier)
    return request.above
