"""Base of all tiered modules: an engine, a fused optimizer, and lookups that may have been made ahead."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from tierstore.cache.engine import Engine
from tierstore.errors import ConfigError
from tierstore.modules.ahead import Ahead, find_ahead
from tierstore.modules.gradient_hooks import GradientHooks
from tierstore.modules.handles import MODULES
from tierstore.modules.inputs import check_memory
from tierstore.modules.lookup import (
    PooledFunction,
    SequenceFunction,
    kept_weights,
    pooled_forward,
    sequence_forward,
)
from tierstore.modules.optimizer_states import OptimizerStates
from tierstore.modules.parts import Lookup
from tierstore.modules.quantization import NotQuantized
from tierstore.modules.table_rules import TableRules
from tierstore.modules.tables import all_trained, leaf_of
from tierstore.modules.trained_tables import TrainedTables
from tierstore.modules.wrappers import active_ddp, ranks, refuse_replicas
from tierstore.optim.fused import FusedOptimizer
from tierstore.optim.tables import Optimizers

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("tierstore")

_READS: tuple[None, tuple[int, ...]] = None, ()
"""What a forward call trains that only reads."""


class TieredModule(TrainedTables, nn.Module):
    """Base of the modules whose tables live in tiers.

    ``optimizer`` None freezes the tables: forward reads, backward stops here. Otherwise every backward pass
    updates the rows of its lookup, once each. A dict has the optimizer of each table by its name; ``names``:
    of all tables, None: the names that the engine has; ``of_tables``: which of these names each of ``tables``
    has, None: in their order. In ``eval()`` mode or under ``no_grad``, and after ``requires_grad_(False)``,
    forward reads through the tiers and changes nothing.
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
        self.accumulation = None
        self._shown = []
        self.adopted = []
        self._key = engine.tables[self.table_numbers[0]].name
        self.take_updates()
        self.anchor = torch.zeros(0, dtype=torch.float32, device="cpu", requires_grad=True)
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

    def lookup_form(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return what in forward's arguments determines the lookup beside :meth:`lookup_inputs`; it is
        compared by value."""
        return None

    @abstractmethod
    def make_lookup(self, *args: Any, **kwargs: Any) -> Lookup:
        """Check and deduplicate forward's arguments (per-sample weights excepted); change nothing.

        Raises ``InputError`` that names the feature and what is wrong with it.
        """

    @abstractmethod
    def forward_arguments(
        self, ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, keys: Sequence[str] | None
    ) -> tuple[object, ...]:
        """Make forward's arguments (per-sample weights excepted) of the arguments of a graph's operator."""

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
        """Return the lookup of a forward call, made ahead or now; raises the error that it met ahead.

        Raises ConfigError inside of a transform of ``torch.func``."""
        if torch._C._are_functorch_transforms_active():
            raise ConfigError(
                f"a {type(self).__name__} looks no rows up inside of a transform of torch.func (grad, vjp, "
                "jvp, vmap), since its backward pass updates rows; call it before, and give its output to "
                "the function that is transformed"
            )
        if self.observer is not None:
            self.observer(self, args, kwargs)
        if self._ahead:
            inputs, form = self.lookup_inputs(*args, **kwargs), self.lookup_form(args, kwargs)
            ahead = find_ahead(list(self._ahead), inputs, form)
            if ahead is not None and self._take(ahead):
                if ahead.error is not None:
                    raise ahead.error
                assert ahead.lookup is not None
                return ahead.lookup
        return self.make_lookup(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze all tables, or let them be trained again. Rows of frozen tables are only read."""
        self._requires_grad = requires_grad
        return super().requires_grad_(requires_grad)

    @property
    def trains(self) -> bool:
        """Whether a forward call now would be followed by an update."""
        return self.training and torch.is_grad_enabled() and not self.frozen

    def pooled_rows(self, lookup: Lookup, weights: Tensor | None) -> Tensor:
        """Return the output of a pooled lookup; ``weights``: one for each id, or None."""
        parts: Any = lookup.parts
        if weights is not None:
            check_memory("weights of ids", weights)
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
        if (updates or self.training) and not self.collective and ranks() > 1:
            self._refuse_replicas(updates)
        if updates:
            frozen = self.frozen_tables()
            lookup.acquire()
            for part in lookup.parts:
                part.frozen = frozen
        else:
            lookup.read()

    def gradient_anchor(self) -> Tensor:
        """Return a tensor without elements, for autograd to train. DistributedDataParallel (of one rank here)
        waits for a gradient of every parameter, so all of them feed this tensor."""
        if active_ddp() is None or not self._shown:
            leaf = None if torch.compiler.is_compiling() else leaf_of(self._shown, self.anchor)
            return self.anchor if leaf is None else leaf
        return torch.cat([parameter.now.view(-1) for parameter in self._shown])

    def trained_at_once(self) -> tuple[Tensor | None, Sequence[int]] | None:
        """Return :meth:`gradient_anchor`, outside of a compiler, or None if this forward call trains no rows;
        and the tables that are frozen.

        None where somebody makes lookups ahead, or sees forward calls, and where a process of several has to
        be checked."""
        own = self.__dict__  # nn.Module has a __getattr__, so its attributes take several times as long
        if own["_ahead"] or own["observer"] is not None or (count := ranks()) > 1:
            return None
        if not own["training"] or not torch.is_grad_enabled():
            return _READS
        if (shown := own["_shown"]) and (not count or active_ddp() is None):
            anchor = leaf_of(shown, own["anchor"])
            frozen = () if anchor is None or all_trained(shown) else self.frozen_tables()
            return anchor, frozen
        return _READS if self.frozen else (self.gradient_anchor(), self.frozen_tables())

    def anchors(self) -> list[Tensor]:
        """Return the tensors that autograd trains in place of the rows."""
        return [self.anchor, *(shown.now for shown in self._shown)]

    def _refuse_replicas(self, updates: bool) -> None:
        """Raise ConfigError if every rank would train its own copy of the rows."""
        ours = all(parameter.is_registered for parameter in self._shown)
        refuse_replicas(self, self.table_names(), ours, updates)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse to move to another device: the rows stay where the tables were opened."""
        own = torch.device(self.engine.device_name)
        if (
            not self.engine.on_meta
            and (moved := fn(torch.empty(0, dtype=torch.float32, device=own)).device) != own
        ):
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
