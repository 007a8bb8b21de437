"""The row store as a tier, with the rows that are read ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tierstore import _core
from tierstore.cache.device import DeviceRows
from tierstore.cache.stats import GroupStats
from tierstore.cache.tiers.buffers import Buffer
from tierstore.cache.tiers.codec import Codec
from tierstore.cache.tiers.protocol import (
    NEVER,
    Flags,
    FoundRows,
    Keys,
    LastingTier,
    MovingRows,
    Piece,
    RowBytes,
    Slots,
    TierStats,
)
from tierstore.cache.tiers.read_ahead import ReadAhead
from tierstore.store.protocol import RowStore


class StoreTier(LastingTier):
    """Rows of one layout in ``store``, which has the rows of other layouts, too. ``row_bytes``: in the store.
    ``ahead`` may be None; ``codec``: the rows' form."""

    exclusive = False
    uses_window = False

    def __init__(
        self,
        name: str,
        store: RowStore,
        row_bytes: int,
        stats: GroupStats,
        ahead: ReadAhead | None = None,
        codec: Codec | None = None,
    ) -> None:
        self.name = name
        self.codec = codec
        self.store = store
        self.ahead = ahead
        self._stats = stats
        self._fetched = Buffer(row_bytes)
        self._taken = 0  # rows that the newest lookup has got
        # Whether the store may have rows that no exclusive tier has. A store without commits was opened
        # empty. If all rows fit into memory, no row is looked for in the store, however often it is
        # committed.
        self._holds_rows = bool(store.commits())

    @property
    def window_rows(self) -> float:
        return 0.0 if self.ahead is None else self.ahead.window_rows

    @property
    def threads(self) -> Sequence[int] | None:
        return () if self.ahead is None else self.ahead.threads

    def window_bytes(self, rows: int) -> int:
        return 0 if self.ahead is None else self.ahead.window_bytes(rows)

    def grant_window(self, size: int) -> None:
        if self.ahead is not None:
            self.ahead.grant_window(size)

    def set_read_ahead(self, size: int) -> None:
        if self.ahead is not None:
            self.ahead.set_bytes(size)

    def find(self, keys: Keys) -> FoundRows:
        return self._find(keys, None if self.ahead is None else self.ahead.find)

    def promote(self, keys: Keys) -> FoundRows:
        return self._find(keys, None if self.ahead is None else self.ahead.take)

    def _find(self, keys: Keys, held: Callable[[Keys], tuple[Slots, RowBytes] | None] | None) -> FoundRows:
        here = np.zeros(len(keys), bool)
        if not self._holds_rows:
            return FoundRows(here, [])
        pieces: list[Piece] = []
        if held is not None and (ahead := held(keys)) is not None:
            slots, rows = ahead
            here = slots >= 0
            positions = np.flatnonzero(here)
            pieces.append((positions, rows, slots[positions]))
        left = np.flatnonzero(~here)
        read_ahead = len(keys) - len(left)
        if len(left):
            rows = self._fetched.take(len(left))
            there = np.flatnonzero(self._read(keys[left], rows))
            pieces.append((left[there], rows, there.astype(np.int32)))
            here[left[there]] = True
        return FoundRows(here, pieces, read_ahead=read_ahead, codec=self.codec)

    def _read(self, keys: Keys, rows: RowBytes) -> Flags:
        with self._stats.blocked():
            return self.store.read(keys, rows)

    def holds(self, keys: Keys) -> Flags:
        return self._read(keys, self._fetched.take(len(keys)))

    def takes(self, rows: DeviceRows) -> bool:
        return self.codec is None and isinstance(rows, _core.HostRows)

    def take(self, found: FoundRows) -> None:
        self._stats.counters.read_ahead_rows += found.read_ahead
        self._taken = int(found.here.sum())

    def put(self, rows: MovingRows, seq: int, demote: Callable[..., None]) -> None:
        """Store the dirty rows; clean rows are in the store already, or were never updated."""
        self._holds_rows = True
        changed = rows.dirty.astype(bool)
        dirty = rows if changed.all() else rows.part(changed)
        if len(dirty.keys):
            self.write(dirty.keys, *dirty.source())
        if self.ahead is not None:
            self.ahead.keep(rows.keys, *rows.source(), rows.next_use)

    def write(self, keys: Keys, rows: RowBytes, slots: Slots | None = None) -> None:
        if self.ahead is not None:
            self.ahead.rows_overwritten(keys)
        with self._stats.blocked():
            self.store.write(keys, rows, slots)
        self._stats.counters.written_rows += len(keys)
        self._stats.uncommitted_rows += len(keys)

    def keys(self, table: int | None = None, *, only_dirty: bool = False) -> Iterator[Keys]:
        assert table is not None or only_dirty
        return iter(()) if table is None else self.store.keys(table)

    def stats(self) -> TierStats:
        if self.ahead is None:
            return TierStats(buffer_bytes=self._fetched.nbytes)
        return TierStats(
            buffer_bytes=self._fetched.nbytes,
            read_ahead_bytes=self.ahead.memory_bytes(),
            read_ahead_limit=self.ahead.max_bytes,
        )

    def announce(self, keys: Keys, next_use: int, now: int) -> Keys:
        if self.ahead is not None:
            if next_use == NEVER:
                self.ahead.forget()
            elif self._holds_rows:
                self.ahead.announce(next_use, keys)
        return keys

    def begin_lookup(self, seq: int) -> None:
        if self.ahead is not None:
            self.ahead.lookup_begun(seq)

    def wait(self, seq: int) -> None:
        if self.ahead is not None:
            self.ahead.wait(seq)

    def end_lookup(self, seq: int, keys: Keys) -> None:
        if self.ahead is not None:
            self.ahead.lookup_filled(keys, self._taken)

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
