"""``TIERSTORE.json``: which engine and tables a store directory is for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError, StoreCorruptError, StoreMismatchError
from tierstore.store.files import json_with_checksum, parse_json, read_regular, write_atomically
from tierstore.store.protocol import StoredTable

FILE_NAME = "TIERSTORE.json"
FORMAT = 2
"""The newest format that is read here. Format 1 has no dtypes of rows: they are float32."""
_MAX_BYTES = 256 << 20
_DTYPES = {"weight_dtype", "state_dtype"}  # which files of format 1 lack
_FIELDS = {field.name: field.type for field in fields(StoredTable)}
_TYPES = {"str": str, "int": int, "Mapping[str, Any]": dict}


@dataclass(frozen=True)
class StoreIdentity:
    """Contents of ``TIERSTORE.json``."""

    engine: str
    tables: tuple[StoredTable, ...]
    format: int = 0
    """0: the oldest format that can describe the tables."""

    def __post_init__(self) -> None:
        if not self.format:
            object.__setattr__(self, "format", format_of(self.tables))


def format_of(tables: Iterable[StoredTable]) -> int:
    """Return the oldest format that can describe ``tables``."""
    return 1 if all(table.format.is_wide for table in tables) else 2


def read_identity(path: str | os.PathLike[str]) -> StoreIdentity:
    """Return the identity of the store directory ``path``, without opening or locking the store.

    Raises ``StoreMismatchError`` when ``path`` has no identity or one of a newer version, and
    ``StoreCorruptError`` when the identity is damaged.
    """
    file = Path(path) / FILE_NAME
    try:
        data = read_regular(file, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMismatchError(f"{path} is not a store directory: it has no {FILE_NAME}") from None
    return parse_tables(file, parse_json(data, file))


def write_identity(path: Path, identity: StoreIdentity) -> None:
    """Write ``TIERSTORE.json`` into ``path``, atomically and durably."""
    content = {
        "format": identity.format,
        "engine": identity.engine,
        "tables": [spec.to_dict() for spec in identity.tables],
    }
    data = json_with_checksum(content)
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"the description of {len(identity.tables)} tables takes {len(data)} bytes of {FILE_NAME}, which "
            f"has room for {_MAX_BYTES}; give shorter names, or divide the tables among several stores"
        )
    write_atomically(path / FILE_NAME, [data])


def plain(tables: Sequence[StoredTable]) -> tuple[StoredTable, ...]:
    """Return ``tables`` as they come back from JSON (lists for tuples), ordered by index.

    Raises ``ConfigError`` at two tables of one name or index and at values that JSON cannot hold.
    """
    seen: dict[object, str] = {}
    result = []
    for spec in sorted(tables, key=lambda spec: spec.index):
        for label in (spec.name, spec.index):
            if label in seen:
                raise ConfigError(
                    f"tables {seen[label]!r} and {spec.name!r} have the same name or index {label!r}"
                )
            seen[label] = spec.name
        try:
            result.append(StoredTable(**json.loads(json.dumps(asdict(spec), allow_nan=False))))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"table {spec.name!r}: its specification cannot be stored: {error}") from error
    return tuple(result)


def check(path: Path, found: StoreIdentity, wanted: StoreIdentity) -> None:
    """Raise ``StoreMismatchError``, which says what differs, unless ``path``, which holds ``found``, fits.

    The engine and each stored table must be as wanted; ``wanted`` may have more tables.
    """
    if found.engine != wanted.engine:
        raise StoreMismatchError(
            f'{path} was written by engine "{found.engine}", not "{wanted.engine}"; open it with '
            f'engine="{found.engine}" or give another path'
        )
    by_name = {spec.name: spec for spec in wanted.tables}
    for stored in found.tables:
        if stored.name not in by_name:
            raise StoreMismatchError(
                f"{path} holds rows of table {stored.name!r}, which was not asked for (asked: "
                f"{sorted(by_name)}); give another path, or ask for all of its tables"
            )
        _compare(path, stored, by_name[stored.name])


def _compare(path: Path, stored: StoredTable, asked: StoredTable) -> None:
    differing = [name for name in _FIELDS if getattr(stored, name) != getattr(asked, name)]
    if differing:
        details = "; ".join(
            f"{name} is {getattr(stored, name)!r} there, but {getattr(asked, name)!r} was asked for"
            for name in differing
        )
        raise StoreMismatchError(
            f"{path} does not fit table {asked.name!r}: {details}; give another path, or the table as stored"
        )


def parse_tables(file: Path, content: Any) -> StoreIdentity:
    """Return the identity that the JSON object ``content`` of ``file`` describes; errors as read_identity."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise StoreCorruptError(f"{file} is damaged: {what}")

    version = content.get("format")
    need(_is(version, int) and version >= 1, f"format {version!r} is not a version number")
    if version > FORMAT:
        raise StoreMismatchError(
            f"{file} has format {version}, but this tierstore reads up to format {FORMAT}; upgrade it"
        )
    engine, tables = content.get("engine"), content.get("tables")
    need(_is(engine, str), f"engine {engine!r} is not a name")
    need(isinstance(tables, list), "tables is not a list")
    try:
        return StoreIdentity(engine, plain([_parse_table(file, table) for table in tables]), version)
    except ConfigError as error:
        raise StoreCorruptError(f"{file} is damaged: {error}") from error


def _parse_table(file: Path, table: object) -> StoredTable:
    if not isinstance(table, dict) or not _FIELDS.keys() - _DTYPES <= table.keys() <= _FIELDS.keys():
        raise StoreCorruptError(
            f"{file} is damaged: a table does not have exactly the fields {list(_FIELDS)}"
        )
    for name, value in table.items():
        if not _is(value, _TYPES[str(_FIELDS[name])]):
            raise StoreCorruptError(f"{file} is damaged: {name} {value!r} of a table is no {_FIELDS[name]}")
    return StoredTable(**table)


def _is(value: object, kind: type) -> bool:
    return isinstance(value, Mapping if kind is dict else kind) and not isinstance(value, bool)
