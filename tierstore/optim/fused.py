"""A torch.optim.Optimizer over rows that the backward pass has already updated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from tierstore._core import OptimizerStep
from tierstore.errors import ConfigError
from tierstore.optim.base import made_step
from tierstore.optim.specs import SGD, NotGiven, OptimizerSpec
from tierstore.optim.tables import TableGroup


def _is_plain(value: object) -> bool:
    """Return whether a hyperparameter is of a type that has one value for ever, and is compared by it."""
    kind = type(value)
    if isinstance(value, tuple):
        return kind is tuple and all(type(one) is float for one in value)
    return kind is float or kind is str or kind is bool or value is None


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


Steps: TypeAlias = list[tuple[OptimizerStep, tuple[str, ...] | None]]
"""The native core's arguments for one update, and the tables that they are for; None: all tables."""


class FusedOptimizer(AppliedOptimizer):
    """Hyperparameters and update count of a module whose backward pass applies the optimizer.

    ``param_groups`` are read at every backward pass, so learning-rate schedulers and direct assignments work;
    ``step()`` and ``zero_grad()`` do nothing. There is one group, or one for each entry of a dict of
    optimizers by table, whose ``"tables"`` are the tables' names. The rows hold the optimizer's state, so
    that commits have it; ``state_dict()`` has copies of it.

    ``parameters`` is what the first parameter group shows; without any, an empty placeholder.
    """

    rows: RowStates | None = None
    """The rows that it updates; None in a copy, which has only hyperparameters and the update count."""

    def __init__(
        self, spec: OptimizerSpec | Sequence[TableGroup], parameters: Iterable[torch.Tensor] = ()
    ) -> None:
        self.groups = [TableGroup(spec, ())] if isinstance(spec, OptimizerSpec) else list(spec)
        self.spec = self.groups[0].spec
        """The optimizer of the first group."""
        self.updating = threading.RLock()
        """Held from where an update gets its number until it is counted."""
        self.num_updates = 0
        """Backward passes that updated rows so far; Adam's bias correction counts these."""
        self._known: list[tuple[list[object], dict[str, Any]] | None] = [None] * len(self.groups)
        """By group, the hyperparameters of the last step, if they cannot change in place, and their checked
        values."""
        shown: list[dict[str, Any]] = [
            {"params": [torch.empty(0, dtype=torch.float32, device="cpu")], **group.spec.hyperparameters()}
            for group in self.groups
        ]
        shown[0]["params"] = list(parameters) or shown[0]["params"]
        if len(shown) > 1:
            for one, group in zip(shown, self.groups, strict=True):
                one["tables"] = list(group.tables)
        common = set.intersection(*(set(group.spec.changeable) for group in self.groups))
        defaults = self.spec.hyperparameters()
        super().__init__(shown, {name: defaults[name] for name in defaults if name in common})

    def spec_of(self, table: str) -> OptimizerSpec:
        """Return the optimizer of a table; that of rows without state for a table that is frozen."""
        return next((g.spec for g in self.groups if not g.tables or table in g.tables), SGD())

    def next_step(self) -> tuple[Steps, partial[None]]:
        """Return what :meth:`step_args` gives for the next update, and a native call that counts it."""
        count = self.num_updates + 1
        steps = self.step_args(count)
        # torch's schedulers read this to tell that an update came before them.
        self._opt_called = True
        return steps, partial(setattr, self, "num_updates", count)

    def step_args(self, step: int) -> Steps:
        """Return the native core's arguments for update number ``step``, with the present hyperparameters.
        Tables whose arguments are equal share them.

        Raises ``ConfigError`` for a hyperparameter that cannot be used, and for tables without an optimizer.
        """
        found: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        for number, group in enumerate(self.groups):
            values, tables = self._values(number), group.tables
            for index, (others, named) in enumerate(found):
                if others == values:
                    found[index] = values, named + tables
                    break
            else:
                found.append((values, tables))
        if len(found) == 1:
            return [(made_step(found[0][0], step), None)]
        return [(made_step(values, step), tables) for values, tables in found]

    def _values(self, number: int) -> dict[str, Any]:
        """Return the checked hyperparameters of a group."""
        spec, group = self.groups[number].spec, self.param_groups[number]
        if isinstance(spec, NotGiven):
            raise ConfigError(
                "these tables were built without an optimizer, and the backward pass is what applies it: "
                "build them with optimizer=tierstore.optim.Adagrad(lr=...) or another of tierstore.optim, or "
                "with optimizer=None to freeze them"
            )
        values = [group[name] for name in spec.changeable]
        if not all(map(_is_plain, values)):
            return spec.checked(**dict(zip(spec.changeable, values, strict=True)))
        known = self._known[number]
        if known is None or known[0] != values:
            checked = spec.checked(**dict(zip(spec.changeable, values, strict=True)))
            known = self._known[number] = values, checked
        return known[1]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if len(self.param_groups) == len(self.groups):
            raise ConfigError(
                "a fused optimizer has the parameter groups of its tables; give other parameters an "
                "optimizer of their own"
            )
        # torch's decorator would import all of torch.compile, for seconds, only to keep out of its way.
        undecorated = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
        (undecorated or torch.optim.Optimizer.add_param_group)(self, param_group)

    @property
    def _names(self) -> object:
        """What the state of an optimizer says of which optimizer it is."""
        if len(self.groups) == 1:
            return self.spec.name
        return {table: group.spec.name for group in self.groups for table in group.tables}

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"state": {weight: {"<table>.<part>": tensor}}, "param_groups", "name", "num_updates"}``.

        The parts are torch's (``sum``, ``exp_avg`` ..), dense over all rows, and ``step``. A table of more
        than 1 GiB has a mark instead. Within ``without_rows()`` no table has parts. All ranks of sharded
        tables must call this.
        """
        found = super().state_dict()
        if self.rows is not None and (state := self.rows.save(self.num_updates)):
            found["state"] = state
            for group, of in zip(found["param_groups"], self.groups, strict=True):
                group["params"] = [
                    key for key, parts in state.items() if len(self.groups) == 1 or _table(parts) in of.tables
                ]
        return {**found, "name": self._names, "num_updates": self.num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned.

        Raises ``ConfigError`` for the state of another optimizer or of other tables, and where the rows'
        state is missing. Raises ``StoreMismatchError`` where that state was left out and the rows have
        changed since.
        """
        state = dict(state_dict)
        name, num_updates = state.pop("name", None), state.pop("num_updates", None)
        if name != self._names or not isinstance(num_updates, int):
            raise ConfigError(f"this is not the state of a fused {self._names} optimizer (but of {name!r})")
        # what the groups show differs between sharded and unsharded tables
        counts = [len(group["params"]) for group in self.param_groups]
        if len(state["param_groups"]) != len(counts):
            raise ConfigError(
                f"this state has {len(state['param_groups'])} parameter groups, not {len(counts)}"
            )
        of_rows = state["state"]
        if self.rows is not None:
            self.rows.load(of_rows, num_updates)
        elif of_rows:
            raise ConfigError(
                "this optimizer is a copy without rows; load the state of rows into the module's own"
            )
        begins = [sum(counts[:number]) for number in range(len(counts))]
        groups = [
            # states of earlier releases lack hyperparameters that are new
            {**own, **group, "params": list(range(begin, begin + count))}
            for own, group, begin, count in zip(
                self.param_groups, state["param_groups"], begins, counts, strict=True
            )
        ]
        super().load_state_dict({**state, "state": {}, "param_groups": groups})
        self.num_updates = num_updates

    def __getstate__(self) -> dict[str, Any]:
        own = {"spec": self.spec, "groups": self.groups, "num_updates": self.num_updates}
        return {**super().__getstate__(), **own, "_known": [None] * len(self.groups)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.updating = threading.RLock()


def _table(parts: Mapping[str, object]) -> str:
    """Return the table of a part of a state, whose names begin with it."""
    return next(iter(parts)).rpartition(".")[0]
