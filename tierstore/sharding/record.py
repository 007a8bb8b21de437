"""``COMMIT.json``: the last commit of all ranks of a sharded training (docs/reference/formats.md)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from tierstore.errors import StoreCorruptError
from tierstore.placement import ShardingPlan
from tierstore.store.files import read_regular, store_error, write_atomically

FILE_NAME = "COMMIT.json"
FORMAT = 1
TAG = "commit of all ranks "
"""Begins the tag that the commit has in every rank's store."""
_MAX_BYTES = 1 << 30
_DAMAGE = (ValueError, RecursionError, AttributeError, KeyError, TypeError)


@dataclass(frozen=True)
class Saved:
    """A collection in the last commit."""

    folder: str
    engine: str
    plan: ShardingPlan
    ranks: list[int]
    """Number of the commit in the store of every rank; 0: it has no shards."""
    updates: int


def is_sharded(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder has the commits of a sharded training."""
    return Path(folder, FILE_NAME).exists()


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of ``folder``, {} without one. Raises ``StoreCorruptError`` for a damaged one."""
    file = folder / FILE_NAME
    try:
        record: dict[str, Any] = json.loads(read_regular(file, _MAX_BYTES))
        _checked(record)
    except FileNotFoundError:
        return {}
    except StoreCorruptError:
        raise
    except OSError as error:
        raise store_error(error, f"reading {file}") from error
    except _DAMAGE as error:
        raise StoreCorruptError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    return record


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Replace the record of ``folder``, atomically and durably."""
    write_atomically(folder / FILE_NAME, [json.dumps(record, allow_nan=False).encode()])


def _checked(record: Any) -> None:
    """Raise one of _DAMAGE unless :meth:`write_record` could have written the record."""
    if record.get("format") != FORMAT:
        raise ValueError(f"format {record.get('format')!r} is not {FORMAT}")
    if not _is_count(record["number"]) or not isinstance(record["extra"], dict):
        raise TypeError("number or extra is of another type")
    if not record["collections"]:
        raise ValueError("it has no collections")
    for name, entry in record["collections"].items():
        saved = saved_of(entry)
        numbers = [*saved.ranks, saved.updates]
        if len(saved.ranks) != saved.plan.world_size or not all(map(_is_count, numbers)):
            raise ValueError(f"the commits of collection {name!r} are not one of every rank")
        if not isinstance(saved.engine, str) or not _is_inside(saved.folder):
            raise ValueError(f"the folder or the engine of collection {name!r} is none")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_inside(folder: Any) -> bool:
    parts = PurePath(folder).parts
    return bool(parts) and not PurePath(folder).is_absolute() and ".." not in parts


def saved_of(entry: dict[str, Any]) -> Saved:
    plan = ShardingPlan.from_dict(entry["plan"])
    return Saved(entry["folder"], entry["engine"], plan, entry["ranks"], entry["updates"])
