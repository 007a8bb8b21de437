"""What all fused optimizers have in common: hyperparameters, and state kept beside the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierstore._core import OptimizerStep
from tierstore.config import is_integer
from tierstore.errors import ConfigError
from tierstore.row_format import WIDE

GLOBAL = "decoupled_global"
"""The weight decay mode of all rows."""
LAST_UPDATE = "last_update"
"""The part of the state that has the number of a row's last update."""
_DECAY_MODES = {"l2": 1, "decoupled": 2, GLOBAL: 2}

_KERNELS = "the backward pass applies the optimizer by kernels of its own; leave it out"
_NOT_SUPPORTED = {
    **dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), _KERNELS),
    "lr_decay": "use a schedule of torch.optim.lr_scheduler on the module's fused_optimizer",
    "amsgrad": "rows keep no maximum of exp_avg_sq; leave it out",
    "maximize": "negate the loss",
    "decoupled_weight_decay": "use AdamW",
}
"""Arguments of torch's optimizers that are not supported here, and what to do instead."""

_CLIPS = ("clip_grad_norm", "clip_grad_value")
_NOT_NUMBERS = {"betas", "weight_decay_mode", "nesterov"}

Rows = TypeVar("Rows")
"""A NumPy array or tensor, float32 (n, row_bytes / 4)."""


@dataclass(frozen=True)
class OptimizerSpec:
    """Base of the optimizers, which are frozen dataclasses of their hyperparameters.

    An optimizer of torch.optim's name has torch's hyperparameters and defaults. All but ``lr`` are given by
    name, because torch has more hyperparameters; an unsupported one raises ``ConfigError``.

    Every optimizer clips the gradient of each row, summed over the batch, before it is used: to values from
    ``-clip_grad_value`` to ``clip_grad_value``, and then to the norm ``clip_grad_norm``, by the formulas of
    ``torch.nn.utils.clip_grad_value_`` and ``clip_grad_norm_``. None: not.

    A row is ``embedding_dim`` float32 weights, the state's floats in the order of ``state_names``, and zeros
    up to a multiple of 16 bytes.
    """

    name: ClassVar[str]
    """Its name in stores and on the command line."""
    kind: ClassVar[int]
    """Its number in the native core."""
    own_state: ClassVar[tuple[str, ...]] = ()
    """Names of the state's parts, as torch.optim calls them, in their order in the row, but for the last
    update's number."""
    own_per_row: ClassVar[tuple[str, ...]] = ()
    """Those of them that are one float per row."""
    needs_mean_square: ClassVar[bool] = False
    """Whether an update needs the mean square of the gradient over all columns of a row."""
    needs_whole_rows: ClassVar[bool] = False
    """Whether an update needs all columns of a row for another reason: no shard may have only some."""

    clip_grad_norm: float | None = field(default=None, kw_only=True)
    clip_grad_value: float | None = field(default=None, kw_only=True)

    def __new__(cls, *args: Any, **given: Any) -> OptimizerSpec:
        known = sorted((item.name for item in fields(cls)), key=lambda name: name in _CLIPS)
        if len(args) > 1:
            raise ConfigError(f"{cls.name}: give {', '.join(known[1:])} by name; only lr goes by its place")
        for name in given:
            if name not in known:
                why = _NOT_SUPPORTED.get(name, f"it has {', '.join(known)}")
                raise ConfigError(f"{cls.name} has no {name}: {why}")
        return super().__new__(cls)

    @property
    def decays_all(self) -> bool:
        """Whether rows decay for updates that they were not part of."""
        return getattr(self, "weight_decay_mode", "") == GLOBAL

    @property
    def planned_name(self) -> str:
        """The name by which the planner knows the bytes of the state."""
        return f"{self.name}:{GLOBAL}" if self.decays_all else self.name

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state's parts, in their order in the row."""
        return (*self.own_state, LAST_UPDATE) if self.decays_all else self.own_state

    @property
    def per_row(self) -> tuple[str, ...]:
        """Names of the parts that are one float per row; the other parts are one per weight."""
        return (*self.own_per_row, LAST_UPDATE) if self.decays_all else self.own_per_row

    def state_floats(self, dim: int) -> int:
        """Return the floats of state beside ``dim`` weights."""
        return sum(self.width(name, dim) for name in self.state_names)

    def width(self, name: str, dim: int) -> int:
        """Return the floats of a part of the state beside ``dim`` weights."""
        return 1 if name in self.per_row else dim

    def state_shape(self, name: str, rows: int, dim: int) -> tuple[int, ...]:
        """Return the shape of a part of the state of so many rows: (rows,) or (rows, dim)."""
        return (rows,) if name in self.per_row else (rows, dim)

    def row_bytes(self, dim: int) -> int:
        """Return a row's bytes, a multiple of 16. ``ConfigError`` unless ``dim`` is an integer above 0."""
        if not is_integer(dim, 1):
            raise ConfigError(f"embedding_dim is {dim!r}; it must be a positive integer")
        return WIDE.row_bytes(dim, self.state_floats(dim))

    @property
    def initial_state(self) -> float:
        """Return the value of each float of the state of a row that was never updated, but for the number of
        its last update, which is 0."""
        return 0.0

    def state_columns(self, dim: int) -> dict[str, slice]:
        """Return which floats of a row belong to each named part of the state."""
        found, begin = {}, dim
        for name in self.state_names:
            found[name] = slice(begin, begin + self.width(name, dim))
            begin = found[name].stop
        return found

    def cut_state(self, state: NDArray[np.float32], dim: int, columns: slice) -> NDArray[np.float32]:
        """Return the state (n, floats) of so many columns of rows, from that of all ``dim`` columns."""
        parts = [np.empty((len(state), 0), np.float32)]
        for name, place in self.state_columns(dim).items():
            part = state[:, place.start - dim : place.stop - dim]
            parts.append(part if name in self.per_row else part[:, columns])
        return np.concatenate(parts, axis=1)

    def split_state(self, rows: Rows, dim: int) -> dict[str, Rows]:
        """Return views of the state's parts in ``rows`` by name: (n,) if one float per row, else (n, dim)."""
        columns: Any = {n: c.start if n in self.per_row else c for n, c in self.state_columns(dim).items()}
        return {name: rows[:, column] for name, column in columns.items()}  # type: ignore[index]

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters that may change during training, which a parameter group holds."""
        return {name: getattr(self, name) for name in self.changeable}

    @cached_property
    def changeable(self) -> list[str]:
        """Names of the hyperparameters that may change."""
        return [item.name for item in fields(self) if item.name not in self.identity]

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings that stored rows depend on; they must be the same when a store is opened
        again."""
        return {"name": self.name, **({"weight_decay_mode": GLOBAL} if self.decays_all else {})}

    def to_dict(self) -> dict[str, Any]:
        """Return the specification in types that JSON has; :func:`from_dict` is the inverse."""
        return {"name": self.name, **asdict(self)}

    def step_args(self, step: int = 1, **changes: Any) -> OptimizerStep:
        """Return the native core's arguments for update number ``step`` (from 1).

        Hyperparameters in ``changes`` replace this object's. Raises ``ConfigError`` for a value that is no
        finite number, and for an unknown weight decay mode.
        """
        return made_step(self.checked(**changes), step)

    def checked(self, **changes: Any) -> dict[str, Any]:
        """Return what :func:`made_step` takes beside the number of the update."""
        values = {**self.hyperparameters(), **changes}
        mode = self._decay_mode(values.get("weight_decay_mode", GLOBAL if self.decays_all else "l2"))
        lr, decay, eps = (self._number(name, values.get(name, 0.0)) for name in ("lr", "weight_decay", "eps"))
        beta1, beta2 = checked_betas(self.name, values["betas"]) if "betas" in values else (0.0, 0.0)
        decays = {"weight_decay": decay, "weight_decay_mode": mode if decay else 0}
        limits = {"norm": values["clip_grad_norm"], "value": values["clip_grad_value"]}
        clip = {name: self._limit(f"clip_grad_{name}", limit) for name, limit in limits.items()}
        found = {"kind": self.kind, "lr": lr, "eps": eps, "beta1": beta1, "beta2": beta2, **decays}
        if not self.decays_all:
            return {**found, "clip": clip}
        return {**found, "clip": clip, "keep_missed": 1.0 - lr * decay}

    def _decay_mode(self, mode: Any) -> int:
        if (mode == GLOBAL) != self.decays_all and isinstance(mode, str) and mode in _DECAY_MODES:
            raise ConfigError(
                f"{self.name}: weight_decay_mode is {mode!r}; build the tables with it, since their rows "
                f"{'have' if self.decays_all else 'lack'} the number of their last update"
            )
        if not isinstance(mode, str) or mode not in _DECAY_MODES:
            known = ", ".join(map(repr, _DECAY_MODES))
            raise ConfigError(f"{self.name}: weight_decay_mode is {mode!r}; it must be one of {known}")
        return _DECAY_MODES[mode]

    def _numbers(self, values: Mapping[str, Any], *names: str) -> Iterator[float]:
        return (self._number(name, values[name]) for name in names)

    def _number(self, name: str, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, str | bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"{self.name}: {name} is {value!r}; it must be a finite number")
        return number

    def _limit(self, name: str, value: Any) -> float:
        """Return a limit of gradients; infinity for None."""
        limit = math.inf if value is None else self._number(name, value)
        if limit <= 0:
            raise ConfigError(f"{self.name}: {name} is {value!r}; it must be above 0, or None")
        return limit

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _CLIPS:
                limit = self._limit(item.name, value)
                object.__setattr__(self, item.name, None if value is None else limit)
            elif item.name not in _NOT_NUMBERS:
                object.__setattr__(self, item.name, self._not_negative(item.name, value))
        if hasattr(self, "weight_decay_mode"):
            self._decay_mode(self.weight_decay_mode)

    def _not_negative(self, name: str, value: Any) -> float:
        number = self._number(name, value)
        if number < 0:
            raise ConfigError(f"{self.name}: {name} is {value!r}; it must be a finite number of at least 0")
        return number


def made_step(checked: Mapping[str, Any], step: int) -> OptimizerStep:
    """Return the native core's arguments for update number ``step`` with these checked hyperparameters."""
    rest = dict(checked)
    clip, missed = rest.pop("clip"), rest.pop("keep_missed", None)
    made = OptimizerStep(**rest, step=step)
    if not all(map(math.isinf, clip.values())):
        made = made.clipped(**clip)
    return made if missed is None else made.decaying_all(missed)


def checked_betas(owner: str, value: Any) -> tuple[float, float]:
    """Return betas as floats. Raises ``ConfigError`` unless they are two numbers in [0, 1)."""
    try:
        beta1, beta2 = (float(beta) for beta in value)
    except (TypeError, ValueError):
        beta1 = beta2 = math.nan
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ConfigError(f"{owner}: betas is {value!r}; it must be two numbers in [0, 1)")
    return beta1, beta2
