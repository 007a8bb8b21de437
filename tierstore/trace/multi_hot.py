"""MLPerf's multi-hot data: a .npz with an array (examples, ids per example) of integers for each table."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from tierstore.errors import InputError
from tierstore.trace.columns import SAMPLE, chosen_arrays
from tierstore.trace.damage import named_damage
from tierstore.trace.trace import TableIds, Trace

_SUFFIX = ".npy"


@dataclass(frozen=True)
class _Member:
    """One array of the file."""

    name: str
    dtype: np.dtype
    examples: int
    ids_per_example: int

    @property
    def table(self) -> str:
        return self.name.removesuffix(_SUFFIX)


def _archive(path: Path) -> zipfile.ZipFile:
    with named_damage(path, " is no complete .npz file"):
        return zipfile.ZipFile(path)


def is_multi_hot(path: Path) -> bool:
    """Return whether a .npz has several arrays, of which some have two dimensions."""
    with _archive(path) as archive:
        shapes = [_header(path, archive, name)[0] for name in archive.namelist()]
    return len(shapes) > 1 and any(len(shape) == 2 for shape in shapes)


def open_multi_hot(path: Path, batch_size: int, columns: Sequence[str] | None = None) -> Trace:
    """Open the arrays, which are read batch by batch: a day of MLPerf's data is larger than memory.

    An array (examples,) has one id per example. ``columns``: the arrays that are tables. Raises InputError
    for arrays that do not fit together, and ConfigError where ``columns`` must say what the tables are.
    """
    with _archive(path) as archive:
        samples = {name.removesuffix(_SUFFIX): _sample(path, archive, name) for name in archive.namelist()}
        names = chosen_arrays(path, columns, samples)
        members = [_member(path, archive, name + _SUFFIX) for name in names]
    examples = {member.table: member.examples for member in members}
    if len(set(examples.values())) > 1:
        raise InputError(f"{path}: the arrays must have equally many examples; they have {examples}")
    count = members[0].examples
    if not count:
        raise InputError(f"{path} is empty: a trace needs at least one example")

    def batches() -> Iterator[list[TableIds]]:
        with ExitStack() as closing:
            archive = closing.enter_context(_archive(path))
            with named_damage(path, " is damaged"):
                streams = [closing.enter_context(archive.open(member.name)) for member in members]
                for stream in streams:
                    _read_header(stream)
            for begin in range(0, count, batch_size):
                size = min(batch_size, count - begin)
                pairs = zip(members, streams, strict=True)
                yield [(t, _read(path, stream, member, size)) for t, (member, stream) in enumerate(pairs)]

    return Trace(str(path), tuple(member.table for member in members), batches, -(-count // batch_size))


def _sample(path: Path, archive: zipfile.ZipFile, name: str) -> list[object]:
    """Return the first values of an array; its dtype where they are no numbers."""
    dtype = _header(path, archive, name)[2]
    if dtype.kind not in "iufb":
        return [dtype]
    with archive.open(name) as stream:
        shape, _, _ = _read_header(stream)
        count = min(SAMPLE, math.prod(shape))
        data = _bytes(path, name.removesuffix(_SUFFIX), stream, count * dtype.itemsize)
        found: list[object] = np.frombuffer(data, dtype).tolist()
        return found


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> _Member:
    shape, by_columns, dtype = _header(path, archive, name)
    table = name.removesuffix(_SUFFIX)
    if len(shape) not in (1, 2) or by_columns:
        raise InputError(f"{path}: array {table} is {shape}; it must be (examples, ids), in C order")
    if dtype.kind not in "iu":
        raise InputError(f"{path}: array {table} is {dtype}; ids must be integers")
    return _Member(name, dtype, shape[0], shape[1] if len(shape) == 2 else 1)


def _header(path: Path, archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    with named_damage(path, f": {name} is no complete array"), archive.open(name) as stream:
        return _read_header(stream)


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)


def _read(path: Path, stream: IO[bytes], member: _Member, examples: int) -> np.ndarray:
    data = _bytes(path, member.table, stream, examples * member.ids_per_example * member.dtype.itemsize)
    return np.frombuffer(data, member.dtype).astype(np.uint64 if member.dtype.kind == "u" else np.int64)


def _bytes(path: Path, table: str, stream: IO[bytes], size: int) -> bytes:
    with named_damage(path, f": array {table} is damaged"):
        data = stream.read(size)
    if len(data) < size:
        raise InputError(f"{path}: array {table} ends early; is the file truncated?")
    return data
