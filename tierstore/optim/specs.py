"""Fused optimizers as data: hyperparameters, state kept beside the weights, and what a store remembers.

The arithmetic is in ``csrc/kernels/optimizer.h``; it runs once per touched row in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from tierstore._core import OptimizerStep
from tierstore.config import is_integer
from tierstore.errors import ConfigError
from tierstore.row_format import WIDE

_DECAY_MODES = {"l2": 1, "decoupled": 2}

_KERNELS = "the backward pass applies the optimizer by kernels of its own; leave it out"
_NO_MOMENTUM = "rows keep no momentum; leave it out, or use Adam, whose exp_avg is one"
_NOT_SUPPORTED = {
    **dict.fromkeys(("momentum", "dampening", "nesterov"), _NO_MOMENTUM),
    **dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), _KERNELS),
    "lr_decay": "use a schedule of torch.optim.lr_scheduler on the module's fused_optimizer",
    "amsgrad": "rows keep no maximum of exp_avg_sq; leave it out",
    "maximize": "negate the loss",
    "decoupled_weight_decay": "use AdamW",
}
"""Arguments of torch's optimizers that are not supported here, and what to do instead."""

Rows = TypeVar("Rows")
"""A NumPy array or tensor, float32 (n, row_bytes / 4)."""


class OptimizerSpec:
    """Base of the optimizers, which are frozen dataclasses of their hyperparameters.

    An optimizer of torch.optim's name has torch's hyperparameters and defaults. All but ``lr`` are given by
    name, because torch has more hyperparameters; an unsupported one raises ``ConfigError``.

    A row is ``embedding_dim`` float32 weights, the state's floats in the order of ``state_names``, and zeros
    up to a multiple of 16 bytes.
    """

    name: ClassVar[str]
    """Its name in stores and on the command line."""
    kind: ClassVar[int]
    """Its number in the native core."""
    state_names: ClassVar[tuple[str, ...]] = ()
    """Names of the state's parts, as torch.optim calls them, in their order in the row."""
    state_per_row: ClassVar[bool] = False
    """True when a part is one float per row, False when it is one per weight."""

    def __new__(cls, *args: Any, **given: Any) -> OptimizerSpec:
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        if len(args) > 1:
            raise ConfigError(f"{cls.name}: give {', '.join(known[1:])} by name; only lr goes by its place")
        for name in given:
            if name not in known:
                why = _NOT_SUPPORTED.get(name, f"it has {', '.join(known)}")
                raise ConfigError(f"{cls.name} has no {name}: {why}")
        return super().__new__(cls)

    def state_floats(self, dim: int) -> int:
        """Return the floats of state beside ``dim`` weights."""
        return len(self.state_names) * (1 if self.state_per_row else dim)

    def row_bytes(self, dim: int) -> int:
        """Return a row's bytes, a multiple of 16. ``ConfigError`` unless ``dim`` is an integer above 0."""
        if not is_integer(dim, 1):
            raise ConfigError(f"embedding_dim is {dim!r}; it must be a positive integer")
        return WIDE.row_bytes(dim, self.state_floats(dim))

    @property
    def initial_state(self) -> float:
        """Return the value of each float of the state of a row that was never updated."""
        return 0.0

    def state_columns(self, dim: int) -> dict[str, slice]:
        """Return which floats of a row belong to each named part of the state."""
        width = 1 if self.state_per_row else dim
        return {
            name: slice(dim + i * width, dim + (i + 1) * width) for i, name in enumerate(self.state_names)
        }

    def split_state(self, rows: Rows, dim: int) -> dict[str, Rows]:
        """Return views of the state's parts in ``rows`` by name: (n,) if one float per row, else (n, dim)."""
        columns: Any = {n: c.start if self.state_per_row else c for n, c in self.state_columns(dim).items()}
        return {name: rows[:, column] for name, column in columns.items()}  # type: ignore[index]

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters that may change during training, which a parameter group holds."""
        return {name: getattr(self, name) for name in self.changeable}

    @cached_property
    def changeable(self) -> list[str]:
        """Names of the hyperparameters that may change."""
        return [item.name for item in fields(self) if item.name not in self.identity]  # type: ignore[arg-type]

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings that stored rows depend on; they must be the same when a store is opened
        again."""
        return {"name": self.name}

    def to_dict(self) -> dict[str, Any]:
        """Return the specification in types that JSON has; :func:`from_dict` is the inverse."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]

    def step_args(self, step: int = 1, **changes: Any) -> OptimizerStep:
        """Return the native core's arguments for update number ``step`` (from 1).

        Hyperparameters in ``changes`` replace this object's. Raises ``ConfigError`` for a value that is no
        finite number, and for an unknown weight decay mode.
        """
        return OptimizerStep(**self.checked(**changes), step=step)

    def checked(self, **changes: Any) -> dict[str, Any]:
        """Return what :meth:`step_args` gives to the core beside the number of the update."""
        values = {**self.hyperparameters(), **changes}
        mode = self._decay_mode(values["weight_decay_mode"])
        lr, decay, eps = (self._number(name, values.get(name, 0.0)) for name in ("lr", "weight_decay", "eps"))
        beta1, beta2 = _betas(self.name, values["betas"]) if "betas" in values else (0.0, 0.0)
        decays = {"weight_decay": decay, "weight_decay_mode": mode if decay else 0}
        return {"kind": self.kind, "lr": lr, "eps": eps, "beta1": beta1, "beta2": beta2, **decays}

    def _decay_mode(self, mode: Any) -> int:
        if not isinstance(mode, str) or mode not in _DECAY_MODES:
            known = " or ".join(map(repr, _DECAY_MODES))
            raise ConfigError(f"{self.name}: weight_decay_mode is {mode!r}; it must be {known}")
        return _DECAY_MODES[mode]

    def _number(self, name: str, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, str | bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"{self.name}: {name} is {value!r}; it must be a finite number")
        return number

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if item.name not in ("betas", "weight_decay_mode"):
                object.__setattr__(self, item.name, self._not_negative(item.name, value))
        self._decay_mode(getattr(self, "weight_decay_mode", "l2"))

    def _not_negative(self, name: str, value: Any) -> float:
        number = self._number(name, value)
        if number < 0:
            raise ConfigError(f"{self.name}: {name} is {value!r}; it must be a finite number of at least 0")
        return number


@dataclass(frozen=True)
class SGD(OptimizerSpec):
    """``w -= lr * g``; no state.

    ``weight_decay_mode`` "l2" adds ``weight_decay * w`` to the gradient, "decoupled" multiplies the weights
    by ``1 - lr * weight_decay``. Either touches only the rows of a batch, when they are updated.
    """

    lr: float = 0.001
    _: KW_ONLY
    weight_decay: float = 0.0
    weight_decay_mode: str = "l2"

    name: ClassVar[str] = "sgd"
    kind: ClassVar[int] = 0


@dataclass(frozen=True)
class NotGiven(SGD):
    """Stands for the optimizer of tables that were built without one: rows without state, never updated."""


NOT_GIVEN = NotGiven()


@dataclass(frozen=True)
class _AdagradSpec(OptimizerSpec):
    lr: float = 0.01
    _: KW_ONLY
    eps: float = 1e-10
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    weight_decay_mode: str = "l2"

    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    @property
    def initial_state(self) -> float:
        return self.initial_accumulator_value

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "initial_accumulator_value": self.initial_accumulator_value}


@dataclass(frozen=True)
class RowWiseAdagrad(_AdagradSpec):
    """Adagrad with one sum per row: ``sum += mean(g^2); w -= lr / (sqrt(sum) + eps) * g``.

    The semantics, and defaults, of fbgemm's EXACT_ROWWISE_ADAGRAD; ``weight_decay_mode`` as for :class:`SGD`.
    """

    eps: float = 1e-8

    name: ClassVar[str] = "rowwise_adagrad"
    kind: ClassVar[int] = 1
    state_per_row: ClassVar[bool] = True


@dataclass(frozen=True)
class Adagrad(_AdagradSpec):
    """``sum += g^2; w -= lr * g / (sqrt(sum) + eps)`` per weight.

    torch.optim.Adagrad for the rows of a batch; ``weight_decay_mode`` as for :class:`SGD`. fbgemm's default
    ``eps`` is 1e-8.
    """

    name: ClassVar[str] = "adagrad"
    kind: ClassVar[int] = 2


@dataclass(frozen=True)
class Adam(OptimizerSpec):
    """Adam on the rows of a batch; bias correction counts the module's updates, not the row's, as in fbgemm.

    Weight decay is "l2" as in torch.optim.Adam; :class:`AdamW` and fbgemm's Adam have "decoupled" weight
    decay.
    """

    lr: float = 0.001
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    weight_decay_mode: str = "l2"

    name: ClassVar[str] = "adam"
    kind: ClassVar[int] = 3
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", _betas(self.name, self.betas))


def _betas(owner: str, value: Any) -> tuple[float, float]:
    try:
        beta1, beta2 = (float(beta) for beta in value)
    except (TypeError, ValueError):
        beta1 = beta2 = math.nan
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ConfigError(f"{owner}: betas is {value!r}; it must be two numbers in [0, 1)")
    return beta1, beta2


@dataclass(frozen=True)
class AdamW(Adam):
    """:class:`Adam` with decoupled weight decay: torch.optim.AdamW for the rows of a batch.

    Its rows are Adam's, so a store of one can be opened with the other optimizer.
    """

    weight_decay: float = 0.01
    weight_decay_mode: str = "decoupled"

    name: ClassVar[str] = "adamw"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay_mode != "decoupled":
            raise ConfigError(f"adamw: weight_decay_mode is {self.weight_decay_mode!r}; use Adam for that")

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": Adam.name}


OPTIMIZERS: dict[str, type[OptimizerSpec]] = {
    spec.name: spec for spec in (SGD, RowWiseAdagrad, Adagrad, Adam, AdamW)
}
"""Every optimizer by its name."""


def make(name: str, **hyperparameters: Any) -> OptimizerSpec:
    """Make the optimizer called ``name``. Raises ``ConfigError`` for an unknown name or hyperparameter."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {name!r}; known optimizers: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](**hyperparameters)


def from_dict(values: Mapping[str, Any]) -> OptimizerSpec:
    """Invert :meth:`OptimizerSpec.to_dict`. An identity alone gives the defaults for the rest."""
    rest = dict(values)
    name = rest.pop("name", None)
    if name is None:
        raise ConfigError(f"an optimizer needs a name; got {dict(values)!r}")
    return make(name, **rest)
