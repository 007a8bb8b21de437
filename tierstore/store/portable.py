"""Export and import: a store as safetensors files and a JSON file, for other engines, machines and programs.

The format is in docs/reference/formats.md. Rows pass through in batches of some megabytes, so memory does
not grow with the store. What is written appears under its final name only when it is complete and durable.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tierstore.config import is_whole
from tierstore.errors import ConfigError, StoreCorruptError, StoreMismatchError
from tierstore.keys import MAX_ID, make_keys
from tierstore.store.files import (
    json_with_checksum,
    parse_json,
    read_regular,
    store_errors,
    sync_directory,
    write_atomically,
)
from tierstore.store.identity import parse_tables
from tierstore.store.protocol import CommitId, CommitInfo, TableSpec
from tierstore.store.shards import ShardLayout, ShardWriter, read_shard

if TYPE_CHECKING:
    from tierstore.store.directory import DirectoryStore

log = logging.getLogger(__name__)

FILE_NAME = "EXPORT.json"
FORMAT = 1
SHARD_BYTES = 512 << 20
_SHARD = re.compile(r"\d{5}-\d{5}\.safetensors")
_MOST_JSON_BYTES = 256 << 20
_CHECKSUMS = {"header", "ids", "weights", "state"}

Progress = Callable[[int, int], None]
"""Gets rows done, and in all (engines that estimate their rows may end on another number)."""


def export_rows(
    store: DirectoryStore,
    target: str | os.PathLike[str],
    commit: CommitInfo | None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Writes all rows of ``store``, as it reads now, to the new folder ``target``; returns how many.

    ``commit`` is kept with them. Raises ``ConfigError`` when ``target`` exists and is not an empty folder,
    ``StoreFullError`` when there is no room; then, and when it is interrupted, nothing is left under
    ``target``.
    """
    counter = _Counter(progress, store.stats().rows)
    with store_errors(f"exporting to {target}"), _appearing(Path(target)) as folder:
        tables = []
        for spec in store.tables:
            shards: list[dict[str, Any]] = []
            for keys in _shards_of(store, spec, shard_bytes):
                name = f"{spec.index:05d}-{len(shards):05d}.safetensors"
                checksums = _write_shard(folder / name, store, spec, keys, counter)
                shards.append({"file": name, "rows": len(keys), "crc32": checksums})
            tables.append({**asdict(spec), "shards": shards})
        content = {"format": FORMAT, "commit": _describe(commit), "engine": store.engine, "tables": tables}
        write_atomically(folder / FILE_NAME, [json_with_checksum(content)])
    return counter.done


def import_(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    engine: str = "native",
    ssd_bytes: int | None = None,
    progress: Progress | None = None,
) -> CommitId:
    """Makes the new store directory ``path`` of the export ``source``, on any engine; returns its commit.

    Tables, rows (bit for bit), meta and tag are those of the exported commit. ``ssd_bytes`` caps the store's
    files while it is written. Raises ``StoreMismatchError`` when ``source`` is no export, ``ConfigError``
    when ``path`` is not free, ``StoreCorruptError`` when anything in the export is damaged; in any case of
    failure nothing is left under ``path``.
    """
    from tierstore.store.directory import NO_CAP, open_store

    with store_errors(f"importing {source} to {path}"):
        tables, shards, commit = read_description(Path(source))
        counter = _Counter(progress, sum(shard["rows"] for listed in shards.values() for shard in listed))
        cap = NO_CAP if ssd_bytes is None else ssd_bytes
        with _appearing(Path(path)) as folder, open_store(folder, engine, tables, cap) as store:
            for spec in tables:
                store.expect(spec.index, sum(_rows_there(Path(source), spec, s) for s in shards[spec.index]))
                for shard in shards[spec.index]:
                    layout = ShardLayout(spec, shard["rows"])
                    for ids, rows in read_shard(Path(source, shard["file"]), layout, shard["crc32"]):
                        store.write(make_keys(spec.index, ids), rows)
                        counter.add(len(ids))
                _check_count(Path(source), store, spec, shards[spec.index])
            return store.commit(commit.meta, commit.tag or None)


class _Counter:
    """Rows done, told to who wants to know."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.done = 0
        self._progress = progress
        self._total = total

    def add(self, rows: int) -> None:
        self.done += rows
        if self._progress is not None:
            self._progress(self.done, max(self.done, self._total))


def _shards_of(store: DirectoryStore, spec: TableSpec, shard_bytes: int) -> Iterator[NDArray[np.uint64]]:
    """Keys of the stored rows, as many at a time as fill a file."""
    rows = max(1, shard_bytes // spec.row_bytes)
    waiting: list[NDArray[np.uint64]] = []
    count = 0
    for chunk in store.keys(spec.index):
        waiting.append(chunk)
        count += len(chunk)
        while count >= rows:
            keys = np.concatenate(waiting)
            yield keys[:rows]
            waiting, count = [keys[rows:]], count - rows
    if count:
        yield np.concatenate(waiting)


def _write_shard(
    path: Path,
    store: DirectoryStore,
    spec: TableSpec,
    keys: NDArray[np.uint64],
    counter: _Counter,
) -> dict[str, int]:
    layout = ShardLayout(spec, len(keys))
    writer, whole = ShardWriter(path, layout), False
    try:
        for first, last in layout.batches():
            batch = keys[first:last]
            rows = np.empty((len(batch), spec.row_bytes), np.uint8)
            if not store.read(batch, rows).all():
                raise StoreCorruptError(f"rows of table {spec.name!r} are listed, but not there")
            writer.write((batch & np.uint64(MAX_ID)).astype(np.int64), rows)
            counter.add(last - first)
        whole = True
    finally:
        writer.close(sync=whole)
    return writer.crc32


def _rows_there(source: Path, spec: TableSpec, shard: dict[str, Any]) -> int:
    """Rows that a file can have, whatever the description says."""
    try:
        size = os.stat(source / shard["file"], follow_symlinks=False).st_size
    except FileNotFoundError:
        raise StoreCorruptError(f"{source / shard['file']} is missing") from None
    return min(shard["rows"], size // spec.row_bytes)


def _check_count(source: Path, store: DirectoryStore, spec: TableSpec, shards: list[dict[str, Any]]) -> None:
    """An id twice would make two rows one."""
    stored = sum(len(chunk) for chunk in store.keys(spec.index))
    listed = sum(shard["rows"] for shard in shards)
    if stored != listed:
        raise StoreCorruptError(f"{source}: table {spec.name!r} has {listed} rows of {stored} ids")


def _describe(commit: CommitInfo | None) -> dict[str, Any] | None:
    if commit is None:
        return None
    return {**asdict(commit), "meta": base64.b64encode(commit.meta).decode()}


def read_description(
    source: Path,
) -> tuple[tuple[TableSpec, ...], dict[int, list[dict[str, Any]]], CommitInfo]:
    """Tables, shards by table index, and commit of the export ``source``."""
    file = source / FILE_NAME
    try:
        content = parse_json(read_regular(file, _MOST_JSON_BYTES), file)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMismatchError(f"{source} is not an export: it has no {FILE_NAME}") from None
    listed = content.get("tables")
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise StoreCorruptError(f"{file} is damaged: tables is not a list of objects")
    plain = [{name: value for name, value in table.items() if name != "shards"} for table in listed]
    tables = parse_tables(file, {**content, "tables": plain}).tables
    shards = {table["index"]: _checked_shards(file, table.get("shards")) for table in listed}
    return tables, shards, _checked_commit(file, content.get("commit"))


def _checked_shards(file: Path, shards: Any) -> list[dict[str, Any]]:
    """Only names that export writes are taken, so no path leads out of the folder."""
    if not isinstance(shards, list):
        raise StoreCorruptError(f"{file} is damaged: shards of a table are not a list")
    for shard in shards:
        fits = (
            isinstance(shard, dict)
            and isinstance(shard.get("file"), str)
            and _SHARD.fullmatch(shard["file"])
            and is_whole(shard.get("rows"), 0, 1 << 48)
            and isinstance(shard.get("crc32"), dict)
            and shard["crc32"].keys() == _CHECKSUMS
        )
        if not fits:
            raise StoreCorruptError(f"{file} is damaged: {shard!r:.200} does not describe a file of rows")
    return shards


def _checked_commit(file: Path, commit: Any) -> CommitInfo:
    if commit is None:
        return CommitInfo(0, "", 0, b"")
    try:
        meta = base64.b64decode(commit["meta"], validate=True)
        return CommitInfo(int(commit["id"]), str(commit["tag"]), int(commit["unix_nanoseconds"]), meta)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise StoreCorruptError(f"{file} is damaged: its commit cannot be read: {error}") from error


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder to work in that becomes ``target`` when the body is done, and vanishes when it fails."""
    target = target.absolute()
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise ConfigError(f"{target} exists already; give a new path, or an empty folder")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a folder; make it first")
    working = target.with_name(f".{target.name}.tierstore-partial")
    if working.exists():
        log.info("removing %s, which an interrupted export or import left", working)
        shutil.rmtree(working)
    working.mkdir()
    try:
        yield working
        sync_directory(working)
        os.rename(working, target)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    sync_directory(target.parent)
