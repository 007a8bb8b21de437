"""Budgets that are said as shares of the tables' bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from tierstore.errors import ConfigError

_FRACTION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:/\s*(\d+)|(%))\s*")


def budget(text: str, of: int, option: str) -> int | str:
    """Return a fraction or percentage of ``of`` in bytes, other text as it is; ``option`` is for errors."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        return text
    number, divisor, percent = match.groups()
    if divisor is not None and int(divisor) == 0:
        raise ConfigError(f"{option} {text}: cannot divide by 0")
    share = Fraction(number) / (100 if percent else int(divisor))
    if not 0 < share <= 1:
        raise ConfigError(f"{option} {text}: a fraction of the tables' bytes must be above 0 and at most 1")
    return int(share * of)
