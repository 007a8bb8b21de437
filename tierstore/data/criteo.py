"""Criteo's click logs: Kaggle's train.txt, the days of the 1TB logs, or the arrays that MLPerf makes of
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tierstore.data.criteo_npy import CriteoNpy, Day
from tierstore.data.dataset import Dataset, TableInfo
from tierstore.errors import ConfigError

DENSE, TABLES = 13, 26
DEFAULT_ROWS = 1_000_000


def load_criteo(path: str | None = None, *, hashed: bool = True, max_rows: int | None = None) -> Dataset:
    """Load a text file (plain or .gz), or a folder of text files (day_*, *.txt, *.tsv) or arrays.

    If ``hashed``, ids are hashed (text) or taken modulo (arrays) into tables of ``max_rows`` rows, 1 M by
    default. Else ids are used as they are: tables of text have 2^32 rows and one for missing ids; tables of
    arrays have 2^31 rows.
    """
    if path is None:
        raise ConfigError("data 'criteo' needs path: the folder or file of the logs")
    if not hashed and max_rows is not None:
        raise ConfigError("data 'criteo': max_rows is the size of hashed tables; raw ids need all rows")
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"data 'criteo': max_rows must be at least 1, not {max_rows}")
    place = Path(path)
    arrays = _in_order(place.glob("*_sparse.npy")) if place.is_dir() else []
    raw_rows = 1 << 31 if arrays else (1 << 32) + 1
    rows = (max_rows or DEFAULT_ROWS) if hashed else raw_rows
    tables = tuple(TableInfo(f"cat_{t}", rows) for t in range(TABLES))
    if arrays:
        return CriteoNpy(tables, tuple(Day.open(file, TABLES, DENSE) for file in arrays), hashed)
    from tierstore.data.criteo_tsv import CriteoText  # compiles with numba

    return CriteoText(tables, tuple(_texts(place)), hashed)


def _texts(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    names = re.compile(r"(day_\d+|.*\.txt|.*\.tsv)(\.gz)?")
    found = _in_order(file for file in place.glob("*") if names.fullmatch(file.name) and file.is_file())
    if not found:
        raise ConfigError(
            f"data 'criteo': {place} has no day_N, *.txt or *.tsv (or these with .gz), nor *_sparse.npy; "
            "give the folder of the logs"
        )
    return found


def _in_order(files: Iterable[Path]) -> list[Path]:
    """Sort by name, and numbers in a name by value: day_2 before day_10."""
    return sorted(
        files, key=lambda file: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", file.name)]
    )
