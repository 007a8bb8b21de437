"""Imports: a store directory, on any engine, from an export (:mod:`tierstore.store.portable`)."""

from __future__ import annotations

import os
from pathlib import Path

from tierstore.errors import StoreCorruptError
from tierstore.keys import make_keys
from tierstore.store.directory import NO_CAP, open_store
from tierstore.store.files import store_errors
from tierstore.store.portable import Progress, RowCounter, atomic_folder, read_description
from tierstore.store.protocol import CommitId, RowStore, StoredTable
from tierstore.store.shards import Shard, ShardLayout, read_shard


def import_(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    engine: str = "native",
    ssd_bytes: int | None = None,
    progress: Progress | None = None,
) -> CommitId:
    """Make the new store directory ``path`` of the export ``source``, on any engine; return its commit.

    Tables, rows (bit for bit), meta and tag are as in the exported commit. ``ssd_bytes`` caps the bytes of
    the store's files while they are written. Raises ``StoreMismatchError`` when ``source`` is no export,
    ``ConfigError`` when ``path`` is not free, ``StoreLockedError`` while another export or import makes it,
    ``StoreCorruptError`` when anything in the export is damaged.
    A failure leaves nothing under ``path``.
    """
    with store_errors(f"importing {source} to {path}"):
        tables, shards, commit = read_description(Path(source))
        counter = RowCounter(progress, sum(shard["rows"] for listed in shards.values() for shard in listed))
        cap = NO_CAP if ssd_bytes is None else ssd_bytes
        with atomic_folder(Path(path)) as folder, open_store(folder, engine, tables, cap) as store:
            for spec in tables:
                store.reserve(spec.index, sum(_rows_there(Path(source), spec, s) for s in shards[spec.index]))
                for shard in shards[spec.index]:
                    layout = ShardLayout(spec, shard["rows"])
                    for ids, rows in read_shard(Path(source, shard["file"]), layout, shard["crc32"]):
                        store.write(make_keys(spec.index, ids), rows)
                        counter.add(len(ids))
                _check_count(Path(source), store, spec, shards[spec.index])
            return store.commit(commit.meta, commit.tag or None)


def _rows_there(source: Path, spec: StoredTable, shard: Shard) -> int:
    """Return the number of rows that fit the file's size, without trusting its description."""
    try:
        size = os.stat(source / shard["file"], follow_symlinks=False).st_size
    except FileNotFoundError:
        raise StoreCorruptError(f"{source / shard['file']} is missing") from None
    return min(shard["rows"], size // spec.row_bytes)


def _check_count(source: Path, store: RowStore, spec: StoredTable, shards: list[Shard]) -> None:
    """Raise ``StoreCorruptError`` if an id occurs twice, which makes two rows one."""
    stored = store.count(spec.index)
    listed = sum(shard["rows"] for shard in shards)
    if stored != listed:
        raise StoreCorruptError(f"{source}: table {spec.name!r} has {listed} rows of {stored} ids")
