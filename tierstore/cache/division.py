"""Divides the bytes of memory tiers among row layouts by use, while training.

Tiers are opened with bytes in proportion to their tables' (:mod:`tierstore.cache.budget`). After stated
lookups the live curves say what each layout would miss with how many slots, and the bytes go where they save
most misses; bytes of which no curve says anything go by the distinct rows so far. A tier gets its new size
before a plan while no lookup uses its rows: its rows move down, and it begins empty, with a new policy. So
from that plan on it has the hit rates of the simulator, begun there. A tier grows only when others have given
up its bytes. All of that depends on the batches alone, so a training has the same sizes whenever it is run.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from cache_policies.live import LiveCurves
from tierstore.cache.budget import fill
from tierstore.cache.lookup_order import LookupOrder
from tierstore.cache.read_ahead_size import ReadAheadSize, joint_curve
from tierstore.cache.stats import GroupStats
from tierstore.cache.tiers.buffers import Buffer
from tierstore.cache.tiers.memory import MemoryTier
from tierstore.cache.tiers.sizes import MIN_SLOTS, AnyAdmission, as_policy, bytes_for, slots_for
from tierstore.cache.tiers.stack import TierStack
from tierstore.config import TierConfig
from tierstore.errors import ConfigError
from tierstore.rounds import FloatArray

logger = logging.getLogger("tierstore")

_FIRST, _EVERY = 64, 8192  # lookups: after 64, 128, 256 .. 8,192, and then every 8,192
_GAIN = 1 / 20  # of the misses is what a new division must save,
_WORTH = 2  # and so many times the rows to be fetched again, by the next choice
_LOOKUPS = 3  # whose rows find room in a tier at least
_STAYS = 1 / 16  # by which a tier would grow at most is too little to empty it
_HALVINGS = 60


class DividedGroup(Protocol):
    """The part of a tier group that is looked at and changed."""

    name: str
    tables: Sequence[int]
    fast: MemoryTier
    stack: TierStack
    order: LookupOrder
    curves: LiveCurves
    stats: GroupStats
    residency_lock: threading.RLock
    size: ReadAheadSize | None
    division: UseDivision | None

    def drain_overflow(self) -> bool:
        """Hand down rows in overflow slots that no lookup uses; return whether that is all."""
        ...


@dataclass(frozen=True)
class Use:
    """What the lookups of a layout say: misses per lookup by ``rows`` of memory, and the distinct rows of one
    lookup and of all."""

    rows: FloatArray
    misses: FloatArray
    unique: float
    footprint: int

    def missed(self, slots: float) -> float:
        return float(np.interp(slots, self.rows, self.misses))


@dataclass(frozen=True)
class Part:
    """A layout's part of a tier. ``above``: its slots in faster tiers. ``min_slots``, ``max_slots``: limits
    of its slots in this tier. ``row_bytes``: bytes of a row in this tier."""

    use: Use
    above: int
    min_slots: int
    max_slots: int
    row_bytes: int

    def cheapest(self, price: float) -> int:
        """Return the slots with which misses, and bytes at ``price``, cost least."""
        sizes = np.clip(self.use.rows - self.above, self.min_slots, self.max_slots)
        missed = np.interp(sizes + self.above, self.use.rows, self.use.misses)
        return int(sizes[np.argmin(missed + price * self.row_bytes * sizes)])


def divided(limit: int, parts: Sequence[Part], cost: Callable[[int, int], int]) -> list[int] | None:
    """Return the bytes of each part, ``limit`` in all; None if there is no room for ``min_slots`` of each.

    ``cost``: bytes of so many slots for rows of so many bytes.
    """

    def bytes_at(price: float) -> list[int]:
        return [cost(part.cheapest(price), part.row_bytes) for part in parts]

    if sum(cost(part.min_slots, part.row_bytes) for part in parts) > limit:
        return None
    low, high = -60.0, 20.0  # powers of two
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(bytes_at(2.0**middle)) <= limit else (middle, high)
    dear, cheap = bytes_at(2.0**high), bytes_at(2.0**low)
    # At the price between them several sizes cost the same, as of rows that are used alike.
    shares = fill(limit, dear, cheap, [more - less for less, more in zip(dear, cheap, strict=True)])
    limits = [cost(part.max_slots, part.row_bytes) for part in parts]
    return fill(limit, shares, limits, [part.use.footprint * part.row_bytes for part in parts])


class UseDivision:
    """Divides the memory tiers of ``groups``, whose tables have ``rows`` rows each. Groups call it while they
    plan, so from threads of their own."""

    def __init__(self, groups: Sequence[DividedGroup], config: TierConfig, rows: Mapping[int, int]) -> None:
        self._policy, self._admission, self._rows = as_policy(config.policy), config.admission, rows
        # Groups hold their division. They must not wait for the garbage collector once they are closed.
        self._groups = weakref.WeakValueDictionary({group.name: group for group in groups})
        self._lock = threading.Lock()
        self._lookups: Counter[str] = Counter()
        self._uses: dict[int, dict[str, Use]] = {}
        self._slots = {(tier.name, g.name): tier.plan.slots for g in groups for tier in tiers_of(g)}
        """Slots that tables share, by tier and layout."""
        self._wanted = dict(self._slots)
        self._is_pending = False
        self._limits: Counter[str] = Counter()
        for (tier, name), slots in self._slots.items():
            self._limits[tier] += self._cost(tier, slots, self._row_bytes(tier, name))
        self._order = [tier.name for tier in max((g.stack.exclusive for g in groups), key=len)]
        for group in groups:
            group.division = self

    @classmethod
    def of(
        cls, groups: Sequence[DividedGroup], config: TierConfig, rows: Mapping[int, int]
    ) -> UseDivision | None:
        """Return what divides the tiers of ``groups``; None where nothing is to be divided: tables have bytes
        or shares of their own, rows cannot leave, or one layout has all slots that tables share."""
        decided = any(
            value is not None
            for one in config.tables.values()
            for value in (one.hbm, one.uvm, one.hbm_share, one.uvm_share)
        )
        sharing = [group for group in groups if tiers_of(group)]
        if decided or config.keeps_all or not config.ssd or config.on_gpu or len(sharing) < 2:
            return None
        return cls(sharing, config, rows)

    # -- choices ---------------------------------------------------------------------------

    def lookup_done(self, group: DividedGroup) -> None:
        """Learn that ``group`` has planned a lookup. Its residency lock is held."""
        self._lookups[group.name] += 1
        n = self._lookups[group.name]
        if n % _EVERY and (n < _FIRST or n > _EVERY or n & (n - 1)):
            return
        use = self._use(group)
        with self._lock:
            uses = self._uses.setdefault(n, {})
            uses[group.name] = use
            if len(uses) == len(self._groups):
                del self._uses[n]
                if not self._is_pending:
                    self._choose(uses, min(n, _EVERY))
                    self._is_pending = self._slots != self._wanted

    def _choose(self, uses: Mapping[str, Use], lookups: int) -> None:
        above: Counter[str] = Counter()
        for tier in self._order:
            names = [name for of, name in self._slots if of == tier]
            now = {name: self._slots[tier, name] for name in names}
            parts = {name: self._part(tier, name, uses[name], above[name]) for name in names}
            chosen = self._chosen(tier, now, parts, lookups)
            self._wanted |= {(tier, name): slots for name, slots in chosen.items()}
            above.update(chosen)

    def _part(self, tier: str, name: str, use: Use, above: int) -> Part:
        rows = sum(count for _, count in self._sharing(self._groups[name]))
        least = _LOOKUPS * use.unique if tier == "hbm" else 0
        return Part(use, above, min(rows, max(MIN_SLOTS, round(least))), rows, self._row_bytes(tier, name))

    def _chosen(
        self, tier: str, now: Mapping[str, int], parts: Mapping[str, Part], lookups: int
    ) -> dict[str, int]:
        """Return the slots of each layout: the slots of ``now``, unless other slots pay by the next
        choice."""
        before, new = dict(now), {}
        found = divided(self._limits[tier], list(parts.values()), partial(self._cost, tier))
        if found is None:
            return before
        for (name, part), size in zip(parts.items(), found, strict=True):
            slots = min(part.max_slots, self._slots_for(tier, size, part.row_bytes))
            new[name] = now[name] if now[name] <= slots <= now[name] * (1 + _STAYS) else slots
        missed, missed_then = (
            sum(part.use.missed(part.above + slots[name]) for name, part in parts.items())
            for slots in (now, new)
        )
        again = sum(now[name] for name in new if new[name] != now[name])
        saved = missed - missed_then
        if not again or saved < missed * _GAIN or saved * lookups < again * _WORTH:
            return before
        logger.info(
            "%s is divided anew among row layouts: %s slots (before: %s), which saves %.0f of %.0f misses "
            "per batch",
            *(tier, new, before, saved, missed),
        )
        return new

    # -- sizes that change -------------------------------------------------------------------

    def before_plan(
        self, group: DividedGroup, seq: int, announced: bool, stop: Callable[[], bool] | None
    ) -> None:
        """Give the tiers of ``group`` their new sizes, if no lookup but ``seq`` is in use, which is about to
        be planned. An ``announced`` plan waits for the lookups before it, until ``stop()``.

        Raises the errors of tiers that take the rows; then rows are in the tiers where they were, or below.
        """
        if not self._is_pending or not any(self._is_due(tier, group) for tier in tiers_of(group)):
            return
        if announced:
            with group.stats.stage("wait_seconds"):
                group.order.wait_released(seq, is_planner=True, stop=stop)
        with group.residency_lock:
            if not group.order.is_alone(seq) or not group.drain_overflow():
                return
            for tier in reversed(tiers_of(group)):
                if self._is_due(tier, group, reserve=True):
                    self._resize(group, tier, seq)

    def _is_due(self, tier: MemoryTier, group: DividedGroup, *, reserve: bool = False) -> bool:
        """Return whether a tier is to have another size, and there is room for it; if so, ``reserve`` it."""
        key = tier.name, group.name
        with self._lock:
            slots, wanted = self._slots[key], self._wanted[key]
            if slots == wanted or (wanted > slots and self._taken(*key, wanted) > self._limits[tier.name]):
                return False
            if reserve:
                self._slots[key] = max(slots, wanted)
            return True

    def _taken(self, tier: str, name: str, slots: int) -> int:
        """Return the bytes of a tier's slots if one layout had ``slots`` of them."""
        return sum(
            self._cost(tier, slots if other == name else count, self._row_bytes(tier, other))
            for (of, other), count in self._slots.items()
            if of == tier
        )

    def _resize(self, group: DividedGroup, tier: MemoryTier, seq: int) -> None:
        key = tier.name, group.name
        before, wanted = tier.plan.slots, self._wanted[key]
        level = group.stack.tiers.index(tier) + 1
        below = group.stack.tiers[level]
        room = Buffer(tier.row_bytes if below.codec is None else below.codec.row_bytes)
        try:
            tier.empty(below, room, partial(group.stack.demote, level, seq))
        except BaseException:
            self._set(key, before, wanted)
            raise
        try:
            tier.resize(wanted)
        except (ConfigError, MemoryError) as refused:  # the tier is empty, and has the slots that it had
            logger.warning("%s keeps its %d slots of %s: %s", group.name, before, tier.name, refused)
            self._set(key, before, before)
            return
        self._set(key, wanted, wanted)
        if group.size is not None:
            group.size.slots += wanted - before

    def _set(self, key: tuple[str, str], slots: int, wanted: int) -> None:
        with self._lock:
            self._slots[key], self._wanted[key] = slots, wanted
            self._is_pending = self._slots != self._wanted

    # -- bytes ---------------------------------------------------------------------------------

    def _cost(self, tier: str, slots: int, row_bytes: int) -> int:
        return bytes_for(slots, row_bytes, self._policy, self._filter(tier))

    def _slots_for(self, tier: str, size: int, row_bytes: int) -> int:
        return slots_for(size, row_bytes, self._policy, self._filter(tier))

    def _filter(self, tier: str) -> AnyAdmission:
        return self._admission if tier == "hbm" else "always"

    def _row_bytes(self, tier: str, name: str) -> int:
        return next(one.row_bytes for one in tiers_of(self._groups[name]) if one.name == tier)

    # -- tables --------------------------------------------------------------------------------

    def _sharing(self, group: DividedGroup) -> list[tuple[int, int]]:
        """Return (index, rows) of the tables that share slots of the fast tier."""
        return [(t, self._rows[t]) for t in group.tables if group.fast.plan.share_of(t) is None]

    def _use(self, group: DividedGroup) -> Use:
        """Return what the lookups of ``group`` say so far."""
        tables, curves = self._sharing(group), group.curves
        rows, misses = joint_curve(curves, tables)
        unique = sum(curves.per_batch(index)[0] for index, _ in tables)
        return Use(rows, misses, unique, sum(curves.footprint(index) for index, _ in tables))


def tiers_of(group: DividedGroup) -> list[MemoryTier]:
    """Return the tiers whose slots the tables of ``group`` share, if they do not hold all of their rows."""
    tiers = [tier for tier in group.stack.exclusive if isinstance(tier, MemoryTier)]
    return [tier for tier in tiers if tier.plan.slots and not tier.plan.holds_all]
