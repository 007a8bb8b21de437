"""The folders of a store that is spread over several devices.

The first folder is the store directory (:mod:`tierstore.store.directory`), whose ``TIERSTORE.json`` lists the
devices. Every further folder holds ``TIERSTORE-DEVICE.json``, which says whose it is, ``LOCK``, and a folder
named after the engine. A folder is known by the id in that file, so the order of the further paths does not
matter. A new device gets its file before the list names it: until then it has no segments, and a crash leaves
a folder that the next opening takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TypeAlias

from tierstore.errors import ConfigError, StoreCorruptError, StoreMismatchError
from tierstore.folders import paths_of
from tierstore.store.files import (
    json_with_checksum,
    parse_json,
    read_regular,
    store_errors,
    write_atomically,
)
from tierstore.store.identity import DEVICE_FILE, FILE_NAME, StoredDevice, StoreIdentity, has_files
from tierstore.store.lock import LOCK, FolderLock, lock_for_writing, share_lock

StorePath: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
"""A path, or a list of them, one for each device."""

_FORMAT = 1
_MAX_BYTES = 1 << 20
_MAY_BE_IN_A_NEW_ONE = {LOCK, DEVICE_FILE + ".tmp", "lost+found"}


@dataclass(frozen=True)
class _Membership:
    """Contents of ``TIERSTORE-DEVICE.json``."""

    store: str
    """Id of the first device."""
    id: str
    position: int
    first: str
    """Path of the first folder when it was last opened; for people, and for commands that get one path."""


def folders_of(path: StorePath) -> list[Path]:
    """Return the folders of a store, the first one first; none for a temporary store.

    Raises ``ConfigError`` for a list that no store can have: empty, too long, with a folder twice (also by a
    link) or within another, or with a file; ``StoreIOError`` when the system refuses one.
    """
    folders = [Path(one) for one in paths_of(path)]
    if len(folders) > 1:
        with store_errors(f"looking for the folders of the store in {folders[0]}"):
            _check_apart(folders)
    return folders


def _check_apart(folders: Sequence[Path]) -> None:
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"path {folder} is a file; give the path of a folder")
    for i, folder in enumerate(folders):
        for other in folders[:i]:
            if _same(folder, other):
                raise ConfigError(f"path has {other} and {folder}, which are one folder; give each once")
            for inner, outer in ((folder, other), (other, folder)):
                if any(_same(parent, outer) for parent in Path(os.path.realpath(inner)).parents):
                    raise ConfigError(
                        f"path has {inner}, which lies within {outer}; give folders beside each other"
                    )


def _same(a: Path, b: Path) -> bool:
    if os.path.realpath(a) == os.path.realpath(b):  # Path.resolve raises RuntimeError for a loop of links
        return True
    with suppress(OSError):  # one is not there
        return a.samefile(b)
    return False


def recorded_folders(first: Path, identity: StoreIdentity) -> list[Path]:
    """Return all folders of the store in ``first`` as its record has them.

    Raises ``StoreMismatchError`` when a further folder was last used from another first folder: this may be a
    copy, and the folder another store's by now.
    """
    folders = [Path(device.path) for device in identity.devices[1:]]
    for folder in folders:
        own = _read(folder)
        if own is not None and Path(own.first).resolve() != first.resolve():
            raise StoreMismatchError(
                f"{folder}, a device of the store in {first}, was last used from {own.first}; if the store "
                f"has moved, open it once with all of its paths: open_store([{str(first)!r}, ...])"
            )
    return [first, *folders]


class FurtherFolders:
    """The further folders of the store in ``first``, from their check to their use."""

    def __init__(self, first: Path, folders: Sequence[Path], engine: str) -> None:
        self._first = first
        self._folders = folders
        self._engine = engine
        self._owner = self._own_id = ""
        self.locks: list[FolderLock] = []

    @property
    def engine_folders(self) -> tuple[Path, ...]:
        """The engine's own folder in each."""
        return tuple(folder / self._engine for folder in self._folders)

    def check(self, found: StoreIdentity | None, read_only: bool = False) -> None:
        """Raise ``StoreMismatchError`` unless the folders are all devices that ``found`` lists, or new ones.

        Changes nothing.
        """
        members = [(folder, _read(folder)) for folder in self._folders]
        listed = {device.id: device for device in found.devices} if found else {}
        seen: dict[str, Path] = {}
        new: list[Path] = []
        for folder, own in members:
            if own is None:
                _check_empty(folder)
            elif found is None and os.path.realpath(own.first) == os.path.realpath(self._first):
                raise StoreMismatchError(
                    f"{folder} is device {own.position} of the store in {self._first}, where there is none; "
                    "perhaps its disk is not mounted. Mount it, or restore the folder from a copy"
                )
            elif found is None or not found.devices or own.store != found.devices[0].id:
                raise StoreMismatchError(
                    f"{folder} is device {own.position} of another store, last used from {own.first}; give "
                    f"the folders of the store in {self._first}, or new ones"
                )
            elif own.id in seen:
                raise StoreMismatchError(f"{seen[own.id]} and {folder} are copies of one device; give one")
            elif own.id in listed:
                seen[own.id] = folder
                continue
            elif has_files(folder / self._engine):
                raise StoreMismatchError(
                    f"{folder} holds rows of the store in {self._first}, which does not list it: the two are "
                    "not from one moment; restore all folders from one copy"
                )
            new.append(folder)
        self._check_all_there(found, seen, new)
        if read_only and new:
            raise StoreMismatchError(f"{new[0]} is no device of the store in {self._first}; leave it out")

    def _check_all_there(
        self, found: StoreIdentity | None, seen: dict[str, Path], new: Sequence[Path]
    ) -> None:
        devices = found.devices[1:] if found else ()
        missing = [(n, device) for n, device in enumerate(devices, 1) if device.id not in seen]
        if not missing:
            return
        lost = ", ".join(f"device {number} (last at {device.path})" for number, device in missing)
        empty = f"; {', '.join(map(str, new))}: empty, perhaps a disk that is not mounted" if new else ""
        paths = [str(self._first), *(device.path for device in devices)]
        raise StoreMismatchError(
            f"the store in {self._first} has {len(devices) + 1} devices, and {lost} is not among its "
            f"paths{empty}; mount it, and give path={paths}. To use fewer devices, export the "
            "store and import it anew"
        )

    def lock(self, undo: ExitStack) -> None:
        """Take the locks for writing of the folders, which exist."""
        for folder in self._folders:
            lock = lock_for_writing(folder)
            undo.callback(lock.close)
            self.locks.append(lock)

    def share_locks(self, undo: ExitStack) -> None:
        """Take the locks for reading."""
        for folder in self._folders:
            lock = share_lock(folder, DEVICE_FILE)
            undo.callback(lock.close)
            self.locks.append(lock)

    def owner(self, found: StoreIdentity | None) -> tuple[StoredDevice, ...]:
        """Return the list of devices before the new ones join it: never empty where there are folders."""
        own = StoredDevice(token_hex(8), os.path.abspath(self._first))
        if found is None or not found.devices:
            return (own,) if self._folders else ()
        return (StoredDevice(found.devices[0].id, own.path), *found.devices[1:])

    def join(self, devices: tuple[StoredDevice, ...], undo: ExitStack) -> tuple[StoredDevice, ...]:
        """Make the folders members of the store with these ``devices``; return the list to write.

        ``undo`` gets what makes new folders empty again.
        """
        if not self._folders:
            return devices
        paths: dict[str, str] = {}
        known = {device.id for device in devices}
        store, count, first = devices[0].id, len(devices), devices[0].path
        for folder, lock in zip(self._folders, self.locks, strict=True):
            lock.sign()
            own = _read(folder)
            if own is not None and own.id in known:
                position = [device.id for device in devices].index(own.id)
            else:
                undo.callback(_remove_new, folder, self._engine, lock)
                position, count = count, count + 1
            now = _Membership(store, token_hex(8) if own is None else own.id, position, first)
            if own != now:
                _write(folder, now)
            paths[now.id] = os.path.abspath(folder)
        listed = [StoredDevice(device.id, paths.pop(device.id, device.path)) for device in devices]
        return (*listed, *(StoredDevice(id, path) for id, path in paths.items()))


def _remove_new(folder: Path, engine: str, lock: FolderLock) -> None:
    """Remove what the first opening with this folder, which failed, has put there."""
    if lock.closed:  # in a forked child, whose parent owns the files
        return
    with suppress(OSError):
        (folder / engine).rmdir()
    with suppress(OSError):
        (folder / DEVICE_FILE).unlink()
    lock.remove_file()


def _check_empty(folder: Path) -> None:
    names: Iterable[str] = os.listdir(folder) if folder.exists() else ()
    foreign = sorted(set(names) - _MAY_BE_IN_A_NEW_ONE)
    if FILE_NAME in foreign:
        raise StoreMismatchError(
            f"{folder} is a store of its own; a further path must be an empty or new folder, or a device of "
            "the same store"
        )
    if foreign:
        raise StoreMismatchError(
            f"{folder} is no device of a store and not empty (it has {', '.join(foreign[:3])}"
            f"{', …' if len(foreign) > 3 else ''}); give an empty or new folder"
        )


def _read(folder: Path) -> _Membership | None:
    file = folder / DEVICE_FILE
    try:
        data = read_regular(file, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    content = parse_json(data, file)
    if content.pop("format", None) != _FORMAT:
        raise StoreCorruptError(f"{file} is damaged, or of a newer tierstore: its format is not {_FORMAT}")
    match content:
        case {"store": str(store), "id": str(id), "position": int(position), "first": str(first)}:
            return _Membership(store, id, position, first)
    raise StoreCorruptError(f"{file} is damaged: it does not have exactly its fields")


def _write(folder: Path, member: _Membership) -> None:
    content = {
        "format": _FORMAT,
        "store": member.store,
        "id": member.id,
        "position": member.position,
        "first": member.first,
    }
    write_atomically(folder / DEVICE_FILE, [json_with_checksum(content)])
