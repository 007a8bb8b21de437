"""The tables of a sharded training on disk, opened in one process as whole tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore.errors import ClosedError, InputError, StoreCorruptError, StoreMismatchError
from tierstore.keys import make_keys, split
from tierstore.modules.row_arguments import checked_row_ids
from tierstore.placement import ShardingPlan, ShardingType, TablePlacement
from tierstore.sharding.record import Saved, read_record, saved_of
from tierstore.sharding.shards import shard_name
from tierstore.sharding.whole_rows import Columns, RowBytes, WholeRows
from tierstore.store.directory import DirectoryStore, open_store
from tierstore.store.identity import read_identity
from tierstore.store.portable import Progress, export_rows
from tierstore.store.protocol import CommitInfo, RowBatch, StoredTable, StoreStats

_SUMS = ("rows", "disk_bytes", "live_bytes", "index_bytes")


def open_tables(path: str | os.PathLike[str]) -> StoredTables:
    """Open the last commit of all ranks in ``path`` (that of ``TierConfig.path``), to read its whole tables.

    The call needs no ranks and no model, and changes nothing: ``path`` may be read-only. All ranks' folders
    must be there. Raises ``StoreMismatchError`` for a folder without such a commit, or that lacks a rank,
    ``StoreLockedError`` while the training runs, ``StoreCorruptError`` for damage.
    """
    return StoredTables(Path(path))


def rank_folders(path: Path, saved: Saved) -> list[Path | None]:
    """Return the folder of each rank's store of a collection; None of ranks without shards. Raises
    StoreMismatchError if one is missing."""
    folders: list[Path | None] = []
    for rank, commit in enumerate(saved.ranks):
        folder = path / saved.folder / f"rank{rank:05d}"
        if commit and not folder.is_dir():
            raise StoreMismatchError(
                f"{folder} is missing, the store of rank {rank} of {len(saved.ranks)}; copy it there from "
                "the host of this rank, or from a backup"
            )
        folders.append(folder if commit else None)
    return folders


def read_commit(path: Path) -> tuple[dict[str, Any], dict[str, Saved]]:
    """Return the record of the last commit of all ranks, and its collections by name. Raises
    StoreMismatchError if there is none."""
    record = read_record(path)
    if not record:
        raise StoreMismatchError(
            f"{path} has no commit of all ranks (COMMIT.json); give the path of a sharded training's tables"
        )
    return record, {name: saved_of(entry) for name, entry in record["collections"].items()}


class _Collection:
    """One collection's stores, by rank."""

    def __init__(self, path: Path, saved: Saved, undo: ExitStack) -> None:
        self.stores: list[DirectoryStore | None] = []
        self.made_at = 0
        self.specs: list[dict[str, StoredTable]] = []
        for folder, commit in zip(rank_folders(path, saved), saved.ranks, strict=True):
            store = None
            if folder is not None:
                store = undo.enter_context(open_store(folder, read_only=True, at=commit))
                moments = [one.unix_nanoseconds for one in store.commits() if one.id == commit]
                self.made_at = max(self.made_at, *moments)
            self.stores.append(store)
            self.specs.append({} if folder is None else {t.name: t for t in read_identity(folder).tables})


class _Table:
    """One table, and where its shards are: ``shards[c]`` has the shards of the c-th range of columns, each
    with the ids that it has, its store, and the number of its table there."""

    def __init__(self, placement: TablePlacement, index: int, collection: _Collection) -> None:
        self.placement = placement
        replicas = placement.sharding_type is ShardingType.DATA_PARALLEL
        cuts: dict[int, Columns] = {}
        shards: dict[int, list[tuple[range, DirectoryStore, int]]] = {}
        for shard in sorted(placement.shards, key=lambda s: (s.column_start, s.row_start, s.rank)):
            if not shard.rows or (replicas and shard.rank):
                continue
            store = collection.stores[shard.rank]
            name = shard_name(placement.name, placement.embedding_dim, shard)
            spec = collection.specs[shard.rank].get(name)
            if store is None or spec is None:
                raise StoreCorruptError(f"the store of rank {shard.rank} lacks table {name!r} of the commit")
            cuts.setdefault(shard.column_start, Columns(shard.column_start, spec))
            ids = range(shard.row_start, shard.row_start + shard.rows)
            shards.setdefault(shard.column_start, []).append((ids, store, spec.index))
        self.rows = WholeRows(placement.name, index, placement.embedding_dim, list(cuts.values()))
        self.shards = list(shards.values())

    def count(self, column: int = 0) -> int:
        """Return the number of stored rows, by the shards of one range of columns."""
        places = {(id(store), table): (store, table) for _, store, table in self.shards[column]}
        return sum(store.count(table) for store, table in places.values())

    def scan(self) -> Iterator[tuple[NDArray[np.int64], RowBytes]]:
        """Yield ids and whole rows of all stored rows, in batches."""
        count = self.count()
        for column in range(1, len(self.shards)):
            if self.count(column) != count:
                raise self._differ()
        places = {(id(store), table): (store, table) for _, store, table in self.shards[0]}
        for store, table in places.values():
            for keys, rows in store.scan([table]):
                ids = split(keys)[1]
                others = []
                for column in range(1, len(self.shards)):
                    found, part = self._read(column, ids)
                    if not found.all():
                        raise self._differ()
                    others.append(part)
                yield ids, self.rows.joined([rows, *others])

    def _differ(self) -> StoreCorruptError:
        return StoreCorruptError(
            f"table {self.placement.name!r}: the stores of its columns have different rows; verify them"
        )

    def _read(self, column: int, ids: NDArray[np.int64]) -> tuple[NDArray[np.bool_], RowBytes]:
        """Return which of ``ids`` (n,) are stored in a range of columns, and their rows there; other rows are
        zeros."""
        spec = self.rows.cuts[column].spec
        found, rows = np.zeros(len(ids), bool), np.zeros((len(ids), spec.row_bytes), np.uint8)
        for own, store, table in self.shards[column]:
            at = np.flatnonzero((ids >= own.start) & (ids < own.stop))
            if len(at):
                part = np.zeros((len(at), spec.row_bytes), np.uint8)
                found[at] = store.read(make_keys(table, ids[at]), part)
                rows[at] = part
        return found, rows

    def read(self, ids: NDArray[np.int64]) -> RowBytes:
        """Return whole rows of ``ids`` (n,); rows that no store has are as before any update."""
        parts = []
        distinct, inverse = np.unique(ids, return_inverse=True)
        for column, cut in enumerate(self.rows.cuts):
            found, rows = self._read(column, distinct)
            if not found.all():
                rows[~found] = self.rows.initial(cut, distinct[~found])
            parts.append(rows)
        return self.rows.joined(parts)[inverse]


class StoredTables:
    """Whole tables of a sharded training, as of its last commit of all ranks; make it by :func:`open_tables`.

    A context manager. The object is a store to be exported, too: ``tables``, ``count``, ``scan``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        record, self.collections = read_commit(path)
        self.number: int = record["number"]
        """Number of the commit of all ranks."""
        self.extra: dict[str, Any] = record["extra"]
        """What was committed with the rows."""
        self.engine = next(iter(self.collections.values())).engine
        self._tables: dict[str, _Table] = {}
        with ExitStack() as undo:
            self._stores: list[DirectoryStore] = []
            self._made_at = 0
            for saved in self.collections.values():
                collection = _Collection(path, saved, undo)
                self._stores += [store for store in collection.stores if store is not None]
                self._made_at = max(self._made_at, collection.made_at)
                for placement in saved.plan.tables:
                    self._tables[placement.name] = _Table(placement, len(self._tables), collection)
            self._undo: ExitStack | None = undo.pop_all()

    @property
    def tables(self) -> Sequence[StoredTable]:
        """The whole tables, as an unsharded store describes them, by index."""
        return [table.rows.spec for table in self._tables.values()]

    @property
    def plans(self) -> dict[str, ShardingPlan]:
        """The plan of each collection."""
        return {name: saved.plan for name, saved in self.collections.items()}

    def table_names(self) -> list[str]:
        """Return the names of the tables, in order."""
        return list(self._tables)

    def rows(self, ids: Any, table: str | None = None) -> Tensor:
        """Return weights of the rows ``ids`` (n ids, list, array or tensor), float32 (n, embedding_dim).

        ``table`` may be left out where there is one. Rows that training never updated have their initial
        values. Raises InputError for unknown tables and ids.
        """
        found, keys = self._asked(ids, table)
        return torch.from_numpy(found.rows.floats(found.read(keys))[0].copy())

    def optimizer_rows(self, ids: Any, table: str | None = None) -> dict[str, Tensor]:
        """Return the optimizer's state of the rows ``ids`` by name, float32 (n,) or (n, embedding_dim)."""
        found, keys = self._asked(ids, table)
        floats = np.hstack(found.rows.floats(found.read(keys)))
        parts = found.rows.optimizer.split_state(floats, found.placement.embedding_dim)
        return {name: torch.from_numpy(part.copy()) for name, part in parts.items()}

    def touched_ids(self, table: str | None = None) -> Iterator[Tensor]:
        """Yield the ids of the rows that are stored, int64 (n,) each, in no order."""
        found = self._table(table)
        for _, store, number in {(id(s), n): (r, s, n) for r, s, n in found.shards[0]}.values():
            for keys in store.keys(number):
                yield torch.from_numpy(split(keys)[1])

    def _table(self, table: str | None) -> _Table:
        if self._undo is None:
            raise ClosedError(f"the tables in {self.path} are closed; open them again")
        names = self.table_names()
        if table is None and len(names) == 1:
            return self._tables[names[0]]
        if table is None or table not in self._tables:
            raise InputError(f"there is no table {table!r}; give one of {names}")
        return self._tables[table]

    def _asked(self, ids: Any, table: str | None) -> tuple[_Table, NDArray[np.int64]]:
        found, keys = self._table(table), checked_row_ids(ids)
        bound = found.placement.num_embeddings
        outside = np.flatnonzero((keys < 0) | (keys >= bound))
        if len(outside):
            raise InputError(
                f"table {found.placement.name!r}: id {keys[outside[0]]} at position {outside[0]} is out of "
                f"range [0, {bound})"
            )
        return found, keys

    # -- as a store ----------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Return the sums of all ranks' stores; ``rows`` are of shards, so more than rows of tables where
        columns are cut."""
        each = [store.stats() for store in self._stores]
        sums: dict[str, Any] = {name: sum(getattr(one, name) for one in each) for name in _SUMS}
        return replace(each[0], **sums)

    def count(self, table: int) -> int:
        """Return the number of stored rows of a table, by its index."""
        return list(self._tables.values())[table].count()

    def scan(self, tables: Sequence[int] | None = None) -> Iterator[RowBatch]:
        """Yield keys and whole rows of tables, by their indices; None: of all. Tables come one by one."""
        every = list(self._tables.values())
        for index in range(len(every)) if tables is None else tables:
            for ids, rows in every[index].scan():
                yield make_keys(index, ids), rows

    def commit_info(self) -> CommitInfo:
        """Return the commit of all ranks as one commit, made when the last rank made its own."""
        return CommitInfo(self.number, "", self._made_at, json.dumps({"extra": self.extra}).encode())

    def export(self, target: str | os.PathLike[str], progress: Progress | None = None) -> int:
        """Write a portable copy of the whole tables to the new folder ``target``, in the format of an
        unsharded store's (:func:`tierstore.store.import_` reads it); return the number of rows."""
        self._table(next(iter(self._tables)))
        return export_rows(self, target, self.commit_info(), progress)

    def close(self) -> None:
        """Close the stores of all ranks. A second call does nothing."""
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    def __enter__(self) -> StoredTables:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
