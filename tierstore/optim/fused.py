"""A torch.optim.Optimizer over rows that the backward pass has already updated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from tierstore._core import OptimizerStep
from tierstore.errors import ConfigError
from tierstore.optim.specs import NotGiven, OptimizerSpec


def _is_plain(value: object) -> bool:
    """Return whether a hyperparameter is of a type that has one value for ever, and is compared by it."""
    kind = type(value)
    if isinstance(value, tuple):
        return kind is tuple and all(type(one) is float for one in value)
    return kind is float or kind is str


class AppliedOptimizer(torch.optim.Optimizer):
    """An optimizer that the backward passes apply: ``step()`` and ``zero_grad()`` do nothing."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run ``closure`` if there is one; the backward pass has already updated the rows."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, since gradients of rows are never kept."""


class RowStates(Protocol):
    """Reads and writes the state of the rows for a fused optimizer."""

    def save(self, num_updates: int) -> dict[str, dict[str, torch.Tensor]]: ...

    def load(self, state: Mapping[str, Mapping[str, Any]], num_updates: int) -> None: ...


class FusedOptimizer(AppliedOptimizer):
    """Hyperparameters and update count of a module whose backward pass applies the optimizer.

    ``param_groups[0]`` is read at every backward pass, so learning-rate schedulers and direct assignments
    work; ``step()`` and ``zero_grad()`` do nothing. The rows hold the optimizer's state, so that commits have
    it; ``state_dict()`` has copies of it.

    ``parameters`` is what the parameter group shows; without any, an empty placeholder.
    """

    rows: RowStates | None = None
    """The rows that it updates; None in a copy, which has only hyperparameters and the update count."""
    _known: tuple[list[object], dict[str, Any]] | None = None
    """The hyperparameters of the last step, if they cannot change in place, and their checked values."""

    def __init__(self, spec: OptimizerSpec, parameters: Iterable[torch.Tensor] = ()) -> None:
        self.spec = spec
        self.num_updates = 0
        """Backward passes that updated rows so far; Adam's bias correction counts these."""
        shown = list(parameters) or [torch.empty(0)]
        super().__init__(shown, spec.hyperparameters())

    def advance(self) -> OptimizerStep:
        """Count one update and return the native core's arguments for it. The backward pass calls this."""
        step = self.step_args(self.num_updates + 1)
        self.num_updates += 1
        # torch's schedulers read this to tell that an update came before them.
        self._opt_called = True
        return step

    def step_args(self, step: int) -> OptimizerStep:
        """Return the native core's arguments for update number ``step``, with the present hyperparameters.

        Raises ``ConfigError`` for a hyperparameter that cannot be used, and for tables without an optimizer.
        """
        if isinstance(self.spec, NotGiven):
            raise ConfigError(
                "these tables were built without an optimizer, and the backward pass is what applies it: "
                "build them with optimizer=tierstore.optim.Adagrad(lr=...) or another of tierstore.optim, or "
                "with optimizer=None to freeze them"
            )
        group, names = self.param_groups[0], self.spec.changeable
        values = [group[name] for name in names]
        if not all(map(_is_plain, values)):
            return self.spec.step_args(step, **dict(zip(names, values, strict=True)))
        known = self._known
        if known is None or known[0] != values:
            known = self._known = values, self.spec.checked(**dict(zip(names, values, strict=True)))
        return OptimizerStep(**known[1], step=step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ConfigError(
                "a fused optimizer has one parameter group; give other parameters an optimizer of their own"
            )
        # torch's decorator would import all of torch.compile, for seconds, only to keep out of its way.
        undecorated = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
        (undecorated or torch.optim.Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"state": {weight: {"<table>.<part>": tensor}}, "param_groups", "name", "num_updates"}``.

        The parts are torch's (``sum``, ``exp_avg`` ..), dense over all rows, and ``step``. A table of more
        than 1 GiB has a mark instead. Within ``without_rows()`` no table has parts. All ranks of sharded
        tables must call this.
        """
        found = super().state_dict()
        if self.rows is not None and (state := self.rows.save(self.num_updates)):
            found["state"] = state
            found["param_groups"][0]["params"] = list(state)
        return {**found, "name": self.spec.name, "num_updates": self.num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned.

        Raises ``ConfigError`` for the state of another optimizer or of other tables, and where the rows'
        state is missing. Raises ``StoreMismatchError`` where that state was left out and the rows have
        changed since.
        """
        state = dict(state_dict)
        name, num_updates = state.pop("name", None), state.pop("num_updates", None)
        if name != self.spec.name or not isinstance(num_updates, int):
            raise ConfigError(
                f"this is not the state of a fused {self.spec.name} optimizer (but of {name!r})"
            )
        of_rows = state["state"]
        if self.rows is not None:
            self.rows.load(of_rows, num_updates)
        elif of_rows:
            raise ConfigError(
                "this optimizer is a copy without rows; load the state of rows into the module's own"
            )
        # what the group shows differs between sharded and unsharded tables
        shown = list(range(len(self.param_groups[0]["params"])))
        groups = [{**group, "params": shown} for group in state["param_groups"]]
        super().load_state_dict({**state, "state": {}, "param_groups": groups})
        self.num_updates = num_updates

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "spec": self.spec, "num_updates": self.num_updates}
