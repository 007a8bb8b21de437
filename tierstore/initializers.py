"""Initial values of rows: pure functions of (seed, table name, id, column), not of the tier or the
order of arrival."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tierstore.errors import ConfigError

KINDS = {"constant": 0, "uniform": 1, "normal": 2}


@dataclass(frozen=True)
class Init:
    """How untouched rows begin: :func:`constant`, :func:`uniform` or :func:`normal` values."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"init {self.kind}: {name} is {value!r}; it must be a finite number")
            object.__setattr__(self, name, float(value))

    def parameters(self) -> tuple[float, float]:
        """Return both parameters in the order of the class; a constant's second one is 0."""
        first, second = (*vars(self).values(), 0.0)[:2]
        return first, second

    def to_dict(self) -> dict[str, Any]:
        """Return the form in which stores keep it: ``kind``, and the parameters as ``a`` and ``b``."""
        first, second = self.parameters()
        return {"kind": self.kind, "a": first, "b": second}


@dataclass(frozen=True)
class Constant(Init):
    """Every element is ``value``."""

    kind: ClassVar[str] = "constant"
    value: float


@dataclass(frozen=True)
class Uniform(Init):
    """Elements are uniform in [low, high)."""

    kind: ClassVar[str] = "uniform"
    low: float
    high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ConfigError(
                f"init uniform: the lower bound {self.low} is above the upper bound {self.high}; swap them"
            )


@dataclass(frozen=True)
class Normal(Init):
    """Elements are normal with this mean and standard deviation."""

    kind: ClassVar[str] = "normal"
    mean: float
    std: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std < 0:
            raise ConfigError(
                f"init normal: the standard deviation {self.std} is negative; it must be 0 or more"
            )


def constant(value: float) -> Init:
    """Set each element to ``value``."""
    return Constant(value)


def uniform(low: float, high: float) -> Init:
    """Draw elements uniformly from [low, high)."""
    return Uniform(low, high)


def normal(mean: float = 0.0, std: float = 1.0) -> Init:
    """Draw elements from a normal distribution."""
    return Normal(mean, std)


def of_kind(kind: str, first: float, second: float = 0.0) -> Init:
    """Return the initial values of a kind from its parameters, in the order of its class."""
    if kind == "constant":
        return Constant(first)
    if kind not in KINDS:
        raise ConfigError(f"init kind {kind!r} is unknown; use one of: {', '.join(KINDS)}")
    return (Uniform if kind == "uniform" else Normal)(first, second)


def from_dict(value: Mapping[str, Any]) -> Init:
    """Return what :meth:`Init.to_dict` has described."""
    return of_kind(value["kind"], value["a"], value.get("b", 0.0))


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
        return from_dict(value)
    raise ConfigError(
        f"init is {value!r}; use tierstore.initializers.uniform(low, high), normal(mean, std), constant(v), "
        '"zeros" or a number'
    )


def table_seed(seed: int, table: str) -> int:
    """Return the 64-bit seed of one table, which depends on its name, never on its place in a collection."""
    digest = hashlib.blake2b(f"{seed}:{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
