"""Which columns of a log are tables: its user says, since timestamps and labels look like ids, too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tierstore.errors import ConfigError

ALL = "all"
"""Stands for every column."""
_SHOWN = 3  # values of a column that a message shows
_WIDEST = 24  # characters of one of them
SAMPLE = 1000
"""Rows that tell what is in a column."""
_NO_IDS = re.compile(
    r"(^|_)(time|timestamp|ts|date|day|hour|label|target|click(ed)?|rating|price|amount|cost|score|weight|value)"
    r"($|_)|(_at|time)$"
)
_NO_ID = re.compile(r"-?\d*\.\d+(e[+-]?\d+)?|-?\d+e[+-]?\d+|-\d+|-?(nan|inf)")
Samples = Mapping[str, Sequence[object]]
"""The first values of every column."""


class ColumnsNeeded(ConfigError):
    """A log has several ``columns``, and nobody said which of them are tables; ``suggested``: some that look
    like ids."""

    def __init__(self, path: Path, samples: Samples) -> None:
        self.listed = listed(samples)
        self.suggested = [name for name in samples if looks_like_ids(name, samples[name])] or list(samples)
        super().__init__(
            f"{path} has columns:\n{self.listed}\nSay which of them are ids of tables, for instance "
            f"--columns {','.join(self.suggested)}; --columns {ALL} takes every column"
        )


def chosen(path: Path, columns: Sequence[str] | None, samples: Samples) -> list[str]:
    """Return the columns that are tables: ``columns`` (``["all"]``: every one), or the only one that there
    is.

    Raises ColumnsNeeded where several columns could be meant, and ConfigError for unknown and repeated ones.
    """
    names = list(samples)
    if columns is None:
        if len(names) > 1:
            raise ColumnsNeeded(path, samples)
        return names
    if list(columns) == [ALL] and ALL not in names:
        return names
    for name in columns:
        if name not in names:
            raise ConfigError(f"{path} has no column {name!r}; there are {', '.join(names)}")
        if list(columns).count(name) > 1:
            raise ConfigError(f"{path}: column {name!r} is named twice; name each column once")
    return list(columns)


def chosen_arrays(path: Path, columns: Sequence[str] | None, samples: Samples) -> list[str]:
    """Return the arrays that are tables, as :func:`chosen` does. A file of arrays may have tables alone, so
    all are taken where each looks like ids."""
    if columns is None and all(looks_like_ids(name, values) for name, values in samples.items()):
        return list(samples)
    return chosen(path, columns, samples)


def listed(samples: Samples) -> str:
    """Return a line for every column: its name, and its first values, without missing ones."""
    width = max(len(_shown(name)) for name in samples)
    lines = []
    for name, values in samples.items():
        there = (value for value in values if value not in ("", None))
        first = list(dict.fromkeys(map(str, there)))[:_SHOWN]
        lines.append(f"  {_shown(name):<{width}}  {', '.join(map(_shown, first))} ...")
    return "\n".join(lines)


def printable(text: str) -> str:
    """Return ``text`` with ? in place of what a terminal would obey, for names and texts that files have."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _shown(text: str) -> str:
    plain = printable(text)
    return plain if len(plain) <= _WIDEST else f"{plain[: _WIDEST - 3]}..."


def looks_like_ids(name: str, values: Sequence[object]) -> bool:
    """Return whether a column may have ids: no numbers with a fraction, and no name of something else."""
    texts = [str(value) for value in values[:SAMPLE]]
    return _NO_IDS.search(name.lower()) is None and not any(map(_NO_ID.fullmatch, texts))
