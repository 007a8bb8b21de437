"""Exports: a store as safetensors files and a JSON file, for other engines, machines and programs.

docs/reference/formats.md describes the format; :mod:`tierstore.store.importing` makes stores of exports.
Rows pass through in batches of some megabytes, so memory does not grow with the store. A folder appears under
its final name only when it is complete and durable.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from tierstore.config import is_integer
from tierstore.errors import ConfigError, StoreCorruptError, StoreMismatchError
from tierstore.keys import MAX_ID
from tierstore.store.files import (
    JSON,
    json_with_checksum,
    parse_json,
    read_regular,
    store_errors,
    sync_directory,
    write_atomically,
)
from tierstore.store.identity import parse_tables
from tierstore.store.protocol import CommitInfo, RowStore, StoredTable
from tierstore.store.shards import ShardLayout, ShardWriter

log = logging.getLogger(__name__)

FILE_NAME = "EXPORT.json"
FORMAT = 1
SHARD_BYTES = 512 << 20
_SHARD = re.compile(r"\d{5}-\d{5}\.safetensors")
_MAX_JSON_BYTES = 256 << 20
_CHECKSUMS = {"header", "ids", "weights", "state"}

Progress = Callable[[int, int], None]
"""Called with rows done, and rows in all (which engines that estimate it may miss)."""


class Shard(TypedDict):
    """A file of an export, and the checksums of its tensors."""

    file: str
    rows: int
    crc32: dict[str, int]


class StoreOfTables(RowStore, Protocol):
    """A store with a list of its tables."""

    @property
    def tables(self) -> Sequence[StoredTable]: ...


def export_rows(
    store: StoreOfTables,
    target: str | os.PathLike[str],
    commit: CommitInfo | None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write all rows of ``store``, as it reads now, to the new folder ``target``; return how many.

    The export names ``commit``. Raises ``ConfigError`` when ``target`` exists and is not an empty folder,
    and ``StoreFullError`` when there is no room. An error or an interruption leaves nothing under ``target``.
    """
    counter = RowCounter(progress, store.stats().rows)
    with store_errors(f"exporting to {target}"), atomic_folder(Path(target)) as folder:
        tables = []
        for spec in store.tables:
            shards: list[Shard] = []
            for keys in _shards_of(store, spec, shard_bytes):
                name = f"{spec.index:05d}-{len(shards):05d}.safetensors"
                checksums = _write_shard(folder / name, store, spec, keys, counter)
                shards.append({"file": name, "rows": len(keys), "crc32": checksums})
            tables.append({**asdict(spec), "shards": shards})
        content = {"format": FORMAT, "commit": _describe(commit), "engine": store.engine, "tables": tables}
        write_atomically(folder / FILE_NAME, [json_with_checksum(content)])
    return counter.done


class RowCounter:
    """Counts rows done and reports them to ``progress``."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.done = 0
        self._progress = progress
        self._total = total

    def add(self, rows: int) -> None:
        self.done += rows
        if self._progress is not None:
            self._progress(self.done, max(self.done, self._total))


def _shards_of(store: StoreOfTables, spec: StoredTable, shard_bytes: int) -> Iterator[NDArray[np.uint64]]:
    """Yield the keys of the stored rows, as many at a time as fill a file."""
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
    store: StoreOfTables,
    spec: StoredTable,
    keys: NDArray[np.uint64],
    counter: RowCounter,
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


def _describe(commit: CommitInfo | None) -> JSON | None:
    if commit is None:
        return None
    return {**asdict(commit), "meta": base64.b64encode(commit.meta).decode()}


def read_description(
    source: Path,
) -> tuple[tuple[StoredTable, ...], dict[int, list[Shard]], CommitInfo]:
    """Return tables, shards by table index, and commit of the export ``source``."""
    file = source / FILE_NAME
    try:
        content = parse_json(read_regular(file, _MAX_JSON_BYTES), file)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMismatchError(f"{source} is not an export: it has no {FILE_NAME}") from None
    listed = content.get("tables")
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise StoreCorruptError(f"{file} is damaged: tables is not a list of objects")
    plain = [{name: value for name, value in table.items() if name != "shards"} for table in listed]
    tables = parse_tables(file, {**content, "tables": plain}).tables
    shards = {table["index"]: _checked_shards(file, table.get("shards")) for table in listed}
    return tables, shards, _checked_commit(file, content.get("commit"))


def _checked_shards(file: Path, shards: object) -> list[Shard]:
    """Check the shards of a table. Only names that export writes pass, so no path leads out of the folder."""
    if not isinstance(shards, list):
        raise StoreCorruptError(f"{file} is damaged: shards of a table are not a list")
    for shard in shards:
        fits = (
            isinstance(shard, dict)
            and isinstance(shard.get("file"), str)
            and _SHARD.fullmatch(shard["file"])
            and is_integer(shard.get("rows"), 0, 1 << 48)
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
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to work in that becomes ``target`` when the body is done, and vanishes when the body
    fails."""
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
