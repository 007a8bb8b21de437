"""Measurements that take turns in rounds; a later command can go on with a round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError


def read_records(path: Path | None) -> dict[str, Any]:
    """Return an earlier command's file, with ``records``; nothing without a file. Raises ConfigError."""
    if path is None or not path.exists():
        return {}
    known: dict[str, Any] = json.loads(path.read_text())
    if "records" not in known:
        raise ConfigError(f"{path} has no measurements of this benchmark; give another --json")
    return known


def due(keys: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the positions of the ``keys`` that this round has still to measure.

    A round that was left unfinished has only its remaining keys. ``records`` that have a key's items are its
    measurements. Each round begins with another key.
    """
    times = [sum(key.items() <= record.items() for record in records) for key in keys]
    first = min(times) * 5 % len(keys)
    order = [*range(first, len(keys)), *range(first)]
    return [i for i in order if times[i] == min(times)]


def chosen(text: str, count: int, option: str) -> list[int]:
    """Return the numbers of a text such as "0-3,7"; all of an empty text. Raises ConfigError."""
    numbers: list[int] = []
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    except ValueError:
        numbers = [-1]
    if any(not 0 <= number < count for number in numbers):
        raise ConfigError(f"{option} {text!r}: give numbers below {count}, such as 0-3 or 2,5")
    return numbers or list(range(count))
