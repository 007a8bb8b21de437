"""Counters of one group of tiers. Per access and per unique row of a lookup: dedup takes the easy hits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.cache.tiers.memory import Flags, Keys
from tierstore.cache.uninterrupted import uninterrupted
from tierstore.keys import ID_BITS

Weights = NDArray[Any]
TableCounts = dict[str, NDArray[np.int64]]
"""By tier, of every table: unique rows looked up there, and those that it had."""


@dataclass
class TierCounters:
    """What reached one tier, and what it had: every miss of one tier is a lookup in the next."""

    rows: int = 0
    """Unique rows looked up here, summed over lookups."""
    row_hits: int = 0
    accesses: int = 0
    """Positions (ids of the input) that these rows stand for."""
    access_hits: int = 0

    def count(self, rows: int, row_hits: int, accesses: int, access_hits: int) -> None:
        self.rows += rows
        self.row_hits += row_hits
        self.accesses += accesses
        self.access_hits += access_hits

    def report(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "row_hits": self.row_hits,
            "accesses": self.accesses,
            "access_hits": self.access_hits,
            "hit_rate": {
                "per_access": self.access_hits / self.accesses if self.accesses else None,
                "per_unique": self.row_hits / self.rows if self.rows else None,
            },
        }


@dataclass
class GroupCounters:
    """Everything a group counts; plain attributes, written by the planner only unless said otherwise."""

    lookups: int = 0
    initialised_rows: int = 0
    """Rows that no tier held: never updated before, so they are computed, not read."""
    read_ahead_rows: int = 0
    """Rows of the store that were in memory when their plan asked for them."""
    evicted_rows: int = 0
    written_rows: int = 0
    """Dirty rows handed to the store."""
    overflow_rows: int = 0
    """Rows that did not fit beside what was in flight and used the transient pad."""
    refused_rows: int = 0
    """Rows that admission gave no slot: they used the transient pad and were written through."""
    shrunk_plans: int = 0
    """Plans that had to wait for more releases than their depth asks for."""
    plan_seconds: float = 0.0
    """Time that lookups took to be announced and planned and to have their rows moved, waits excepted."""
    policy_seconds: float = 0.0
    """Of it, what policies and admission filters took."""
    stall_seconds: float = 0.0
    """Time that the computing thread waited for rows."""
    read_rows: int = 0
    """Rows read without a plan (eval, no_grad, rows())."""

    def add(self, other: GroupCounters) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def report(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(eq=False)
class Before:
    """The counters of a group as they were before it planned a lookup ahead; ``used``: by a forward call."""

    group: GroupCounters
    tiers: dict[str, TierCounters]
    tables: TableCounts
    used: bool = False

    @classmethod
    def copy_of(cls, group: GroupCounters, tiers: dict[str, TierCounters], tables: TableCounts) -> Before:
        copied = {name: counts.copy() for name, counts in tables.items()}
        return cls(replace(group), {name: replace(tier) for name, tier in tiers.items()}, copied)


class GroupStats:
    """What a group counts. Its methods are called with the group's lock held, or where nothing runs."""

    def __init__(self, tiers: Iterable[str], tables: int) -> None:
        self._names = list(tiers)
        self._tables = tables
        self.reset()

    def reset(self) -> None:
        self.counters = GroupCounters()
        self.tiers = {name: TierCounters() for name in self._names}
        self.tables: TableCounts = {name: np.zeros((self._tables, 2), np.int64) for name in self._names}
        self.prefetched: tuple[int, int] | None = None
        """Depth and window of the newest prefetch."""
        self._before: deque[Before] = deque()  # lookups planned ahead, in order; no pinned: graphs own those

    def plans_ahead(self) -> Before:
        """A lookup is about to be planned that a forward call will use later."""
        self._forget_used()
        self._before.append(Before.copy_of(self.counters, self.tiers, self.tables))
        return self._before[-1]

    def plans_now(self) -> None:
        """A lookup is about to be planned, and none is planned ahead any more."""
        self._before.clear()

    def counted(self) -> Before:
        """The counters without what was counted for lookups that no forward call has used yet."""
        self._forget_used()
        if not self._before:
            return Before.copy_of(self.counters, self.tiers, self.tables)
        # What the computing thread counts is never ahead of it.
        counters = replace(
            self._before[0].group,
            stall_seconds=self.counters.stall_seconds,
            read_rows=self.counters.read_rows,
        )
        return replace(self._before[0], group=counters)

    def _forget_used(self) -> None:
        """Of lookups planned ahead, leaves those behind the last one that was used."""
        used = [index for index, before in enumerate(self._before) if before.used]
        for _ in range(used[-1] + 1 if used else 0):
            self._before.popleft()

    def count(
        self, plan: Any, missing: Keys, weight: Weights, below: Sequence[tuple[str, Flags | None]]
    ) -> None:
        """Counts a lookup whose rows are in place.

        ``missing``: keys of the rows that the fast tier does not have at all. ``weight``: positions that each
        of its rows stands for. ``below``: of every tier under the fast one, which of the rows it has that no
        tier above it has; None where there is no such tier.
        """
        misses = plan.misses
        rows, accesses = len(weight), int(weight.sum())
        self.counters.lookups += 1
        self.counters.refused_rows += plan.refused
        # A row that is still in the pad misses too, whatever the timing; it is only not looked for below.
        self.tiers["hbm"].count(rows, rows - len(misses), accesses, accesses - int(weight[misses].sum()))
        self.tables["hbm"][:, 0] += plan.table_rows
        self.tables["hbm"][:, 1] += plan.table_hits
        missed, tables = weight[plan.absent], (missing >> np.uint64(ID_BITS)).astype(np.int64)
        left, reach = len(missed), int(missed.sum())
        for tier, hit in below:
            if hit is None:
                continue
            hits, hit_accesses = int(hit.sum()), int(missed[hit].sum())
            self.tiers[tier].count(left, hits, reach, hit_accesses)
            self.tables[tier][:, 0] += np.bincount(tables, minlength=self._tables)
            self.tables[tier][:, 1] += np.bincount(tables[hit], minlength=self._tables)
            missed, tables = missed[~hit], tables[~hit]
            left, reach = left - hits, reach - hit_accesses
        self.counters.initialised_rows += left


def counters_of(groups: Any) -> dict[str, Any]:
    """All counters of groups, as plain values, for a run that goes on in another process: without those of
    lookups that were planned ahead and not used yet, for they will be planned again there."""
    counted = uninterrupted(lambda: {group.name: _counted(group) for group in groups})
    return {
        name: {
            "group": asdict(counters.group),
            "tiers": {tier: asdict(counts) for tier, counts in counters.tiers.items()},
            "tables": {tier: counts.tolist() for tier, counts in counters.tables.items()},
        }
        for name, counters in counted.items()
    }


def _counted(group: Any) -> Before:
    with group.residency_lock:
        before: Before = group.stats.counted()
        return before


def go_on_counting(groups: Any, saved: dict[str, Any]) -> None:
    """Sets the counters of groups to saved ones; tiers that are new begin at 0."""
    for group in groups:
        stats = group.stats
        stats.reset()
        known = saved.get(group.name, {"group": {}, "tiers": {}})
        stats.counters.add(GroupCounters(**known["group"]))
        for name in stats.tiers:
            stats.tiers[name] = TierCounters(**known["tiers"].get(name, {}))
            if name in known.get("tables", {}):
                stats.tables[name] += np.array(known["tables"][name], np.int64)
