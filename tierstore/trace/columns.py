"""Which columns of a log are tables: its user says, since timestamps and labels look like ids, too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tierstore.errors import ConfigError

ALL = "all"
"""Stands for every column."""
_SHOWN = 3  # values of a column that a message shows
_SAMPLE = 1000
"""Rows that tell what is in a column."""
_NO_IDS = re.compile(
    r"(^|_)(time|timestamp|ts|date|day|hour|label|target|click(ed)?|rating|price|amount|cost|score|weight|value)"
    r"($|_)|(_at|time)$"
)
_NO_ID = re.compile(r"-?\d*\.\d+|-\d+")
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


def listed(samples: Samples) -> str:
    """Return a line for every column: its name, and its first values."""
    width = max(map(len, samples))
    lines = []
    for name, values in samples.items():
        first = list(dict.fromkeys(map(str, values)))[:_SHOWN]
        shown = ", ".join(text if len(text) <= 24 else f"{text[:21]}..." for text in first)
        lines.append(f"  {name:<{width}}  {shown} ...")
    return "\n".join(lines)


def looks_like_ids(name: str, values: Sequence[object]) -> bool:
    """Return whether a column may have ids: no numbers with a fraction, and no name of something else."""
    texts = [str(value) for value in values[:_SAMPLE]]
    return _NO_IDS.search(name.lower()) is None and not any(
        re.fullmatch(r"-?\d*\.\d+|-\d+", t) for t in texts
    )
