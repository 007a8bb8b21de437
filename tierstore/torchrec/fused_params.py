"""The ``fused_params`` of torchrec's sharders: an optimizer in fbgemm's words, and demands on all tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from tierstore import optim
from tierstore.errors import ConfigError
from tierstore.optim import OptimizerSpec
from tierstore.optim.tables import REST, Optimizers
from tierstore.planner.constraints import bounds_check_of

_OPTIMIZERS: dict[str, type[OptimizerSpec]] = {
    "sgd": optim.SGD,
    "exact_sgd": optim.SGD,
    "adam": optim.Adam,
    "exact_adagrad": optim.Adagrad,
    "exact_row_wise_adagrad": optim.RowWiseAdagrad,
    "row_wise_adagrad": optim.RowWiseAdagrad,
    "lamb": optim.LAMB,
    "lars_sgd": optim.LarsSGD,
    "partial_row_wise_adam": optim.PartialRowWiseAdam,
    "partial_row_wise_lamb": optim.PartialRowWiseLAMB,
}
"""Ours by the values of fbgemm's EmbOptimType."""
_DECAY_MODES = {"NONE": None, "L2": "l2", "DECOUPLE": "decoupled"}
_OF_LARS = ("momentum", "eta")
_HYPERPARAMETERS = (
    *("learning_rate", "eps", "beta1", "beta2", "weight_decay", "weight_decay_mode"),
    *_OF_LARS,
)
_DECAY_OF_THEIR_OWN = optim.LAMB, optim.LarsSGD, optim.PartialRowWiseAdam
"""Optimizers, and those made of them, whose weight decay has one form, whatever the mode."""
_EPS = 1e-8
"""fbgemm's default, which scripts of torchrec count on."""


@dataclass(frozen=True)
class FusedParams:
    """What ``fused_params`` say. ``demands``: fields of ParameterConstraints, for every table.

    ``optimizer`` may be a dict of fbgemm's optimizers, or of tierstore's, by the names of tables; "*" is for
    all other tables.
    """

    optimizer: Optimizers = None
    demands: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> FusedParams:
        """Read them. Raises ConfigError for what tiers cannot honour."""
        given = dict(given or {})
        hyper = {name: given.pop(name) for name in ("optimizer", *_HYPERPARAMETERS) if name in given}
        demands: dict[str, Any] = {}
        for name, value in given.items():
            if name not in _DEMANDS:
                known = ", ".join(["optimizer", *_HYPERPARAMETERS, *_DEMANDS])
                raise ConfigError(
                    f"fused_params: {name} has no counterpart in tiers; leave it out, or use {known}"
                )
            demands |= _DEMANDS[name](value)
        return cls(_optimizer(hyper), demands)

    def tables_named(self) -> list[str]:
        """Return the tables that have an optimizer of their own."""
        each = self.optimizer if isinstance(self.optimizer, Mapping) else {}
        return [name for name in each if name != REST]

    def optimizer_of(self, tables: Sequence[str]) -> Optimizers:
        """Return the optimizer of a collection's ``tables``, by table where these have their own."""
        if not isinstance(self.optimizer, Mapping):
            return self.optimizer
        return {name: spec for name, spec in self.optimizer.items() if name in tables or name == REST}


def _optimizer(given: Mapping[str, Any]) -> Optimizers:
    each = given.get("optimizer")
    if isinstance(each, Mapping):  # torchrec has no such thing; its optimizers by table are applied ones
        rest = {name: value for name, value in given.items() if name != "optimizer"}
        return {name: _optimizer_of_table(one, rest) for name, one in each.items()}
    return _one_optimizer(given)


def _optimizer_of_table(given: Any, rest: Mapping[str, Any]) -> OptimizerSpec | None:
    if given is None or isinstance(given, OptimizerSpec):
        return given
    return _one_optimizer({**rest, "optimizer": given})


def _one_optimizer(given: Mapping[str, Any]) -> OptimizerSpec | None:
    if "optimizer" not in given:
        if given:
            raise ConfigError(
                f"fused_params have {', '.join(given)} and no optimizer; give optimizer=EmbOptimType..."
            )
        return None
    name = str(getattr(given["optimizer"], "value", given["optimizer"]))
    kind = _OPTIMIZERS.get(name)
    if kind is None:
        known = ", ".join(_OPTIMIZERS)
        raise ConfigError(f"fused_params: there is no fused {name}; use an EmbOptimType of {known}")
    names = {item.name for item in fields(kind)}
    options: dict[str, Any] = {"lr": given.get("learning_rate", 0.01)}
    if "eps" in names:
        options["eps"] = given.get("eps", _EPS)
    if "betas" in names:
        options["betas"] = (given.get("beta1", 0.9), given.get("beta2", 0.999))
    of_lars = {item: given[item] for item in _OF_LARS if item in given}
    if of_lars and kind is not optim.LarsSGD:
        raise ConfigError(
            f"fused_params: {', '.join(of_lars)} without effect in fbgemm's {name}; leave it out, or use "
            'optimizer={"*": tierstore.optim.SGD(momentum=...)}'
        )
    return _decaying(kind, options | of_lars, given)


def _decaying(kind: type[OptimizerSpec], options: dict[str, Any], given: Mapping[str, Any]) -> OptimizerSpec:
    """Return the optimizer with fbgemm's weight decay: that of its Adam is decoupled, whatever the mode."""
    decay, mode = given.get("weight_decay", 0.0), given.get("weight_decay_mode")
    chosen = "NONE" if mode is None else str(getattr(mode, "name", mode)).upper()
    if chosen not in _DECAY_MODES:
        raise ConfigError(
            f"fused_params: weight_decay_mode is {mode!r}; use one of {', '.join(_DECAY_MODES)}"
        )
    if kind is optim.Adam:
        return optim.AdamW(**options, weight_decay=decay) if decay else optim.Adam(**options)
    if issubclass(kind, _DECAY_OF_THEIR_OWN):
        return kind(**options, weight_decay=decay)
    if decay and chosen == "NONE":
        raise ConfigError(
            "fused_params: weight_decay has no effect in fbgemm without a weight_decay_mode; give "
            "WeightDecayMode.L2 or DECOUPLE, or leave weight_decay out"
        )
    if decay:
        options |= {"weight_decay": decay, "weight_decay_mode": _DECAY_MODES[chosen]}
    return kind(**options)


def _load_factor(value: Any) -> dict[str, Any]:
    return {} if value is None else {"hbm_load_factor": value}


def _in_hbm(value: Any) -> dict[str, Any]:
    return {"tiers": ("hbm",)} if value else {}


def _rounding(value: Any) -> dict[str, Any]:
    return {} if value is None else {"stochastic_rounding": value}


def _float32(value: Any) -> dict[str, Any]:
    plain = value.name if isinstance(value, Enum) else str(value)
    if plain not in ("FP32", "torch.float32"):
        raise ConfigError(f"fused_params: output_dtype is {value!r}; outputs are float32, so leave it out")
    return {}


def _bounds_check(value: Any) -> dict[str, Any]:
    return {} if value is None else {"bounds_check": bounds_check_of(value, "fused_params")}


_DEMANDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "bounds_check_mode": _bounds_check,
    "cache_load_factor": _load_factor,
    "enforce_hbm": _in_hbm,
    "stochastic_rounding": _rounding,
    "output_dtype": _float32,
    "prefetch_pipeline": lambda value: {},  # which pipeline fetches ahead is the script's choice
}
"""Demands by the name of a fused parameter."""
