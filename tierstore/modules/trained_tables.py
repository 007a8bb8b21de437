"""What a module's tables are trained with: optimizers, hooks, and the count of updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
from torch.utils.hooks import RemovableHandle

from tierstore.errors import ConfigError, GradientError
from tierstore.modules.applied import APPLIED, applied_optimizer, refuse_applied
from tierstore.modules.gradient_hooks import GradientHook, rows_of_sums
from tierstore.modules.parts import Part
from tierstore.modules.row_calls import RowCalls
from tierstore.modules.row_shares import TableStep
from tierstore.modules.row_updates import Keeps
from tierstore.modules.tables import HasWeight, ShownParameter, all_trained
from tierstore.modules.wrappers import refuse_drivers
from tierstore.optim import OptimizerSpec
from tierstore.optim.specs import NotGiven
from tierstore.optim.tables import Optimizers


class TrainedTables(RowCalls):
    """Tables that backward passes update, as :class:`~tierstore.modules.row_updates.Updates` asks."""

    refuse_scaled: bool
    """Whether backward passes raise ConfigError if this process uses a GradScaler; see ``accumulate``."""
    accumulation: Keeps | None
    """Keeps the gradients of backward passes inside ``tierstore.accumulate``."""
    adopted: list[object]
    """Optimizers of apply_optimizer_in_backward whose settings the tables have."""
    _requires_grad: bool
    _shown: list[ShownParameter]
    _key: str  # under which the engine commits the count of updates

    def table_names(self) -> list[str]:
        """Return the names of the tables, in order."""
        return [self.engine.tables[index].name for index in self.table_numbers]

    def applied_optimizer(self) -> OptimizerSpec | dict[str, OptimizerSpec] | None:
        """Return the optimizer that apply_optimizer_in_backward gave all tables, or one by table where they
        differ; None if it gave none. Raises ConfigError for an optimizer that tables cannot have."""
        return applied_optimizer([shown.now for shown in self._shown], self.table_names())

    def chosen_optimizer(self) -> Optimizers:
        """Return the optimizer that the tables were built with, or else the applied one; None for frozen
        tables. Raises ConfigError for tables that have both."""
        if self.frozen:
            return None
        if isinstance(self.fused_optimizer.spec, NotGiven):
            return self.applied_optimizer() or self.fused_optimizer.spec
        self._refuse_applied()
        return self.rules.optimizer

    def _refuse_applied(self) -> None:
        for number, shown in enumerate(self._shown):
            if hasattr(shown.now, APPLIED):
                refuse_applied(shown.now, self.table_names()[number], self.adopted)

    def show_parameters(self, holders: Sequence[HasWeight]) -> None:
        """Give every table a parameter; ``holders`` in the order of the tables."""
        pairs = zip(holders, self.rules.trained, strict=True)
        device = self.engine.device_name
        self._shown = [holder.show_parameter(trained, device) for holder, trained in pairs]

    def frozen_tables(self) -> list[int]:
        """Return the tables that are frozen now. In torch the graph of a forward call does not have such
        tables, also if they are unfrozen before the backward pass."""
        if not self._shown:
            return [] if self._requires_grad and self.has_optimizer else self.table_numbers
        if all_trained(self._shown):  # as in nearly every call, in half the time
            return []
        shown = zip(self.table_numbers, self._shown, strict=True)
        return [table for table, parameter in shown if not parameter.now.requires_grad]

    @property
    def frozen(self) -> bool:
        """Whether a backward pass would change no table."""
        if not self._shown:
            return not (self.has_optimizer and self._requires_grad)
        for parameter in self._shown:  # noqa: SIM110  # all() takes longer
            if parameter.now.requires_grad:
                return False
        return True

    @property
    def has_optimizer(self) -> bool:
        """Whether the tables can be trained: not if they were built with ``optimizer=None``."""
        return self.rules.any_trained

    def take_updates(self) -> None:
        """Set the optimizer's count of updates to the count in the commit that the tables are at."""
        self.fused_optimizer.num_updates = self.engine.updates.get(self._key, 0)

    def next_update(self) -> tuple[Sequence[TableStep], Sequence[partial[None]]]:
        """Begin an update; return its steps with their tables (None: all), and native calls that count it."""
        self.check_update()
        steps, counting = self.fused_optimizer.next_step()
        self.engine.changed(self.table_numbers)
        count = partial(self.engine.updates.__setitem__, self._key, self.fused_optimizer.num_updates + 1)
        # a table without an optimizer may have rows that the step is not for
        trained = self.rules.trained_numbers()
        own = [(step, trained if of is None else self.rules.numbers_of(of)) for step, of in steps]
        return own, [counting, count]

    def set_updates(self, count: int) -> None:
        """Set the optimizer's count of updates, as committed with the rows from now on."""
        self.fused_optimizer.num_updates = self.engine.updates[self._key] = count

    def check_update(self) -> None:
        """Raise ConfigError if something between the loss and the rows would make their update wrong."""
        if not all(self.rules.trained) and (without := self.rules.without_optimizer(self.frozen_tables())):
            raise ConfigError(
                f"tables {', '.join(without)} were built with optimizer=None and require gradients now: "
                "build them with an optimizer, or freeze them by requires_grad_(False)"
            )
        self._refuse_applied()
        unscales = self.accumulation is not None and self.accumulation.unscales
        scaled, at_once = self.refuse_scaled and not unscales, self.accumulation is None
        refuse_drivers(self, self.table_names, scaled=scaled, at_once=at_once)

    def register_gradient_hook(self, hook: GradientHook, table: str | None = None) -> RemovableHandle:
        """Call ``hook(ids, gradients)`` at every update of a table, before clipping and the optimizer.

        ``ids``: int64 (n,), the rows of the batch, each once. ``gradients``: float32 (n, dim), the sums of
        their gradients. What the hook returns replaces the gradients, unless it is None; it may also change
        them in place. Hooks run in the order of their registration, before a row is updated; what one raises
        becomes a GradientError that names the table. The handle removes the hook. Sharded tables call the
        hook on each rank with the rows that it holds.

        Raises GpuError for a GPU whose kernels for this do not compile.
        """
        name = self._hooked_name(table)
        self._prepare_sums([name])
        return self.rules.hooks.add(name, hook)

    def _prepare_sums(self, names: Collection[str]) -> None:
        """Make the device ready to sum the gradients of tables for their hooks."""
        tables = [self.engine.tables[number] for number in self.rules.numbers_of(names)]
        self.engine.prepare([rows_of_sums(table.embedding_dim) for table in tables])

    def _hooked_name(self, table: str | None) -> str:
        """Return the name of a table that may have hooks."""
        return self.rules.name_of(self.table_number(table))

    def take_gradient_hooks(self, module: TrainedTables) -> None:
        """Take over the hooks of another module of the same tables; their handles still remove them."""
        hooked = [table for table, hooks in module.rules.hooks.of.items() if hooks]
        self._prepare_sums([self._hooked_name(table) for table in hooked])
        self._hooks = self.rules.hooks = module.rules.hooks  # another optimizer keeps them

    def gradient_hooks(self) -> dict[int, tuple[str, list[GradientHook]]]:
        """Return the names and hooks of trained tables that have hooks, by their numbers in the engine."""
        return self.rules.hooks_without(self.frozen_tables()) if self.rules.hooks else {}

    def mean_squares(
        self, parts: Sequence[Part], squares_of: Callable[[int], np.ndarray]
    ) -> Sequence[np.ndarray | None]:
        """Return None for every part, whose rows have all columns of their tables; see ``Updates``."""
        return [None] * len(parts)

    def tables_counted_elsewhere(self) -> list[int]:
        """Return the tables whose gradients another rank counts in a norm over all ranks."""
        return []

    def total_over_ranks(self, value: float) -> float:
        """Return the sum of ``value`` over the ranks that share the tables."""
        return value

    def table_name(self, table: int) -> str:
        """Return the name of a table of the engine."""
        return self.engine.tables[table].name

    def report_gradients(self, error: GradientError | None) -> None:
        """Raise ``error``, if there is one; see ``Updates``."""
        if error is not None:
            raise error
