"""What users say, checked: values that must hold, and fields of mappings that files have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tierstore.errors import ConfigError


def require(holds: Any, message: str) -> None:
    """Raise ConfigError with ``message`` unless something holds."""
    if not holds:
        raise ConfigError(message)


def must_be(name: str, value: Any, holds: Any, what: str) -> None:
    """Raise ConfigError unless it holds that ``value`` is ``what``; ``name`` says of what it is the value."""
    require(holds, f"{name} is {value!r}; it must be {what}")


def plain_number(value: Any) -> Any:
    """Return a number that YAML read as a string (1e9, in YAML 1.1), and whole numbers as integers."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def fields_of(values: Any, where: str, known: Collection[str], needed: Iterable[str] = ()) -> dict[str, Any]:
    """Return the fields of a mapping, without empty fields; numbers may be strings.

    Raises ConfigError, with ``where``, for what is no mapping, for fields that are not ``known`` and for
    ``needed`` ones that are missing.
    """
    require(isinstance(values, Mapping), f"{where}: expected a mapping of {sorted(known)}, got {values!r}")
    unknown = sorted(set(values) - set(known), key=str)
    require(not unknown, f"{where}: unknown fields {unknown}; known: {sorted(known)}")
    given = {key: plain_number(value) for key, value in values.items() if value is not None}
    missing = [key for key in needed if key not in given]
    require(not missing, f"{where}: {', '.join(missing)} missing")
    return given
