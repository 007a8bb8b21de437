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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from tierstore.config import is_integer
from tierstore.errors import ConfigError, StoreCorruptError, StoreMismatchError
from tierstore.keys import rows_by_table
from tierstore.store.files import (
    JSON,
    json_with_checksum,
    parse_json,
    read_regular,
    store_errors,
    sync_directory,
    write_atomically,
)
from tierstore.store.identity import format_of, parse_tables
from tierstore.store.lock import lock_for_making
from tierstore.store.parallel import ahead
from tierstore.store.protocol import CommitInfo, RowBatch, StoredTable, StoreStats
from tierstore.store.shards import Shard, TableWriter, WriteSizes

log = logging.getLogger(__name__)

FILE_NAME = "EXPORT.json"
SHARD_BYTES = 512 << 20
_BUFFER_BYTES = 16 << 20  # of rows of all open files
_OPEN_TABLES = 256  # each has a file open; more tables are more scans
_SHARD = re.compile(r"\d{5}-\d{5}\.safetensors")
_MAX_JSON_BYTES = 256 << 20
_CHECKSUMS = {"header", "ids", "weights", "state"}
_ALL_CHECKSUMS = {*_CHECKSUMS, "quantisation"}

Progress = Callable[[int, int], None]
"""Called with rows done, and rows in all (which engines that estimate it may miss)."""


class StoreOfTables(Protocol):
    """A store with a list of its tables, whose rows can be read one after another."""

    engine: str

    @property
    def tables(self) -> Sequence[StoredTable]: ...
    def stats(self) -> StoreStats: ...
    def count(self, table: int) -> int: ...
    def scan(self, tables: Sequence[int] | None = None) -> Iterator[RowBatch]: ...


def export_rows(
    store: StoreOfTables,
    target: str | os.PathLike[str],
    commit: CommitInfo | None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write all rows of ``store``, as it reads now, to the new folder ``target``; return how many.

    The export names ``commit``. Raises ``ConfigError`` when ``target`` exists and is not an empty folder,
    ``StoreLockedError`` while another export or import makes ``target``, and ``StoreFullError`` when there is
    no room. An error or an interruption leaves nothing under ``target``.
    """
    counter = RowCounter(progress, store.stats().rows)
    with store_errors(f"exporting to {target}"), atomic_folder(Path(target)) as folder:
        shards = _write_tables(store, folder, shard_bytes, counter)
        tables = [{**spec.to_dict(), "shards": shards[spec.index]} for spec in store.tables]
        version = format_of(store.tables)
        content = {"format": version, "commit": _describe(commit), "engine": store.engine, "tables": tables}
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


def _write_tables(
    store: StoreOfTables, folder: Path, shard_bytes: int, counter: RowCounter
) -> dict[int, list[Shard]]:
    """Write the rows of all tables, and return their files by table index."""
    shards: dict[int, list[Shard]] = {}
    specs = sorted(store.tables, key=lambda spec: spec.row_bytes)  # rows of one size lie together
    for first in range(0, len(specs), _OPEN_TABLES):
        some = specs[first : first + _OPEN_TABLES]
        sizes = WriteSizes(shard_bytes, _BUFFER_BYTES // len(some))
        with ExitStack() as undo:
            pool = undo.enter_context(ThreadPoolExecutor(1, "tierstore-export"))
            writers = {}
            for spec in some:
                writers[spec.index] = TableWriter(folder, spec, store.count(spec.index), sizes, pool)
                undo.callback(writers[spec.index].close)
            for keys, rows in undo.enter_context(closing(ahead(store.scan([*writers])))):
                for table, ids, part in rows_by_table(keys, rows):
                    writers[table].write(ids, part)
                counter.add(len(keys))
            for table, writer in writers.items():
                writer.finish()
                shards[table] = writer.shards
    return shards


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
            and _CHECKSUMS <= shard["crc32"].keys() <= _ALL_CHECKSUMS
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
    fails. Raises ``StoreLockedError`` while another body works on the same ``target``."""
    target = target.absolute()
    _check_free(target)
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a folder; make it first")
    working = target.with_name(f".{target.name}.tierstore-partial")
    with lock_for_making(target, target.with_name(f".{target.name}.tierstore-lock")):
        _check_free(target)
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


def _check_free(target: Path) -> None:
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise ConfigError(f"{target} exists already; give a new path, or an empty folder")
    if os.path.ismount(target):
        raise ConfigError(f"{target} is where a disk is mounted, and cannot be replaced; give a path in it")
