"""An engine that plans lookups as a training does, without rows: it tells what the tiers of a training hit
and miss.

Budgets, tiers, lanes, policies, admission, the window and the division by use are the training's own. Rows
have their bytes in every budget, and no memory: their device keeps nothing, and their store keeps the keys of
the rows that it was given.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.device import HOST, ComputedRows, Device, DeviceRows, ReadyUpdates, Slots
from tierstore.cache.engine import Engine
from tierstore.cache.loss import warns_of_loss
from tierstore.cache.opening import GroupOpening
from tierstore.cache.tiers.protocol import Keys, RowBytes, Tier
from tierstore.cache.tiers.read_ahead import ReadAhead
from tierstore.cache.tiers.registry import TIERS, TierRequest, store_tier
from tierstore.cache.tiers.sizes import MAX_SLOTS
from tierstore.keys import split
from tierstore.store.base import StoreBase
from tierstore.store.protocol import CommitInfo, StoredTable
from tierstore.store.registry import StoreOptions

_CHUNK = 1 << 16


@dataclass(frozen=True)
class NoRows:
    """Rows of ``row_bytes`` bytes in no memory, for :class:`NoDevice`; copies of them are zeros."""

    row_bytes: int

    def commit(self, slots: int) -> None:
        return

    def discard(self, first: int) -> None:
        return

    def move(self, source: Slots, target: Slots) -> None:
        return

    def initialise(self, values: object, slots: Slots | None, keys: Keys) -> None:
        return

    def copy_out(self, slots: Slots, out: RowBytes) -> None:
        out[:] = 0

    def copy_in(self, slots: Slots, rows: RowBytes, source: Slots | None = None) -> None:
        return

    def copy_rows(self, slots: Slots, rows: NoRows, source: Slots) -> None:
        return

    def encode(self, codec: object, keys: Keys, out: RowBytes, slots: Slots | None = None) -> int:
        out[:] = 0
        return -1

    def decode(
        self, codec: object, rows: RowBytes, slots: Slots | None = None, source: Slots | None = None
    ) -> None:
        return

    def lookup_pooled(self, *_: object, **__: object) -> None:
        raise _no_weights()

    def lookup_rows(self, *_: object) -> None:
        raise _no_weights()

    def weight_grads(self, *_: object) -> None:
        raise _no_weights()

    def update_pooled(self, *_: object, **__: object) -> Slots:
        raise _no_weights()

    def update_rows(self, *_: object, **__: object) -> Slots:
        raise _no_weights()


def _no_weights() -> AssertionError:
    return AssertionError("rows of an engine of keys have no weights")


@dataclass(frozen=True)
class NoDevice:
    """A device whose rows take no memory; it has room for as many as this machine's memory."""

    @property
    def name(self) -> str:
        return HOST.name

    def memory(self) -> tuple[int, int]:
        return HOST.memory()

    def prepare(self, rows: Collection[ComputedRows] = (), updated: Collection[ComputedRows] = ()) -> None:
        return

    def allocate(
        self, slots: int, row_bytes: int, weights: str = "fp32", dim: int = 0, kept: int | None = None
    ) -> DeviceRows:
        return NoRows(row_bytes)

    def load(self, rows: RowBytes, weights: str = "fp32") -> DeviceRows:
        return NoRows(rows.shape[1])

    def ready_updates(self, updates: Sequence[partial[Slots]]) -> AbstractContextManager[ReadyUpdates]:
        raise _no_weights()

    @property
    def makes_from(self) -> int:
        return HOST.makes_from

    def make_batch(self, segments: Sequence[_core.IdSegment]) -> tuple[_core.Batch, int, int, int]:
        return HOST.make_batch(segments)

    def stage(self, *arrays: object) -> object:
        return None

    def takes(self, rows: DeviceRows) -> bool:
        return isinstance(rows, NoRows)

    def uvm(self, kind: str) -> Device:
        return self

    def staging(self, slots: int, row_bytes: int) -> DeviceRows | None:
        return None

    def close(self) -> None:
        return


class KeyStore(StoreBase):
    """A store that keeps the keys of the rows written to it; what it reads has no defined content."""

    engine = "keys"
    io = "memory"

    def __init__(self, tables: Sequence[StoredTable], rows: int) -> None:
        super().__init__(Path(), tables, StoreOptions(ssd_bytes=0))
        self._held = _core.HeldRows(min(rows, MAX_SLOTS), 1)
        self._written: list[Keys] = []

    def _read(self, keys: Keys, out: RowBytes) -> NDArray[np.bool_]:
        return self._held.find(keys) >= 0

    def _write(self, keys: Keys, rows: RowBytes) -> None:
        new = keys[self._held.find(keys) < 0]
        self._held.add(new)
        self._written.append(new)

    def _keys(self, table: int) -> Generator[Keys, None, None]:
        for keys in self._written:
            yield keys[split(keys)[0] == table]

    def _commit(self, commit: CommitInfo) -> None:
        return

    def _remove(self, commit: CommitInfo) -> None:
        return

    def _space(self) -> tuple[int, int, int, int]:
        return len(self._held), 0, 0, 0

    def _release(self) -> None:
        self._written.clear()


class UnreadAhead(ReadAhead):
    """Memory for rows read ahead, of which a window takes its part, and in which no row is ever read."""

    def announce(self, seq: int, keys: Keys) -> None:
        return

    def lookup_begun(self, seq: int) -> None:
        return

    def keep(self, keys: Keys, rows: RowBytes, slots: Slots | None, next_use: NDArray[np.int64]) -> None:
        return

    def wait(self, seq: int) -> None:
        return

    def lookup_filled(self, keys: Keys, stored: int) -> None:
        return


def _keys_tier(request: TierRequest) -> Tier | None:
    return store_tier(request, UnreadAhead)


class KeysEngine(Engine):
    """An engine without rows: lookups are planned in its tiers, and nothing else is done with them.

    Modules of the tables call ``lookup`` and ``mark_updated`` of the groups. The engine has no store of its
    own, so nothing is committed, and ``stats()["store"]`` is None. ``config.device`` is left out of account.
    """

    def _open_tiers(self, at: int | str, undo: ExitStack) -> None:
        config, self.device = self.config, NoDevice()
        opening = GroupOpening(self.tables, self.specs, config, self.optimizer, self.policy, self.device)
        rows = sum(table.max_rows for table in self.tables)
        store = KeyStore(self.specs, rows) if config.ssd else None
        factories = [_keys_tier if make is store_tier else make for make in TIERS]
        self.groups = opening.groups(store, factories)
        self._load_meta()
        self._position = 0
        self.warn_of_loss = warns_of_loss(self, "", self.groups)
