"""How the budgets of the memory tiers are divided among chains (one per row layout)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.cache.memory_tier import MAX_SLOTS, MIN_SLOTS, bytes_for, memory_limit, slots_for
from tierstore.config import TierConfig, format_bytes
from tierstore.errors import ConfigError

_HUGE = 1 << 62


@dataclass(frozen=True)
class ChainDemand:
    """Rows (of all its tables) and bytes per row of one chain; what its tables bring to each budget, if that
    is stated (``TableOverride``)."""

    name: str
    rows: int
    row_bytes: int
    hbm: int | None = None
    uvm: int | None = None

    def weight(self, tier: str) -> int:
        """Its part of a budget is in proportion to this."""
        stated: int | None = getattr(self, tier)
        return self.rows * self.row_bytes if stated is None else stated


@dataclass(frozen=True)
class TierPlan:
    """Slots of one memory tier; ``holds_all``: every row fits, so nothing is ever evicted."""

    slots: int
    holds_all: bool


def divide(
    budget: int, demands: Sequence[ChainDemand], policy: Any, tier: str, admission: Any = "always"
) -> list[TierPlan]:
    """Slots per chain for ``budget`` bytes: in proportion to the tables' bytes (or to what they bring), never
    more than all of a chain's rows.

    Raises ``ConfigError`` that names the minimum if the budget cannot hold ``MIN_SLOTS`` rows per chain.
    """
    least = [bytes_for(min(MIN_SLOTS, d.rows), d.row_bytes, policy, admission) for d in demands]
    if sum(least) > budget:
        raise ConfigError(
            f"the {tier} budget of {budget} bytes is below the minimum for these tables: {sum(least)} bytes "
            f"({format_bytes(sum(least))}: {MIN_SLOTS} rows and their metadata for each of "
            f"{len(demands)} row layouts)"
        )
    most = [min(_HUGE, bytes_for(d.rows, d.row_bytes, policy, admission)) for d in demands]
    weight = [d.weight(tier) for d in demands]
    share = _fill(budget, least, most, weight)
    plans = []
    for demand, bytes_, enough in zip(demands, share, most, strict=True):
        if bytes_ >= enough:
            plans.append(TierPlan(demand.rows, True))
        else:
            slots = slots_for(bytes_, demand.row_bytes, policy, admission)
            plans.append(TierPlan(min(demand.rows, slots), False))
    return plans


def _fill(budget: int, least: list[int], most: list[int], weight: list[int]) -> list[int]:
    """Shares in proportion to ``weight`` within [least, most]; what a capped chain cannot use goes to
    the others."""
    share = list(least)
    while True:
        open_ = [i for i in range(len(share)) if share[i] < most[i]]
        rest = budget - sum(share)
        if not open_ or rest < len(open_):
            return share
        total = max(1, sum(weight[i] for i in open_))
        before = sum(share)
        for i in open_:
            share[i] = min(most[i], share[i] + rest * weight[i] // total)
        if sum(share) == before:
            return share


def fast_tiers(config: TierConfig, demands: Sequence[ChainDemand], policy: Any) -> list[TierPlan]:
    """The ``hbm`` tiers. With ``hbm="all"`` each may grow to all its rows, or to what the machine's
    memory holds."""
    if config.keeps_all:
        memory = memory_limit()
        most = [min(MAX_SLOTS, max(MIN_SLOTS, memory // d.row_bytes)) for d in demands]
        return [TierPlan(min(d.rows, slots), True) for d, slots in zip(demands, most, strict=True)]
    assert isinstance(config.hbm, int)
    return divide(config.hbm, demands, policy, "hbm", config.admission)
