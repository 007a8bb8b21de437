"""Budgets that are said as shares of the tables' bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from fractions import Fraction

from tierstore.config import TierConfig
from tierstore.errors import ConfigError

_FIELDS = {field.name for field in fields(TierConfig)} - {"path"}
_NO_OPTION = ", or set overcommit=True"
"""What no command can do."""
_FRACTION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:/\s*(\d+)|(%))\s*")


@contextmanager
def named_as_options() -> Iterator[None]:
    """Let a ConfigError that begins with a field of a TierConfig begin with the option of a command that has
    the field's name."""
    try:
        yield
    except ConfigError as error:
        field = re.match(r"[a-z_]+", str(error))
        if field is None or field.group() not in _FIELDS:
            raise
        text = f"--{field.group().replace('_', '-')}{str(error)[field.end() :]}"
        raise ConfigError(text.replace(_NO_OPTION, "")) from error


def budget(text: str, of: int, option: str) -> int | str:
    """Return a fraction or percentage of ``of`` in bytes, other text as it is; ``option`` is for errors."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        if "/" in text or "%" in text:
            raise ConfigError(
                f"{option} is {text!r}; give a fraction of the tables' bytes, such as 1/37 or 3%, or bytes, "
                "such as 64MiB"
            )
        return text
    number, divisor, percent = match.groups()
    if divisor is not None and int(divisor) == 0:
        raise ConfigError(f"{option} {text}: cannot divide by 0")
    share = Fraction(number) / (100 if percent else int(divisor))
    if not 0 < share <= 1:
        raise ConfigError(f"{option} {text}: a fraction of the tables' bytes must be above 0 and at most 1")
    return int(share * of)
