"""Counters of one group of tiers, per access and per unique row of a lookup: deduplication removes the easy
hits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.tiers.protocol import FoundRows, Keys
from tierstore.cache.uninterrupted import uninterrupted

Starts = NDArray[np.int32]
TableCounts = dict[str, NDArray[np.int64]]
"""By tier, for every table: unique rows looked up there, and rows that were found there."""


@dataclass
class TierCounters:
    """Lookups and hits of one tier: every miss of a tier is a lookup in the next tier."""

    rows: int = 0
    """Unique rows looked up here, summed over lookups."""
    row_hits: int = 0
    accesses: int = 0
    """Positions (ids of the input) of the rows that were looked up."""
    access_hits: int = 0

    def count(self, rows: int, row_hits: int, accesses: int, access_hits: int) -> None:
        self.rows += rows
        self.row_hits += row_hits
        self.accesses += accesses
        self.access_hits += access_hits

    def report(self) -> dict[str, object]:
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
    """All counters of a group. Counters are plain attributes; only the planner writes them, unless a counter
    says otherwise."""

    lookups: int = 0
    initialised_rows: int = 0
    """Rows that no tier held: they were never updated, so they are computed, not read."""
    read_ahead_rows: int = 0
    """Rows of the store that were in memory when their plan asked for them."""
    evicted_rows: int = 0
    written_rows: int = 0
    """Dirty rows handed to the store."""
    overflow_rows: int = 0
    """Rows that did not fit beside the rows in flight and used overflow slots."""
    refused_rows: int = 0
    """Rows that the admission filter refused: they used overflow slots and were written through."""
    shrunk_plans: int = 0
    """Plans that waited for more releases than their depth requires."""
    announce_seconds: float = 0.0
    """Seconds of removing repeated ids and announcing lookups to the tiers. Written by threads that make
    lookups."""
    plan_seconds: float = 0.0
    """Seconds of deciding where rows go: hits, victims, slots."""
    fetch_seconds: float = 0.0
    """Seconds of finding missing rows in the lower tiers and copying them out."""
    move_seconds: float = 0.0
    """Seconds of handing victims down and filling slots."""
    wait_seconds: float = 0.0
    """Seconds in which the planning thread waits: for releases of earlier lookups, and for rows that are
    being read ahead."""
    compute_seconds: float = 0.0
    """Seconds of kernels that look rows up, update them, and give the gradients of per-sample weights.
    Written by the computing threads."""
    stall_seconds: float = 0.0
    """Seconds in which the computing thread waits for rows. Written by that thread."""
    policy_seconds: float = 0.0
    """The part of announce, plan and move that policies and admission filters take."""
    blocked_seconds: float = 0.0
    """The part of fetch and move in which this thread waited for the store."""
    read_rows: int = 0
    """Rows read without a plan (eval, no_grad, rows())."""

    def add(self, other: GroupCounters) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def report(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(eq=False)
class Before:
    """The counters of a group before it planned a lookup ahead. ``used``: whether a forward call has used the
    lookup."""

    group: GroupCounters
    tiers: dict[str, TierCounters]
    tables: TableCounts
    used: bool = False

    @classmethod
    def copy_of(cls, group: GroupCounters, tiers: dict[str, TierCounters], tables: TableCounts) -> Before:
        copied = {name: counts.copy() for name, counts in tables.items()}
        return cls(replace(group), {name: replace(tier) for name, tier in tiers.items()}, copied)


class Stage:
    """Adds the seconds of a ``with`` block, by a clock of nanoseconds, to one of the counters."""

    __slots__ = ("_begin", "_clock", "_counter", "_stats")

    def __init__(self, stats: GroupStats, counter: str, clock: Callable[[], int]) -> None:
        self._stats = stats
        self._counter = counter
        self._clock = clock
        self._begin = 0

    def __enter__(self) -> None:
        self._begin = self._clock()

    def __exit__(self, *_: object) -> None:
        seconds, counters = (self._clock() - self._begin) * 1e-9, self._stats.counters
        setattr(counters, self._counter, getattr(counters, self._counter) + seconds)


def _blocked_ns() -> int:
    """Return the nanoseconds in which this thread did not run, from some moment on."""
    return time.perf_counter_ns() - time.thread_time_ns()


class GroupStats:
    """The counters of a group. Call its methods with the group's residency lock held, or while no thread
    runs; :meth:`stage` needs no lock."""

    def __init__(self, tables: int) -> None:
        self._names: list[str] = []
        self._tables = tables
        self.count_rest: Callable[[], None] = lambda: None
        """Counts the lookups that are over and not counted yet."""
        self.uncommitted_rows = 0
        """Rows given to the store since its last commit; :meth:`reset` leaves this counter."""
        self.reset()

    def add_tiers(self, names: Iterable[str]) -> None:
        """Count for these tiers from now on."""
        self._names += names
        self.reset()

    def stage(self, counter: str) -> Stage:
        """Return a context that adds its seconds to ``counter``, such as "plan_seconds"."""
        return Stage(self, counter, time.perf_counter_ns)

    def blocked(self) -> Stage:
        """Return a context that adds the seconds in which this thread does not run to ``blocked_seconds``."""
        return Stage(self, "blocked_seconds", _blocked_ns)

    def reset(self) -> None:
        self.count_rest()
        self.counters = GroupCounters()
        self.tiers = {name: TierCounters() for name in self._names}
        self.tables: TableCounts = {name: np.zeros((self._tables, 2), np.int64) for name in self._names}
        self.prefetched: tuple[int, int] | None = None
        """Depth and window of the newest prefetch."""
        self.before: deque[Before] = deque()
        """Counters of before each lookup that is planned ahead, in order; their PinnedRows, which graphs own,
        are not here."""

    def plans_ahead(self) -> Before:
        """Save the counters before a lookup that a forward call will use later, and return them."""
        self.count_rest()
        self._forget_used()
        self.before.append(Before.copy_of(self.counters, self.tiers, self.tables))
        return self.before[-1]

    def plans_now(self) -> None:
        """Forget kept counters: a lookup is about to be planned, and none is planned ahead any more."""
        self.before.clear()

    def counted(self) -> Before:
        """Return the counters without lookups that no forward call has used yet."""
        self.count_rest()
        self._forget_used()
        if not self.before:
            return Before.copy_of(self.counters, self.tiers, self.tables)
        # The computing thread's counters never run ahead.
        counters = replace(
            self.before[0].group,
            stall_seconds=self.counters.stall_seconds,
            compute_seconds=self.counters.compute_seconds,
            read_rows=self.counters.read_rows,
        )
        return replace(self.before[0], group=counters)

    def _forget_used(self) -> None:
        """Forget the counters of lookups planned ahead, up to the last one that was used."""
        used = [index for index, before in enumerate(self.before) if before.used]
        for _ in range(used[-1] + 1 if used else 0):
            self.before.popleft()

    def count_resident(self, lookups: int, table_rows: NDArray[np.int64], accesses: tuple[int, int]) -> None:
        """Count lookups in the fast tier, of which no other tier has any row. ``table_rows``, int64
        (2, tables): the unique rows of every table, summed over the lookups, and how many of them were here.
        ``accesses``: positions, and how many of them use rows that were here."""
        first, (rows, hits) = self._names[0], table_rows.sum(1).tolist()
        self.counters.lookups += lookups
        self.counters.initialised_rows += rows - hits
        self.tiers[first].count(rows, hits, *accesses)
        self.tables[first] += table_rows.T

    def count(self, plan: _core.Plan, missing: Keys, starts: Starts, lower: Sequence[FoundRows]) -> None:
        """Count a lookup whose rows are in place.

        ``missing``: keys of the rows that the fast tier does not have at all. ``starts``: where the positions
        of each row begin, and at last how many positions these are. ``lower``: what every tier under the
        first has that no tier above it has.
        """
        missed_accesses, below = plan.count(missing, starts, [found.here for found in lower], self._tables)
        rows, accesses, left = len(starts) - 1, int(starts[-1]), len(missing)
        self.counters.lookups += 1
        self.counters.refused_rows += plan.refused
        # A row that is in an overflow slot counts as a miss, so that timing does not matter; the lower tiers
        # are not asked for it.
        first, *names = self._names
        self.tiers[first].count(rows, rows - len(plan.misses), accesses, accesses - missed_accesses)
        self.tables[first][:, 0] += plan.table_rows
        self.tables[first][:, 1] += plan.table_hits
        for tier, (asked, table_rows, table_hits) in zip(names, below, strict=True):
            found, hits, reach, hit_accesses = asked
            self.tiers[tier].count(found, hits, reach, hit_accesses)
            self.tables[tier][:, 0] += table_rows
            self.tables[tier][:, 1] += table_hits
            left -= hits
        self.counters.initialised_rows += left


class CountingGroup(Protocol):
    """The part of a tier group that its counters use."""

    name: str
    stats: GroupStats
    residency_lock: threading.RLock


def counters_of(groups: Iterable[CountingGroup]) -> dict[str, dict[str, object]]:
    """Return all counters of groups, as plain values, for a run that goes on in another process. Lookups that
    were planned ahead and not used yet are left out: the other process will plan them again."""
    counted = uninterrupted(lambda: {group.name: _counted(group) for group in groups})
    return {
        name: {
            "group": asdict(counters.group),
            "tiers": {tier: asdict(counts) for tier, counts in counters.tiers.items()},
            "tables": {tier: counts.tolist() for tier, counts in counters.tables.items()},
        }
        for name, counters in counted.items()
    }


def _counted(group: CountingGroup) -> Before:
    with group.residency_lock:
        return group.stats.counted()


def go_on_counting(groups: Iterable[CountingGroup], saved: dict[str, Any]) -> None:
    """Set the counters of groups to saved ones; tiers that are new begin at 0."""
    for group in groups:
        stats = group.stats
        uninterrupted(stats.reset)
        known = saved.get(group.name, {"group": {}, "tiers": {}})
        stats.counters.add(GroupCounters(**known["group"]))
        for name in stats.tiers:
            stats.tiers[name] = TierCounters(**known["tiers"].get(name, {}))
            if name in known.get("tables", {}):
                stats.tables[name] += np.array(known["tables"][name], np.int64)
