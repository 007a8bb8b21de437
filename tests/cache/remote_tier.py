"""Tiers of a test's own: dictionaries of rows, as another host may have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from tierstore.cache.tiers import registry
from tierstore.cache.tiers.protocol import (
    NEVER,
    Flags,
    FoundRows,
    Keys,
    LastingTier,
    MovingRows,
    RowBytes,
    Tier,
    TierStats,
)
from tierstore.keys import split


class RemoteTier(Tier):
    """An exclusive tier: when it holds more than ``capacity`` rows, the oldest leave."""

    name = "remote"
    exclusive = True

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: dict[int, tuple[np.ndarray, bool]] = {}
        self.found: list[int] = []

    def find(self, keys: Keys) -> FoundRows:
        here = self.holds(keys)
        self.found = keys[here].tolist()
        found = [self.rows[key] for key in self.found]
        if not found:
            return FoundRows(here, [])
        rows = np.stack([row for row, _ in found])
        dirty = np.array([dirty for _, dirty in found], np.uint8)
        return FoundRows(here, [(np.flatnonzero(here), rows, None)], dirty, codec=self.codec)

    def holds(self, keys: Keys) -> Flags:
        return np.array([key in self.rows for key in keys.tolist()], bool)

    def take(self, found: FoundRows) -> None:
        for key in self.found:
            del self.rows[key]
        self.found = []

    def put(self, rows: MovingRows, seq: int, demote: Callable[..., None]) -> None:
        after = dict(self.rows)
        for key, row, dirty in zip(rows.keys.tolist(), rows.rows, rows.dirty, strict=True):
            after[key] = row.copy(), bool(dirty)
        leaving = [(key, *after.pop(key)) for key in list(after)[: max(0, len(after) - self.capacity)]]
        if leaving:
            demote(
                MovingRows(
                    np.array([key for key, _, _ in leaving], np.uint64),
                    np.stack([row for _, row, _ in leaving]),
                    np.array([dirty for _, _, dirty in leaving], np.uint8),
                    np.full(len(leaving), NEVER),
                    self.codec,
                )
            )
        self.rows = after

    def flush(self, write: Callable[[Keys, RowBytes], None]) -> None:
        for key, (row, dirty) in self.rows.items():
            if dirty:
                write(np.array([key], np.uint64), row[None])
                self.rows[key] = row, False

    def keys(self, table: int | None = None, *, only_dirty: bool = False) -> Iterator[Keys]:
        found = np.array([key for key, (_, dirty) in self.rows.items() if dirty or not only_dirty], np.uint64)
        if len(found):
            yield found if table is None else found[split(found)[0] == table]

    def stats(self) -> TierStats:
        return TierStats(memory_bytes=sum(row.nbytes for row, _ in self.rows.values()))


class RemoteSource(LastingTier):
    """A lasting tier, such as the rows of a former training that a server has."""

    name = "source"
    exclusive = False

    def __init__(self, rows: dict[int, np.ndarray]) -> None:
        self.rows = rows

    def find(self, keys: Keys) -> FoundRows:
        here = self.holds(keys)
        if not here.any():
            return FoundRows(here, [])
        rows = np.stack([self.rows[key] for key in keys[here].tolist()])
        return FoundRows(here, [(np.flatnonzero(here), rows, None)], codec=self.codec)

    def holds(self, keys: Keys) -> Flags:
        return np.array([key in self.rows for key in keys.tolist()], bool)

    def put(self, rows: MovingRows, seq: int, demote: Callable[..., None]) -> None:
        dirty = rows.part(rows.dirty.astype(bool))
        self.write(dirty.keys, dirty.rows)

    def write(self, keys: Keys, rows: RowBytes) -> None:
        self.rows.update(zip(keys.tolist(), rows.copy(), strict=True))

    def keys(self, table: int | None = None, *, only_dirty: bool = False) -> Iterator[Keys]:
        found = np.array(list(self.rows), np.uint64)
        if len(found) and not only_dirty:
            yield found if table is None else found[split(found)[0] == table]


def register(monkeypatch: pytest.MonkeyPatch, *remote: int) -> None:
    """Put tiers of dictionaries between ``uvm`` and the store."""
    makers: list[registry.TierFactory] = []
    for number, capacity in enumerate(remote):
        makers.append(partial(_remote, capacity, f"remote{number}"))
    hbm, uvm, ssd = registry.TIERS
    monkeypatch.setattr(registry, "TIERS", [hbm, uvm, *makers, ssd])


def _remote(capacity: int, name: str, _: registry.TierRequest) -> RemoteTier:
    made = RemoteTier(capacity)
    made.name = name
    return made
