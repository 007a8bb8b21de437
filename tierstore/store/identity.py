"""``TIERSTORE.json``: which engine and tables a store directory is for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError, StoreCorruptError, StoreMismatchError
from tierstore.store.files import json_with_checksum, parse_json, read_regular, walk_files, write_atomically
from tierstore.store.protocol import StoredTable

FILE_NAME = "TIERSTORE.json"
DEVICE_FILE = "TIERSTORE-DEVICE.json"
"""In the further folders of a store (:mod:`tierstore.store.devices`)."""
_OF_RANKS = "COMMIT.json"
"""What the folder of a sharded training has in its place."""
FORMAT = 3
"""The newest format that is read here. Format 1 has no dtypes of rows: they are float32. Formats 1 and 2 have
no list of devices."""
_MAX_BYTES = 256 << 20
_DTYPES = {"weight_dtype", "state_dtype"}  # which files of format 1 lack
_FIELDS = {field.name: field.type for field in fields(StoredTable)}
_TYPES = {"str": str, "int": int, "Mapping[str, Any]": dict}


@dataclass(frozen=True)
class StoredDevice:
    """A device that a store is spread over."""

    id: str
    """Random, and for the store's whole life."""
    path: str
    """Absolute path of its folder when the store was last opened for writing."""


@dataclass(frozen=True)
class StoreIdentity:
    """Contents of ``TIERSTORE.json``."""

    engine: str
    tables: tuple[StoredTable, ...]
    format: int = 0
    """0: the oldest format that can describe the tables and devices."""
    devices: tuple[StoredDevice, ...] = ()
    """The first is the folder of this file; none: the store never had another one."""
    opened: bool = False
    """Whether the engine has been opened for writing: its folder has files since. False in older stores,
    too, until they are opened for writing."""

    def __post_init__(self) -> None:
        if not self.format:
            object.__setattr__(self, "format", FORMAT if self.devices else format_of(self.tables))


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
        check_no_device(Path(path))
        raise StoreMismatchError(
            f"{path} is not a store directory: it has no {FILE_NAME}{_stores_below(Path(path))}"
        ) from None
    return parse_tables(file, parse_json(data, file))


def _stores_below(path: Path) -> str:
    """Say which folders of ``path``, such as the one of a checkpoint, are stores or those of all ranks."""
    below = sorted(file.parent for name in (FILE_NAME, _OF_RANKS) for file in path.glob(f"*/{name}"))
    return f"; give {' or '.join(map(str, below[:3]))}, a folder of tables" if below else ""


def check_no_device(path: Path) -> None:
    """Raise ``StoreMismatchError`` when ``path`` is a further folder of a store."""
    if (path / DEVICE_FILE).exists():
        raise StoreMismatchError(
            f"{path} is a further folder of a store (it has {DEVICE_FILE}, which names the first one); give "
            "the store's first folder before it"
        )


def write_identity(path: Path, identity: StoreIdentity) -> None:
    """Write ``TIERSTORE.json`` into ``path``, atomically and durably."""
    content = {
        "format": identity.format,
        "engine": identity.engine,
        "tables": [spec.to_dict() for spec in identity.tables],
        **({"devices": [asdict(device) for device in identity.devices]} if identity.devices else {}),
        **({"opened": True} if identity.opened else {}),
    }
    data = json_with_checksum(content)
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"the description of {len(identity.tables)} tables takes {len(data)} bytes of {FILE_NAME}, which "
            f"has room for {_MAX_BYTES}; give shorter names, or divide the tables among several stores"
        )
    write_atomically(path / FILE_NAME, [data])


def has_files(folder: Path) -> bool:
    """Return whether ``folder`` is there, and has files."""
    return folder.is_dir() and next(walk_files(folder), None) is not None


def check_has_rows(path: Path, found: StoreIdentity | None) -> None:
    """Raise ``StoreCorruptError`` where the folder of the engine, which had files, has none any more: a new,
    empty one would hide that."""
    if found is None or not found.opened:  # its creation may have been cut short
        return
    rows = path / found.engine
    if not has_files(rows):
        what = "is empty" if rows.is_dir() else "is missing"
        raise StoreCorruptError(f"{rows} {what}, which had the rows; restore a copy, or give another path")


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
    devices = _parse_devices(content.get("devices")) if version >= 3 else ()
    need(devices is not None, "devices is not a list of devices, each with an id and a path")
    opened = content.get("opened", False)
    need(isinstance(opened, bool), f"opened is {opened!r}, which is neither true nor false")
    try:
        parsed = plain([_parse_table(file, table) for table in tables])
        return StoreIdentity(engine, parsed, version, devices or (), opened)
    except ConfigError as error:
        raise StoreCorruptError(f"{file} is damaged: {error}") from error


def _parse_devices(listed: object) -> tuple[StoredDevice, ...] | None:
    devices = []
    for item in listed if isinstance(listed, list) else ():
        match item:
            case {"id": str(id), "path": str(path)}:
                devices.append(StoredDevice(id, path))
            case _:
                return None
    return tuple(devices) if devices and len({device.id for device in devices}) == len(devices) else None


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
