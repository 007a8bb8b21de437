"""Checks of every command's arguments, before the command does anything."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError
from tierstore.result_file import ResultFile

RESULTS = ("json", "plot", "save_curves", "record", "out")
"""Options that name a file for results."""
SHARES = ("changed", "rate", "record_rate")
"""Options that are a share of rows, above 0 and at most 1."""
MAY_BE_ZERO = (
    *("seed", "lr", "tolerance", "dense_seconds", "search_seconds", "host_gib", "drift", "run_in"),
    *("depth", "window", "at", "drop"),
)
"""Numbers that may be 0; the commands say where one of these has to be positive, too."""

MOST = {"threads": 1024, "read_threads": 1024, "tables": 65_535}
"""The most of what there can be only so many of."""

_MAY_BE_NEGATIVE = ("seed",)
_LARGEST = 2**63 - 1


def check_arguments(args: argparse.Namespace) -> None:
    """Check ``args`` before the work begins, since an hour of work must not end in such an error.

    Raises ``ConfigError`` for a number that is too small or not finite, for a result file in a folder that
    refuses it or cannot be made, and for a file of two results.
    """
    for name, value in vars(args).items():
        for number in value if isinstance(value, list | tuple) else [value]:
            _check_number(name, number)
    files: dict[Path, str] = {}
    for name in RESULTS:
        value, option = getattr(args, name, None), _option(name)
        if not isinstance(value, Path):
            continue
        ResultFile(value, option)
        if (other := files.setdefault(value.resolve(), option)) != option and _is_regular(value):
            raise ConfigError(f"{other} and {option} are both {value}; give each a file of its own")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_regular(path: Path) -> bool:
    return path.is_file() or not path.exists()


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    option = _option(name)
    if not math.isfinite(value) or (value < 0 and name not in _MAY_BE_NEGATIVE):
        raise ConfigError(f"{option} is {value}; it must be a finite number of at least 0")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ConfigError(f"{option} is {value}; it must fit 64 bits")
    if value > MOST.get(name, math.inf):
        raise ConfigError(f"{option} is {value}; it must be at most {MOST[name]}")
    if name in SHARES and not 0 < value <= 1:
        raise ConfigError(f"{option} must be above 0 and at most 1, not {value:g}")
    if value == 0 and name not in MAY_BE_ZERO:
        least = "at least 1" if isinstance(value, int) else "above 0"
        raise ConfigError(f"{option} is {value:g}; it must be {least}")
