"""Fused optimizers as data: hyperparameters, state kept beside the weights, and what a store remembers.

The arithmetic is in ``csrc/kernels/optimizer.h``; it runs once per touched row in the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from tierstore.errors import ConfigError
from tierstore.optim.base import OptimizerSpec as OptimizerSpec
from tierstore.optim.base import checked_betas


@dataclass(frozen=True)
class SGD(OptimizerSpec):
    """``w -= lr * g``; no state. With ``momentum``, torch's: ``buf = momentum * buf + (1 - dampening) * g``,
    at the module's first update ``buf = g``; ``w -= lr * buf``, or ``lr * (g + momentum * buf)`` with
    ``nesterov``.

    Only rows of a batch change: the buffer of another row waits, and does not move its row, unlike that of a
    dense parameter. ``weight_decay_mode`` "l2" adds ``weight_decay * w`` to the gradient, "decoupled"
    multiplies the weights by ``1 - lr * weight_decay``. Either touches only the rows of a batch, when they
    are updated. "decoupled_global" is for all rows: the next update of a row multiplies the weights by
    ``(1 - lr * weight_decay) ** n`` for the ``n`` updates of the module that the row was not part of, with
    the ``lr`` of that update, and then decays as "decoupled". The row's state has the number of its last
    update. Until then lookups see the row without that decay.
    """

    lr: float = 0.001
    _: KW_ONLY
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    weight_decay_mode: str = "l2"

    name: ClassVar[str] = "sgd"
    kind: ClassVar[int] = 0

    def __new__(cls, *args: Any, **given: Any) -> SGD:
        kind = MomentumSGD if cls is SGD and given.get("momentum", 0) else cls
        made = super().__new__(kind, *args, **given)
        assert isinstance(made, SGD)
        return made

    def __post_init__(self) -> None:
        super().__post_init__()
        self.checked()

    def checked(self, **changes: Any) -> dict[str, Any]:
        found = super().checked(**changes)
        if changes.get("momentum", 0) and not self.own_state:
            raise ConfigError(
                f"sgd: momentum is {changes['momentum']!r}, and the rows have no momentum_buffer: build the "
                "tables with SGD(momentum=...), whose momentum may change, or keep schedules off it"
            )
        values = {**self.hyperparameters(), **changes}
        momentum, dampening = self._numbers(values, "momentum", "dampening")
        if not isinstance(values["nesterov"], bool):
            raise ConfigError(f"{self.name}: nesterov is {values['nesterov']!r}; it must be True or False")
        if values["nesterov"] and (momentum <= 0 or dampening != 0):
            raise ConfigError(f"{self.name}: nesterov needs a momentum above 0 and no dampening")
        return found


@dataclass(frozen=True)
class MomentumSGD(SGD):
    """What ``SGD(momentum=...)`` makes: SGD whose rows have a momentum buffer."""

    momentum: float = 0.9

    name: ClassVar[str] = "momentum_sgd"
    kind: ClassVar[int] = 4
    own_state: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.momentum:
            raise ConfigError("momentum_sgd: momentum is 0; use SGD without it")

    def checked(self, **changes: Any) -> dict[str, Any]:
        found, values = super().checked(**changes), {**self.hyperparameters(), **changes}
        momentum, dampening = self._numbers(values, "momentum", "dampening")
        return {**found, "kind": 5 if values["nesterov"] else 4, "beta1": momentum, "beta2": dampening}


@dataclass(frozen=True)
class LarsSGD(OptimizerSpec):
    """SGD whose steps are in proportion to the row's norm: fbgemm's LARS_SGD.

    ``rate = lr * eta * |w| / (|g| + weight_decay * |w|)``,
    ``buf = momentum * buf + rate * (g + weight_decay * w)``, ``w -= buf``. ``|x|`` is the norm of the row;
    where ``|w|`` or the divisor is 0, the quotient is 1, so that rows of zeros learn (fbgemm: 0, or NaN).
    """

    lr: float = 0.01
    _: KW_ONLY
    momentum: float = 0.9
    eta: float = 0.001
    weight_decay: float = 0.0

    name: ClassVar[str] = "lars_sgd"
    kind: ClassVar[int] = 6
    own_state: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    needs_whole_rows: ClassVar[bool] = True

    def checked(self, **changes: Any) -> dict[str, Any]:
        found, values = super().checked(**changes), {**self.hyperparameters(), **changes}
        momentum, eta = self._numbers(values, "momentum", "eta")
        return {**found, "lr": found["lr"] * eta, "beta1": momentum}


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

    own_state: ClassVar[tuple[str, ...]] = ("sum",)

    @property
    def initial_state(self) -> float:
        return self.initial_accumulator_value

    @property
    def identity(self) -> dict[str, Any]:
        return {**super().identity, "initial_accumulator_value": self.initial_accumulator_value}


@dataclass(frozen=True)
class RowWiseAdagrad(_AdagradSpec):
    """Adagrad with one sum per row: ``sum += mean(g^2); w -= lr / (sqrt(sum) + eps) * g``.

    The semantics and defaults are fbgemm's (EXACT_ROWWISE_ADAGRAD); ``weight_decay_mode`` as for
    :class:`SGD`.
    """

    eps: float = 1e-8

    name: ClassVar[str] = "rowwise_adagrad"
    kind: ClassVar[int] = 1
    own_per_row: ClassVar[tuple[str, ...]] = ("sum",)
    needs_mean_square: ClassVar[bool] = True


@dataclass(frozen=True)
class Adagrad(_AdagradSpec):
    """``sum += g^2; w -= lr * g / (sqrt(sum) + eps)`` per weight.

    This is torch.optim.Adagrad for the rows of a batch; ``weight_decay_mode`` as for :class:`SGD`. fbgemm's
    default ``eps`` is 1e-8.
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
    own_state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", checked_betas(self.name, self.betas))


@dataclass(frozen=True)
class AdamW(Adam):
    """:class:`Adam` with decoupled weight decay: torch.optim.AdamW for the rows of a batch.

    The rows of both optimizers are alike, so a store of one can be opened with the other optimizer.
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


@dataclass(frozen=True)
class PartialRowWiseAdam(Adam):
    """:class:`Adam` with one ``exp_avg_sq`` per row, of the mean of ``g^2``: fbgemm's PARTIAL_ROWWISE_ADAM.

    Weight decay is decoupled, as in fbgemm.
    """

    lr: float = 0.01
    weight_decay_mode: str = "decoupled"

    name: ClassVar[str] = "partial_rowwise_adam"
    kind: ClassVar[int] = 8
    own_per_row: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    needs_mean_square: ClassVar[bool] = True


@dataclass(frozen=True)
class LAMB(OptimizerSpec):
    """Adam whose steps are in proportion to the row's norm: fbgemm's LAMB.

    ``u`` is what :class:`Adam` takes off the weights, without ``lr``, plus ``weight_decay * w``;
    ``w -= lr * |w| / |u| * u``. ``|x|`` is the norm of the row; where one is 0, the quotient is 1, so that
    rows of zeros learn (fbgemm: 0, or NaN).
    """

    lr: float = 0.01
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    name: ClassVar[str] = "lamb"
    kind: ClassVar[int] = 7
    own_state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    needs_whole_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "betas", checked_betas(self.name, self.betas))


@dataclass(frozen=True)
class PartialRowWiseLAMB(LAMB):
    """:class:`LAMB` with one ``exp_avg_sq`` per row, of the mean of ``g^2``: fbgemm's
    PARTIAL_ROWWISE_LAMB."""

    name: ClassVar[str] = "partial_rowwise_lamb"
    kind: ClassVar[int] = 9
    own_per_row: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)


OPTIMIZERS: dict[str, type[OptimizerSpec]] = {
    spec.name: spec
    for spec in (
        *(SGD, MomentumSGD, LarsSGD, RowWiseAdagrad, Adagrad),
        *(Adam, AdamW, PartialRowWiseAdam, LAMB, PartialRowWiseLAMB),
    )
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
