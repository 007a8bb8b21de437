"""What a user has chosen for each table of a module: its optimizer, and hooks on its gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tierstore.modules.gradient_hooks import GradientHook, GradientHooks
from tierstore.optim.tables import Optimizers, TableGroup, by_table, groups_of


class TableRules:
    """The rules of tables ``numbers`` of an engine, whose names are ``names``, in the same order.

    ``every``: the names of all tables that ``optimizer`` is for, of which a rank may have some, and those
    several times. Raises ConfigError for what ``by_table`` refuses.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        names: Sequence[str],
        every: Sequence[str],
        optimizer: Optimizers,
        hooks: GradientHooks,
    ) -> None:
        self.numbers, self.names, self.optimizer = list(numbers), list(names), optimizer
        self.groups: list[TableGroup] = groups_of(optimizer, every)
        each = by_table(optimizer, every)
        some = next((spec for spec in each.values() if spec is not None), None)
        self.trained = [each.get(name, some) is not None for name in self.names]
        """Whether each table has an optimizer."""
        self.any_trained = any(self.trained)
        self.hooks = hooks

    def name_of(self, number: int) -> str:
        return self.names[self.numbers.index(number)]

    def numbers_of(self, names: Collection[str]) -> list[int]:
        """Return the numbers of the tables with these names."""
        return [number for number, name in zip(self.numbers, self.names, strict=True) if name in names]

    def trained_numbers(self) -> list[int] | None:
        """Return the numbers of the tables that have an optimizer; None: all tables have one."""
        if all(self.trained):
            return None
        return [number for number, trained in zip(self.numbers, self.trained, strict=True) if trained]

    def without_optimizer(self, frozen: Collection[int]) -> list[str]:
        """Return the tables that have no optimizer and are not among ``frozen``."""
        tables = zip(self.numbers, self.names, self.trained, strict=True)
        return [name for number, name, trained in tables if not trained and number not in frozen]

    def hooks_without(self, frozen: Collection[int]) -> dict[int, tuple[str, list[GradientHook]]]:
        """Return the names and hooks of tables that have hooks, but for ``frozen`` ones, by their numbers."""
        tables = zip(self.numbers, self.names, strict=True)
        return {
            number: (name, list(self.hooks.of[name].values()))
            for number, name in tables
            if self.hooks.of.get(name) and number not in frozen
        }
