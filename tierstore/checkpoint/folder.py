"""A folder of checkpoints: files that are written whole or not at all, and checked byte by byte when they are
read.

``CHECKPOINTS.json`` says what the folder is, ``LOCK`` is held while something changes. A checkpoint is a
folder ``NNNNNN-stepN-XXXXXXXX`` of ``state.json``, ``tensors.safetensors`` and ``SHA256SUMS``, which appears
by a rename when all files are durable, and never changes. Once the stores have committed it gets a
``COMMITTED.json`` for people and error messages; whether a checkpoint is whole is decided by the tag of the
stores' commits (docs/reference/formats.md).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from tierstore.cache.machine import check_parent
from tierstore.errors import ConfigError, StoreCorruptError, StoreLockedError, StoreMismatchError
from tierstore.store.files import (
    open_own,
    open_regular,
    read_regular,
    store_errors,
    sync_directory,
    sync_file,
    write_atomically,
)

FORMAT = 1
_ABOUT, _LOCK = "CHECKPOINTS.json", "LOCK"
_STATE, _TENSORS, _SUMS, _COMMITTED = "state.json", "tensors.safetensors", "SHA256SUMS", "COMMITTED.json"
_NAME = re.compile(r"(\d{6,})-step(\d+)-([0-9a-f]{8})")
_SUM_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")
_LEFT_BEHIND = ".tmp"
_MAX_JSON_BYTES = 1 << 30
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Unit:
    """One checkpoint's files. The unit is whole if every store has a commit with its :attr:`tag`."""

    path: Path
    number: int
    step: int
    tag: str

    @property
    def committed(self) -> bool:
        """Whether the stores' commits of it were noted; a crash may have come before the note."""
        return (self.path / _COMMITTED).exists()

    def note_committed(self, commits: list[dict[str, Any]]) -> None:
        """Note which commit of which store belongs to the checkpoint."""
        write_atomically(self.path / _COMMITTED, [json.dumps({"stores": commits}, indent=1).encode()])

    def read_state(self, part: str = "state") -> dict[str, Any]:
        """Return the content of ``state.json``. Raises ``StoreCorruptError`` when the file was changed.

        ``part``: "state" for what checkpoint.save writes, "dcp" for torch.distributed.checkpoint's.
        """
        data = self._checked(_STATE, lambda file: read_regular(file, _MAX_JSON_BYTES))
        try:
            state = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StoreCorruptError(f"{self.path / _STATE} is damaged: {error}") from error
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise StoreMismatchError(
                f"{self.path / _STATE} has another format than {FORMAT}; read it with the tierstore that "
                "wrote it"
            )
        if part not in state:
            other, way = ("checkpoint.save", "restore") if part == "dcp" else ("dcp.save", "dcp.load")
            raise StoreMismatchError(f"{self.path} was saved by {other}; read it by {way}")
        return state

    def read_tensors(self, name: str = _TENSORS) -> dict[str, Tensor]:
        """Return the tensors by name. Raises ``StoreCorruptError`` when the file was changed."""
        file = self._checked(name, lambda file: file)
        try:
            return safetensors.torch.load_file(file)
        except safetensors.SafetensorError as error:
            raise StoreCorruptError(f"{file} is damaged: {error}") from error

    def _checked(self, name: str, read: Any) -> Any:
        file = self.path / name
        try:
            sums = read_regular(self.path / _SUMS, _BLOCK).decode("ascii", "replace")
            wanted = {m[2]: m[1] for m in map(_SUM_LINE.fullmatch, sums.splitlines()) if m}.get(name)
            if wanted is None:
                raise StoreCorruptError(f"{self.path / _SUMS} is damaged: it has no checksum of {name}")
            found = _sha256(file)
            if found != wanted:
                raise StoreCorruptError(
                    f"{file} is damaged: its SHA-256 is {found[:12]}…, and {_SUMS} says {wanted[:12]}…; "
                    "restore an older checkpoint with step=..., or copy the file back from where it is "
                    "whole"
                )
            return read(file)
        except FileNotFoundError as error:
            raise StoreCorruptError(
                f"{error.filename} is missing; restore an older checkpoint with step=..., or copy it back"
            ) from None


class Folder:
    """The folder ``path``, which the first :meth:`add` makes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.id = self._read_id()
        """A random id, drawn when the folder is made ("" before) and part of every tag."""

    def _read_id(self) -> str:
        """Read the folder's id. Raises ``StoreMismatchError`` for a folder with another purpose."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; give the folder of the checkpoints")
        try:
            about = json.loads(read_regular(self.path / _ABOUT, _BLOCK))
            found = about["id"]
        except FileNotFoundError:
            self._check_empty()
            return ""
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise StoreCorruptError(f"{self.path / _ABOUT} is damaged: {error!r}") from error
        if about.get("format") != FORMAT:
            raise StoreMismatchError(
                f"{self.path} has format {about.get('format')}; this tierstore reads {FORMAT}, so use the "
                "version that wrote it"
            )
        if not isinstance(found, str) or not re.fullmatch(r"[0-9a-f]{8}", found):
            raise StoreCorruptError(f"{self.path / _ABOUT} is damaged: its id is {found!r}")
        return found

    def _check_empty(self) -> None:
        foreign = sorted(set(_names(self.path)) - {_LOCK, _ABOUT + ".tmp", "lost+found", "rows"})
        if foreign:
            raise StoreMismatchError(
                f"{self.path} is no folder of checkpoints: it has no {_ABOUT}, but "
                f"{', '.join(foreign[:3])}; give an empty or new folder"
            )

    def units(self) -> list[Unit]:
        """Return the checkpoints whose files are there, oldest first."""
        found = [(match, name) for name in _names(self.path) if (match := _NAME.fullmatch(name))]
        for _, name in found:
            if (self.path / name).is_symlink() or not (self.path / name).is_dir():
                raise StoreCorruptError(
                    f"{self.path / name} is no folder; a checkpoint does not follow links, so copy the "
                    "folder itself"
                )
        units = [
            Unit(self.path / name, int(match[1]), int(match[2]), f"checkpoint {self.id} {name}")
            for match, name in found
        ]
        return sorted(units, key=lambda unit: unit.number)

    def owns(self, tag: str) -> bool:
        """Return whether a commit's tag belongs to a checkpoint of this folder, also a removed one."""
        return bool(self.id) and tag.startswith(f"checkpoint {self.id} ")

    def number_of(self, tag: str) -> int | None:
        """Return the number of a checkpoint of this folder, also of a removed one; None for other tags."""
        match = _NAME.fullmatch(tag.removeprefix(f"checkpoint {self.id} ")) if self.owns(tag) else None
        return int(match[1]) if match else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder where it is missing, and keep other processes from changing it in the block."""
        with store_errors(f"writing a checkpoint to {self.path}"):
            check_parent(self.path, "the folder of checkpoints")
            self.path.mkdir(exist_ok=True)
            lock = open_own(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
            try:
                _take(lock.fileno(), self.path)
                self.id = self._read_id()
                if not self.id:
                    self.id = secrets.token_hex(4)
                    about = json.dumps({"format": FORMAT, "id": self.id})
                    write_atomically(self.path / _ABOUT, [about.encode()])
                    sync_directory(self.path.parent)
                yield
            finally:
                lock.close()

    def add(self, step: int, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> Unit:
        """Write the files of a checkpoint, durably. Call it with the folder locked."""
        draft = self.begin(step)
        try:
            return self.publish(draft, state, {_TENSORS: write_tensors(draft.path / _TENSORS, tensors)})
        except BaseException:
            shutil.rmtree(draft.path, ignore_errors=True)
            raise

    def begin(self, step: int) -> Unit:
        """Return a new checkpoint under a temporary name, for files to be written to."""
        number = 1 + max((unit.number for unit in self.units()), default=0)
        name = f"{number:06d}-step{step}-{secrets.token_hex(4)}"
        path = self.path / (name + _LEFT_BEHIND)
        path.mkdir()
        return Unit(path, number, step, f"checkpoint {self.id} {name}")

    def publish(self, draft: Unit, state: dict[str, Any], sums: Mapping[str, str]) -> Unit:
        """Complete a checkpoint, durably. ``sums``: SHA-256 of its other files, which are durable already."""
        state = {"format": FORMAT, "step": draft.step, **state}
        (draft.path / _STATE).write_bytes(json.dumps(state, allow_nan=False).encode())
        lines = [f"{sum}  {file}\n" for file, sum in {_STATE: _sha256(draft.path / _STATE), **sums}.items()]
        (draft.path / _SUMS).write_text("".join(lines), encoding="ascii")
        for file in (_STATE, _SUMS):
            sync_file(draft.path / file)
        sync_directory(draft.path)
        path = draft.path.rename(draft.path.with_name(draft.path.name.removesuffix(_LEFT_BEHIND)))
        sync_directory(self.path)
        return replace(draft, path=path)

    def remove_all_but(self, kept: list[Unit]) -> None:
        """Remove all checkpoints but ``kept``, and files that crashes have left. Call it with the folder
        locked."""
        names = {unit.path.name for unit in kept}
        for name in _names(self.path):
            if _NAME.fullmatch(name) and name not in names:
                doomed = self.path / (name + _LEFT_BEHIND)
                (self.path / name).rename(doomed)
                shutil.rmtree(doomed)
            elif name.endswith(_LEFT_BEHIND) and _NAME.fullmatch(name.removesuffix(_LEFT_BEHIND)):
                shutil.rmtree(self.path / name)


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a file of tensors, durably; return its SHA-256. Raises ``StoreFullError`` or ``StoreIOError``."""
    with store_errors(f"writing {file}"):
        try:
            safetensors.torch.save_file(dict(tensors), file)
        except safetensors.SafetensorError as error:
            raise _os_error(error) from error
        sync_file(file)
        return _sha256(file)


def _os_error(error: safetensors.SafetensorError) -> OSError:
    """Return the error of the system that safetensors tells in words, as when the device is full."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def _take(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreLockedError(
            f"another process is writing a checkpoint to {path}; give every training a folder of its own"
        ) from None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(open_regular(file), "rb") as data:
        while block := data.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
