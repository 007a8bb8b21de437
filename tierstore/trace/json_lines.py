"""Access logs of one JSON object per line: its fields are the columns, with an id or a list of ids each."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.errors import InputError
from tierstore.trace.columns import SAMPLE, chosen
from tierstore.trace.trace import Trace, in_bags


def open_json_lines(
    path: Path, lines: Iterable[str], batch_size: int, columns: Sequence[str] | None
) -> Trace:
    """Open a log of an object per line. A field has an integer, a string, or a list of these; an example
    without the field, or with null, has no id there. Strings are numbered by first use.

    Raises ConfigError if ``columns`` does not say which fields are tables, and InputError for other content.
    """
    objects = _objects(path, lines)
    first = [example for _, example in zip(range(SAMPLE), objects, strict=False)]
    samples: dict[str, list[object]] = {}
    for _, example in first:
        for name, value in example.items():
            samples.setdefault(name, []).append(value)
    if not samples:
        raise InputError(f"{path} is empty: a log needs at least one object with a field")
    fields = {name: _Field(path, name) for name in chosen(path, columns, samples)}
    for number, example in _both(first, objects):
        for name, field in fields.items():
            field.add(number, example.get(name))
    if not any(field.ids for field in fields.values()):
        raise InputError(f"{path}: no line has an id in {', '.join(fields)}")
    found = [field.arrays() for field in fields.values()]
    batches = -(-(len(found[0][1]) - 1) // batch_size)
    return Trace(str(path), tuple(fields), in_bags(found, batch_size), batches)


def _both(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    yield from first
    yield from rest


def _objects(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects with the numbers of their lines; blank lines are left out."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(example, dict):
            raise InputError(f"{path}, line {number} is {line.strip()[:40]}; each line must be an object")
        yield number, example


class _Field:
    """The ids of one field of all lines."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self.ids = array("Q")
        self._ends = array("q", [0])
        self._words: dict[str, int] = {}
        self._kind: type | None = None

    def add(self, line: int, value: Any) -> None:
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            self.ids.append(self._id(line, one))
        self._ends.append(len(self.ids))

    def _id(self, line: int, value: Any) -> int:
        if type(value) not in (int, str):
            raise self._wrong(line, value, "ids are integers, strings, or lists of these")
        if self._kind not in (None, type(value)):
            raise self._wrong(line, value, "other ids of this field are of another kind")
        self._kind = type(value)
        if isinstance(value, str):
            return self._words.setdefault(value, len(self._words))
        if not 0 <= value < 1 << 64:
            raise self._wrong(line, value, "ids are from 0 to 2^64 - 1")
        return int(value)

    def _wrong(self, line: int, value: Any, why: str) -> InputError:
        return InputError(f"{self._path}, line {line}: {self._name} is {json.dumps(value)[:40]}; {why}")

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids (n,) and where the ids of each example begin (examples + 1,)."""
        return np.array(self.ids, np.uint64), np.array(self._ends, np.int64)
