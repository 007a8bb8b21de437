"""Initial values of rows: pure functions of (seed, table name, id, column), not of the tier or the
order of arrival."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierstore.errors import ConfigError

KINDS = {"constant": 0, "uniform": 1, "normal": 2}


@dataclass(frozen=True)
class Init:
    """How untouched rows look: ``constant`` a, ``uniform`` in [a, b), or ``normal`` with mean a and
    deviation b."""

    kind: str
    a: float
    b: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"init kind {self.kind!r} is unknown; known kinds: {', '.join(KINDS)}")
        for name in ("a", "b"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"init {self.kind}: {name} is {value!r}; it must be a finite number")
            object.__setattr__(self, name, float(value))
        if self.kind == "uniform" and self.a > self.b:
            raise ConfigError(f"init uniform: the lower bound {self.a} is above the upper bound {self.b}")
        if self.kind == "normal" and self.b < 0:
            raise ConfigError(f"init normal: the standard deviation {self.b} is negative")

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "a": self.a, "b": self.b}


def constant(value: float) -> Init:
    """Set each element to ``value``."""
    return Init("constant", value)


def uniform(low: float, high: float) -> Init:
    """Draw elements uniformly from [low, high)."""
    return Init("uniform", low, high)


def normal(mean: float = 0.0, std: float = 1.0) -> Init:
    """Draw elements from a normal distribution."""
    return Init("normal", mean, std)


def as_init(value: Any, default: Init) -> Init:
    """Return the ``Init`` of ``None`` (``default``), an ``Init``, "zeros", a number or a mapping.

    A number is a constant; a mapping is as :meth:`Init.to_dict` gives it.
    """
    if value is None:
        return default
    if isinstance(value, Init):
        return value
    if value == "zeros":
        return constant(0.0)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return constant(float(value))
    if isinstance(value, Mapping):
        return Init(**value)
    raise ConfigError(
        f"init is {value!r}; use tierstore.initializers.uniform(low, high), normal(mean, std), constant(v), "
        '"zeros" or a number'
    )


def table_seed(seed: int, table: str) -> int:
    """Return the 64-bit seed of one table, which depends on its name, never on its place in a collection."""
    digest = hashlib.blake2b(f"{seed}:{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
