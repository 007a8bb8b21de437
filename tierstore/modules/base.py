"""Base of all tiered modules: an engine, a fused optimizer, and lookups that may have been made ahead."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tierstore.cache.engine import Engine
from tierstore.errors import ConfigError, GradientError
from tierstore.modules.ahead import Ahead, find_ahead
from tierstore.modules.applied import APPLIED, applied_optimizer, refuse_applied
from tierstore.modules.gradient_hooks import GradientHook, GradientHooks
from tierstore.modules.handles import MODULES
from tierstore.modules.lookup import (
    PooledFunction,
    SequenceFunction,
    kept_weights,
    pooled_forward,
    sequence_forward,
)
from tierstore.modules.optimizer_states import OptimizerStates
from tierstore.modules.parts import Lookup, Part
from tierstore.modules.quantization import NotQuantized
from tierstore.modules.row_calls import RowCalls
from tierstore.modules.row_shares import TableStep
from tierstore.modules.row_updates import Keeps
from tierstore.modules.table_rules import TableRules
from tierstore.modules.tables import HasWeight, ShownParameter, leaf_of
from tierstore.modules.wrappers import (
    active_ddp,
    has_other_ranks,
    refuse_drivers,
    refuse_replicas,
)
from tierstore.optim import OptimizerSpec
from tierstore.optim.fused import FusedOptimizer
from tierstore.optim.specs import NotGiven
from tierstore.optim.tables import Optimizers

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("tierstore")


class TieredModule(RowCalls, nn.Module):
    """Base of the modules whose tables live in tiers.

    ``optimizer`` None freezes the tables: forward reads, backward stops here. Otherwise every backward pass
    updates the rows of its lookup, once each. A dict has the optimizer of each table by its name;
    ``names``: of all tables, None: those of the engine; ``of_tables``: which of these names each of
    ``tables`` has, None: in their order. In ``eval()`` mode or under ``no_grad``, and after
    ``requires_grad_(False)``, forward reads through the tiers and changes nothing.
    """

    def __init__(
        self,
        engine: Engine,
        tables: Sequence[int],
        optimizer: Optimizers,
        names: Sequence[str] | None = None,
        of_tables: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.table_numbers = list(tables)
        names = [engine.tables[number].name for number in self.table_numbers] if names is None else names
        self._names = (of_tables or names, names)
        self._hooks = GradientHooks()
        self._requires_grad = True
        self.use_optimizer(optimizer)
        self.check_gradients = engine.config.check_gradients
        self.refuse_scaled = True
        """Whether backward passes raise ConfigError if this process uses a GradScaler; see ``accumulate``."""
        self.accumulation: Keeps | None = None
        """Keeps the gradients of backward passes inside ``tierstore.accumulate``."""
        self._shown: list[ShownParameter] = []
        self.adopted: list[object] = []
        """Optimizers of apply_optimizer_in_backward whose settings the tables have."""
        self._key = engine.tables[self.table_numbers[0]].name
        self.take_updates()
        self.anchor = torch.zeros(0, requires_grad=True)
        """This is no parameter: it only makes autograd call the backward functions."""
        self.handle = MODULES.add(self, names)
        """The name by which graphs find this module."""
        self._ahead: deque[Ahead] = deque()
        self.observer: Callable[[TieredModule, tuple[object, ...], dict[str, object]], None] | None = None
        """Sees every forward call while a prefetcher learns where in a batch the ids are."""

    def use_optimizer(self, optimizer: Optimizers) -> None:
        """Let backward passes apply ``optimizer``, of the row layouts that the tables have."""
        self.rules = TableRules(self.table_numbers, *self._names, optimizer, self._hooks)
        self.fused_optimizer = FusedOptimizer(self.rules.groups)
        """A ``torch.optim.Optimizer`` whose ``param_groups`` are read at every backward pass."""
        self.fused_optimizer.rows = OptimizerStates(self)

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

    qconfig = NotQuantized()

    # -- lookups -------------------------------------------------------------------------

    collective = False
    """Whether ranks look rows up together. Modules that do have ``begin_exchange(*args)``, which all ranks
    call in the order of the batches, and which returns an object with ``send()``;
    ``finish_exchange(object)``, which returns the lookup; ``announce_end(error)``, in place of
    ``begin_exchange`` when there are no more batches; and ``min_over_ranks(value)``, which returns the
    smallest ``value`` of any rank."""

    @abstractmethod
    def lookup_inputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return the arguments of forward that determine the lookup: ids, offsets or lengths."""

    @abstractmethod
    def make_lookup(self, *args: Any, **kwargs: Any) -> Lookup:
        """Check and deduplicate forward's arguments (per-sample weights excepted); change nothing.

        Raises ``InputError`` that names the feature and what is wrong with it.
        """

    @abstractmethod
    def forward_arguments(
        self, ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, keys: Sequence[str] | None
    ) -> tuple[object, ...]:
        """Return forward's arguments (per-sample weights excepted) of those of a graph's operator."""

    def ids_by_feature(
        self, ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, keys: Sequence[str] | None
    ) -> list[Tensor]:
        """Return copies of each feature's ids; arguments as for :meth:`forward_arguments`."""
        return [ids.clone()]

    def lookup_arguments(self, args: tuple[object, ...], kwargs: dict[str, object]) -> set[int | str]:
        """Return the places (positions or names) of forward's arguments that :meth:`make_lookup` needs; other
        arguments may be anything."""
        return {*range(len(args)), *kwargs} - {"per_sample_weights"}

    def feature_names(self) -> list[str]:
        """Return the features that a collection takes out of a keyed jagged tensor; other modules: none."""
        return []

    def table_names(self) -> list[str]:
        """Return the names of the tables, in order."""
        return [self.engine.tables[index].name for index in self.table_numbers]

    def keep_for_forward(self, ahead: Ahead) -> None:
        """Keep a lookup made ahead for its forward call."""
        ahead.hand_out()
        self._ahead.append(ahead)

    def give_back(self, ahead: Ahead) -> None:
        """Release a lookup whose forward call came, or will not come, unless a graph needs its rows."""
        if self._take(ahead):
            ahead.release()

    def _take(self, ahead: Ahead) -> bool:
        """Remove a lookup made ahead. Return False if another thread has removed it."""
        try:
            self._ahead.remove(ahead)
        except ValueError:
            return False
        return True

    def find_lookup(self, *args: object, **kwargs: object) -> Lookup:
        """Return the lookup of a forward call, made ahead or now; raises the error that it met ahead."""
        if self.observer is not None:
            self.observer(self, args, kwargs)
        if self._ahead:
            ahead = find_ahead(list(self._ahead), self.lookup_inputs(*args, **kwargs))
            if ahead is not None and self._take(ahead):
                if ahead.error is not None:
                    raise ahead.error
                assert ahead.lookup is not None
                return ahead.lookup
        return self.make_lookup(*args, **kwargs)

    def show_parameters(self, holders: Sequence[HasWeight]) -> None:
        """Give every table a parameter; ``holders`` in the order of the tables."""
        pairs = zip(holders, self.rules.trained, strict=True)
        device = self.engine.device_name
        self._shown = [holder.show_parameter(trained, device) for holder, trained in pairs]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze all tables, or let them be trained again. Rows of frozen tables are only read."""
        self._requires_grad = requires_grad
        return super().requires_grad_(requires_grad)

    def frozen_tables(self) -> list[int]:
        """Return the tables that a backward pass would not change."""
        if not self._shown:
            return [] if self._requires_grad and self.has_optimizer else self.table_numbers
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

    @property
    def trains(self) -> bool:
        """Whether a forward call now would be followed by an update."""
        return self.training and torch.is_grad_enabled() and not self.frozen

    def pooled_rows(self, lookup: Lookup, weights: Tensor | None) -> Tensor:
        """Return the output of a pooled lookup; ``weights``: one for each id, or None."""
        parts: Any = lookup.parts
        per_part = [] if weights is None else [part.weights_of(weights) for part in parts]
        updates = self.trains
        self.pin(lookup, updates)
        if updates:
            return PooledFunction.apply(self.gradient_anchor(), self, lookup, *per_part)
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            return PooledFunction.apply(self.anchor, None, lookup, *per_part)
        out = lookup.new_output()
        pooled_forward(parts, out, kept_weights(parts, per_part))
        return out

    def rows_one_by_one(self, lookup: Lookup) -> tuple[Tensor, ...]:
        """Return the rows of a sequence lookup, a tensor (ids, dim) per row layout."""
        updates = self.trains
        self.pin(lookup, updates)
        if updates:
            return SequenceFunction.apply(self.gradient_anchor(), self, lookup)
        return sequence_forward(lookup.parts)

    def pin(self, lookup: Lookup, updates: bool) -> None:
        """Get the rows of ``lookup``: pinned for an update, or copied."""
        if (updates or self.training) and not self.collective and has_other_ranks():
            self._refuse_replicas(updates)
        if updates:
            lookup.acquire()
        else:
            lookup.read()

    def gradient_anchor(self) -> Tensor:
        """Return a tensor without elements, for autograd to train. DistributedDataParallel (of one rank here)
        waits for a gradient of every parameter, so all of them feed this tensor."""
        if active_ddp() is None or not self._shown:
            return self.anchor if torch.compiler.is_compiling() else leaf_of(self._shown, self.anchor)
        return torch.cat([parameter.now.view(-1) for parameter in self._shown])

    def anchors(self) -> list[Tensor]:
        """Return the tensors that autograd trains in place of the rows."""
        return [self.anchor, *(shown.now for shown in self._shown)]

    def take_updates(self) -> None:
        """Set the optimizer's count of updates to the count in the commit that the tables are at."""
        self.fused_optimizer.num_updates = self.engine.updates.get(self._key, 0)

    def next_update(self) -> tuple[Sequence[TableStep], Sequence[partial[None]]]:
        """Begin an update; return its steps with their tables (None: all), and native calls that count it."""
        self.check_update()
        steps, counting = self.fused_optimizer.next_step()
        self.engine.changed(self.table_numbers)
        count = partial(self.engine.updates.__setitem__, self._key, self.fused_optimizer.num_updates + 1)
        own = [(step, None if of is None else self.rules.numbers_of(of)) for step, of in steps]
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
        """
        return self.rules.hooks.add(self._hooked_name(table), hook)

    def _hooked_name(self, table: str | None) -> str:
        """Return the name of a table that may have hooks."""
        return self.rules.name_of(self.table_number(table))

    def take_gradient_hooks(self, module: TieredModule) -> None:
        """Take over the hooks of another module of the same tables; their handles still remove them."""
        for table in [table for table, hooks in module.rules.hooks.of.items() if hooks]:
            self._hooked_name(table)
        self.rules.hooks = module.rules.hooks

    def gradient_hooks(self) -> dict[int, tuple[str, list[GradientHook]]]:
        """Return the names and hooks of trained tables that have hooks, by their numbers in the engine."""
        return self.rules.hooks_without(self.frozen_tables()) if self.rules.hooks else {}

    def _refuse_replicas(self, updates: bool) -> None:
        """Raise ConfigError if every rank would train its own copy of the rows."""
        ours = all(parameter.is_registered for parameter in self._shown)
        refuse_replicas(self, self.table_names(), ours, updates)

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse to move to another device: the rows stay where the tables were opened."""
        own = torch.device(self.engine.device_name)
        if not self.engine.on_meta and (moved := fn(torch.empty(0, device=own)).device) != own:
            raise ConfigError(
                f"the rows of tables {', '.join(self.table_names())} are on {own}, where they were opened, "
                f"and cannot be moved to {moved}. Build the module with device={str(moved)!r} (move a model "
                "before offload()), or move its dense layers alone. Layers before this one may have moved"
            )
        return super()._apply(fn, recurse)

    # -- state ---------------------------------------------------------------------------

    def close(self, *, commit: bool = True) -> None:
        """Commit (if the configuration names a path) and close the engine; the module cannot be used
        any more. After a commit with an ``extra`` it commits nothing, since the extra would not fit later
        rows."""
        while self._ahead:
            self._ahead.popleft().release()
        self.engine.close(commit=commit)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, for its rows are in tiers; build another "
            "and give it the rows with load_state_dict() or load_rows(), or open the folder of its commits"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            self.engine.warn_of_loss()
        self.close(commit=kind is None)
