"""Checks of every command's arguments, before the command does anything."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError
from tierstore.result_file import ResultFile

RESULTS = ("json", "plot", "save_curves")
"""Options that name a file for results."""

_MAY_BE_NEGATIVE = ("seed",)
_LARGEST = 2**63 - 1


def check_arguments(args: argparse.Namespace) -> None:
    """Check ``args`` before the work begins, since an hour of work must not end in such an error.

    Raises ``ConfigError`` for a number that is negative or not finite, and for a result file in a folder that
    does not exist or refuses it.
    """
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        for number in value if isinstance(value, list | tuple) else [value]:
            _check_number(option, number, name in _MAY_BE_NEGATIVE)
        if name in RESULTS and isinstance(value, Path):
            ResultFile(value, option)


def _check_number(option: str, value: Any, may_be_negative: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value) or (value < 0 and not may_be_negative):
        raise ConfigError(f"{option} is {value}; it must be a finite number of at least 0")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ConfigError(f"{option} is {value}; it must fit 64 bits")
