"""The optimizers that torch's or torchrec's ``apply_optimizer_in_backward`` gave the parameters of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from torch import Tensor

from tierstore import optim
from tierstore.errors import ConfigError
from tierstore.optim import OptimizerSpec

APPLIED = "_in_backward_optimizers"
"""Where ``apply_optimizer_in_backward`` leaves the optimizers of a parameter."""
_OPTIONS = "_optimizer_kwargs"
_OURS = {"learning_rate": "lr"}
_BETAS = {"beta1": 0.9, "beta2": 0.999}
"""What fbgemm calls otherwise. Its optimizers without betas take them, too, without any effect."""
_KNOWN = ", ".join(s.__name__ for s in optim.OPTIMIZERS.values() if s.__name__ in optim.__all__)


def applied_to(parameter: Tensor) -> list[object]:
    """Return the optimizers that were applied to a parameter."""
    return list(getattr(parameter, APPLIED, ()))


def applied_optimizer(
    parameters: Sequence[Tensor], tables: Sequence[str]
) -> OptimizerSpec | dict[str, OptimizerSpec] | None:
    """Return the optimizer that was applied to all of ``parameters``, those of ``tables``; one by the name of
    each table where they differ; None if none was.

    Raises ConfigError for an optimizer that is none of ours, and where only some tables have one.
    """
    pairs = zip(parameters, tables, strict=True)
    found = {name: spec for parameter, name in pairs if (spec := _applied(parameter, name)) is not None}
    if not found:
        return None
    if missing := [name for name in tables if name not in found]:
        raise ConfigError(
            f"apply_optimizer_in_backward gave tables {list(found)} an optimizer and tables {missing} none; "
            "give them one, or freeze them in a collection of their own"
        )
    first = next(iter(found.values()))
    return first if all(spec == first for spec in found.values()) else found


def _applied(parameter: Tensor, table: str) -> OptimizerSpec | None:
    applied = applied_to(parameter)
    if len(applied) > 1:
        names = ", ".join(type(optimizer).__name__ for optimizer in applied)
        raise ConfigError(
            f"apply_optimizer_in_backward gave table {table!r} {len(applied)} optimizers: {names}; give it "
            "one"
        )
    if not applied:
        return None
    kind, options = type(applied[0]), getattr(parameter, _OPTIONS)[0]
    name = kind.__name__
    if kind.__module__.startswith("torchrec."):
        name, options = _of_fbgemm(name, options)
    return spec_of(f"table {table!r}", name, options)


def _of_fbgemm(kind: str, options: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """Return our optimizer and its options for a class of torchrec's, which stands for fbgemm's optimizer:
    torchrec hands the options on, so their names and what they leave out are fbgemm's."""
    known = {item.name for item in fields(getattr(optim, kind))} if kind in optim.__all__ else set()
    ours = {_OURS.get(name, name): value for name, value in options.items() if name not in _BETAS}
    betas = tuple(options.get(name, beta) for name, beta in _BETAS.items())
    defaults: dict[str, object] = {"lr": 0.01, "eps": 1e-8, "betas": betas}
    ours = {name: value for name, value in defaults.items() if name in known} | ours
    if "weight_decay_mode" in ours:
        mode = str(getattr(ours["weight_decay_mode"], "name", ours["weight_decay_mode"]))
        ours["weight_decay_mode"] = {"L2": "l2", "DECOUPLE": "decoupled"}.get(mode, mode)
    return "AdamW" if kind == "Adam" and ours.get("weight_decay") else kind, ours


def spec_of(whose: str, kind: str, options: Mapping[str, object]) -> OptimizerSpec:
    """Return our optimizer called ``kind``, as torch's and torchrec's classes are, with ``options``.

    Raises ConfigError, which says ``whose`` it is, where we have no such optimizer, or none with ``options``.
    """
    spec = getattr(optim, kind, None)
    if not (isinstance(spec, type) and issubclass(spec, OptimizerSpec)):
        raise ConfigError(f"{whose}: there is no fused {kind}; use one of {_KNOWN}")
    try:
        return spec(**options)  # type: ignore[arg-type]
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{whose}: {kind} with {dict(options)} cannot be fused: {error}") from None


def refuse_applied(parameter: Tensor, table: str, adopted: Sequence[object]) -> None:
    """Raise ConfigError if a table that has its rows was given an optimizer, other than those ``adopted``."""
    applied = applied_to(parameter)
    if applied and not any(applied[-1] is one for one in adopted):
        kind, options = type(applied[-1]).__name__, dict(getattr(parameter, _OPTIONS)[-1])
        raise ConfigError(
            f"apply_optimizer_in_backward gave table {table!r} a {kind}, but the layout of rows is fixed "
            f"when tables are built: leave it out, and build them with {_given_as(kind, options)}"
        )


def _given_as(kind: str, options: dict[str, object]) -> str:
    """Return the argument that gives our optimizer the same settings."""
    spec = getattr(optim, kind, None)
    if isinstance(spec, type) and issubclass(spec, OptimizerSpec):
        try:
            spec(**options)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return f"optimizer=tierstore.optim.{kind}(...), which does not have all of {options}"
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"optimizer=tierstore.optim.{kind}({given})"
    return f"optimizer=, one of tierstore.optim: {_KNOWN}"
