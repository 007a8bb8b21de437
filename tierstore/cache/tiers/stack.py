"""The tiers below the fast one of a group: the host tier, the row store, and what is read ahead of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.stats import GroupStats
from tierstore.cache.tiers.memory import Flags, Keys, MemoryTier
from tierstore.cache.tiers.read_ahead import ReadAhead
from tierstore.errors import TierFullError
from tierstore.store.protocol import RowStore

_USES = 16  # after so many, a room that none of them half filled shrinks

# Positions of rows that were asked for, rows, and which of these they are.
Piece = tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int32]]


@dataclass(frozen=True)
class Below:
    """What the tiers below hold of some missing keys. ``in_host`` (None: no host tier) tells which keys
    ``lifted`` has the rows of, and ``in_store`` which of the others the store has: in ``pieces``, by
    their positions among the others."""

    in_store: Flags | None
    pieces: list[Piece]
    in_host: Flags | None = None
    lifted: NDArray[np.uint8] | None = None
    dirty: NDArray[np.uint8] | None = None


class _Room:
    """An array that is used again and again: what a peak took goes back to the system after some uses."""

    def __init__(self, row_bytes: int) -> None:
        self.rows: NDArray[np.uint8] = _core.rows_array(0, row_bytes)
        self._row_bytes = row_bytes
        self._largest = 0  # of the uses that are counted
        self._uses = 0

    def take(self, rows: int) -> NDArray[np.uint8]:
        self._largest = max(self._largest, rows)
        self._uses += 1
        wanted = len(self.rows)
        if rows > wanted:
            wanted = rows + rows // 4
        elif self._uses >= _USES:
            if wanted > 2 * self._largest:
                wanted = self._largest + self._largest // 4
            self._largest = self._uses = 0
        if wanted != len(self.rows):
            self.rows = _core.rows_array(0, self._row_bytes)  # the old room first: never both at once
            self.rows = _core.rows_array(wanted, self._row_bytes)
        return self.rows[:rows]


class LowerTiers:
    """Where rows come from and go to; ``host``, ``store`` and ``ahead`` may be missing.

    Its methods are called by whoever plans, with the group's lock held.
    """

    def __init__(
        self,
        name: str,
        row_bytes: int,
        host: MemoryTier | None,
        store: RowStore | None,
        ahead: ReadAhead | None,
        stats: GroupStats,
    ) -> None:
        self.name = name
        self.row_bytes = row_bytes
        self.host = host
        self.store = store
        self.ahead = ahead
        self.stats = stats
        # Whether the store may have rows that no memory tier has. A store without commits has been opened
        # empty; what all fits into memory is never looked for there, however often it is committed.
        self.holds_rows = store is not None and bool(store.commits())
        self.uncommitted = 0
        """Rows given to the store since its last commit."""
        self._rooms: dict[str, _Room] = {}

    @property
    def exist(self) -> bool:
        """Whether there is any tier below."""
        return self.host is not None or self.store is not None

    def announce(self, seq: int, keys: Keys) -> None:
        """Lookup ``seq`` will come, and is the first announced one that asks for ``keys``, which no tier has
        that knows the next use of its rows."""
        if self.ahead is not None and self.holds_rows:
            self.ahead.announce(seq, keys)

    def buffer(self, name: str, rows: int) -> NDArray[np.uint8]:
        """Room for ``rows`` rows on their way between tiers, kept from plan to plan."""
        room = self._rooms.get(name)
        if room is None:
            room = self._rooms[name] = _Room(self.row_bytes)
        return room.take(rows)

    def buffer_bytes(self) -> int:
        """Bytes of rows on their way between tiers."""
        ahead = 0 if self.ahead is None else self.ahead.memory_bytes()
        return ahead + sum(room.rows.nbytes for room in self._rooms.values())

    def collect(self, missing: Keys) -> Below:
        """What the tiers below hold of ``missing``: read from the store, and taken out of the host tier."""
        in_host = None if self.host is None else self.host.find(missing)
        asked = missing if in_host is None else missing[in_host < 0]
        in_store, pieces = (None, []) if self.store is None else self._read(self.store, asked)
        if self.host is None or in_host is None:
            return Below(in_store, pieces)
        slots = in_host[in_host >= 0]
        lifted = self.buffer("lifted", len(slots))
        self.host.copy_out(slots, lifted)
        dirty = self.host.native.dirty_of(slots)
        below = Below(in_store, pieces, in_host >= 0, lifted, dirty)
        self.host.native.remove(slots)  # last: nothing can fail any more
        return below

    def _read(self, store: RowStore, keys: Keys) -> tuple[Flags, list[Piece]]:
        """Which rows the store has, and where they are now: read ahead, or now."""
        found = np.zeros(len(keys), bool)
        if not self.holds_rows:
            return found, []
        pieces = [] if self.ahead is None else self.ahead.find(keys)
        for positions, _, _ in pieces:
            found[positions] = True
            self.stats.counters.read_ahead_rows += len(positions)
        left = np.flatnonzero(~found)
        if len(left):
            rows = self.buffer("fetched", len(left))
            there = np.flatnonzero(store.read(keys[left], rows))
            pieces.append((left[there], rows, there.astype(np.int32)))
            found[left[there]] = True
        return found, pieces

    def restore(self, found: Below, missing: Keys, seq: int) -> None:
        """Puts lifted rows back; the host tier has room, since they were just taken out of it."""
        if found.lifted is not None and len(found.lifted):
            assert found.in_host is not None
            assert found.dirty is not None
            never = np.full(len(found.lifted), np.iinfo(np.int64).max)
            self.demote(missing[found.in_host], found.lifted, found.dirty, never, seq)

    def demote(
        self,
        keys: Keys,
        rows: NDArray[np.uint8],
        dirty: NDArray[np.uint8],
        next_use: NDArray[np.int64],
        seq: int,
    ) -> None:
        """Hands rows that left the fast tier, and are in no other, to the tier below."""
        if self.host is None:
            self._write_down(keys, rows, dirty, next_use)
            return
        native = self.host.native
        plan = native.begin(keys, next_use, seq, absent=True)
        try:
            self.host.evict(np.iinfo(np.int64).max, plan)
            # Rows that find no room in the host tier go past it.
            past = plan.unplaced()
            slots, victims, victim_dirty, victim_use = plan.victims
            if len(slots):
                leaving = self.buffer("leaving", len(slots))
                self.host.copy_out(slots, leaving)
                self._write_down(victims, leaving, victim_dirty, victim_use)
            if len(past):
                self._write_down(keys[past], rows[past], dirty[past], next_use[past])
            self.host.prepare(plan, use_pad=False)
        except BaseException:
            self.host.abort(plan)
            raise
        native.assign(keys, False, plan)
        stay = plan.slots >= 0
        slots = plan.slots if stay.all() else plan.slots[stay]
        self.host.copy_in(slots, rows if stay.all() else rows[stay])
        native.set_dirty(slots, dirty if stay.all() else dirty[stay])

    def _write_down(
        self, keys: Keys, rows: NDArray[np.uint8], dirty: NDArray[np.uint8], next_use: NDArray[np.int64]
    ) -> None:
        """Stores the dirty ones; clean rows are in the store already, or were never updated."""
        self.holds_rows = True
        changed = dirty.astype(bool)
        if not changed.all():
            if self.ahead is not None:
                self.ahead.left(keys[~changed], next_use[~changed])
            keys, rows, next_use = keys[changed], rows[changed], next_use[changed]
            if not len(keys):
                return
        self.write(keys, rows)
        if self.ahead is not None:
            self.ahead.keep(keys, rows, next_use)

    def write(self, keys: Keys, rows: NDArray[np.uint8]) -> None:
        """Rows of the memory tiers go to the store, whether or not they stay in memory as well."""
        if self.store is None:
            raise TierFullError(
                f"{self.name}: the memory tiers are full and there is no store below; raise hbm or uvm, "
                "or set ssd"
            )
        if self.ahead is not None:
            self.ahead.written(keys)
        self.store.write(keys, rows)
        self.stats.counters.written_rows += len(keys)
        self.uncommitted += len(keys)
