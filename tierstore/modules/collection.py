"""Base of all collections: tables by name, features, and a strategy that looks the features up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tierstore.cache.engine import Table
from tierstore.cache.late_engine import LateEngine
from tierstore.errors import InputError
from tierstore.modules.applied import applied_to
from tierstore.modules.base import TieredModule
from tierstore.modules.configs import BaseEmbeddingConfig
from tierstore.modules.features import Features, PooledFeatures
from tierstore.modules.gradient_hooks import GradientHook
from tierstore.modules.inputs import FeatureLookup, keyed_on_host
from tierstore.modules.table_weight import TableWeight
from tierstore.modules.tables import SHOWN, HasWeight, OpenTables, placed, with_optimizers
from tierstore.optim.specs import SGD, NotGiven, OptimizerSpec
from tierstore.optim.tables import Optimizers
from tierstore.sparse import KeyedJaggedTensor, as_keyed_jagged_tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class LookupStrategy(Protocol):
    """How a collection looks its features up: in its own engine, or in the engines of all ranks.

    Beside ``make``, a strategy has ``pooled(module, features)`` or ``rows(module, features)``, which return a
    forward call's vectors. A strategy keeps no reference to the module, so that the tables close with the
    user's last reference.
    """

    def make(self, features: object) -> FeatureLookup:
        """Return the lookup of a KeyedJaggedTensor; see :meth:`TieredModule.make_lookup`."""
        ...


class TableView(HasWeight):
    """One table of a collection: its place in the module tree, for its rows and its state dict entry."""

    def __init__(self, collection: Collection, config: BaseEmbeddingConfig, number: int) -> None:
        super().__init__()
        # not as a submodule: the collection is the parent
        object.__setattr__(self, "collection", collection)
        self.name = config.name
        self.num_embeddings = config.num_embeddings
        self.embedding_dim = config.embedding_dim
        self.config, self._number = config, number

    collection: Collection

    @property
    def table(self) -> Table:
        return self.collection.engine.tables[self._engine_number]

    @property
    def _engine_number(self) -> int:
        return self.collection.table_numbers[self._number]

    @property
    def on_meta(self) -> bool:
        return self.collection.engine.on_meta

    @property
    def device(self) -> torch.device:
        """The device of the collection's outputs."""
        return self.collection.device

    @property
    def weight(self) -> TableWeight:
        """What stands for the table's weights: it reads and writes rows as a tensor would."""
        return TableWeight(self)

    @property
    def is_trained(self) -> bool:
        """Whether backward passes update the table."""
        shown = self._parameters.get(SHOWN)
        return not self.collection.frozen if shown is None else shown.requires_grad

    def rows_version(self) -> str:
        return self.collection.engine.versions.of(self._engine_number)

    def rows(self, ids: object) -> Tensor:
        """Return rows; see :meth:`TieredModule.rows`."""
        return self.collection.rows(ids, self.name)

    def optimizer_rows(self, ids: object) -> dict[str, Tensor]:
        """Return optimizer state; see :meth:`TieredModule.optimizer_rows`."""
        return self.collection.optimizer_rows(ids, self.name)

    def load_rows(self, ids: object, weight: Tensor, optimizer: dict[str, Tensor] | None = None) -> None:
        """Overwrite rows; see :meth:`TieredModule.load_rows`."""
        self.collection.load_rows(ids, weight, optimizer, self.name)

    def register_gradient_hook(self, hook: GradientHook) -> RemovableHandle:
        """Register a hook; see :meth:`TieredModule.register_gradient_hook`."""
        return self.collection.register_gradient_hook(hook, self.name)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class TableViews(nn.ModuleDict):
    """Views by table name; a table may be called like a method of the dictionary ("items", "type")."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        assert module is not None
        self._modules[name] = module


def check_bounds(features: Features, opened: OpenTables) -> None:
    """Let ids that are out of range do what the configuration of ``opened`` says of each table."""
    names = [opened.engine.tables[number].name for number in opened.numbers]
    modes = map(opened.engine.config.bounds_check_of, names)
    features.check_bounds(dict(zip([config.name for config in features.configs], modes, strict=True)))


class Collection(TieredModule):
    """Tables by name and features, in the order of the configuration, and the strategy of their lookups."""

    views_name: ClassVar[str]
    """Name of the module that has the tables, in state dicts."""
    opens_late: ClassVar[bool] = False
    """Whether tables are opened by the first call that needs a row. Until then they take the optimizer of
    ``apply_optimizer_in_backward``."""

    def __init__(
        self,
        opened: OpenTables,
        optimizer: Optimizers,
        features: Features,
        lookups: LookupStrategy,
        view_type: type[TableView] = TableView,
    ) -> None:
        names, tables = [config.name for config in features.configs], opened.engine.tables
        of_tables = [t.origin or t.name for t in tables] if self.collective else None
        super().__init__(opened.engine, opened.numbers, optimizer, names, of_tables)
        self.features, self.configs, self.lookups = features, features.configs, lookups
        views = {c.name: view_type(self, c, number) for number, c in enumerate(self.configs)}
        self.add_module(self.views_name, TableViews(views))
        if not self.collective:
            self.show_parameters(list(views.values()))
        if isinstance(self.engine, LateEngine):
            self.engine.call_when_opened(self.adopt_applied, self.take_updates)

    @property
    def device(self) -> torch.device:
        """The device of outputs; the meta device for a collection without rows."""
        return torch.device(self.engine.device_name)

    def adopt_applied(self) -> None:
        """Let tables that are not opened yet have the optimizer that was applied to their parameters."""
        if not self._shown:  # tables in shards have no parameters
            return
        applied = self.applied_optimizer()
        if applied is None or not isinstance(self.engine, LateEngine) or not self.engine.waits:
            return
        if isinstance(self.fused_optimizer.spec, NotGiven):
            self.take_optimizer(applied)
            self.adopted = [optimizer for shown in self._shown for optimizer in applied_to(shown.now)]

    def take_optimizer(self, optimizer: Optimizers) -> None:
        """Give the tables this optimizer, or one each. Only before they are opened."""
        assert isinstance(self.engine, LateEngine)
        one = optimizer if isinstance(optimizer, OptimizerSpec) else SGD()
        self.engine.set_optimizer(one, with_optimizers(self.engine.tables, optimizer))
        self.use_optimizer(optimizer)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Leave the meta device, as ``to_empty()`` asks by moving the parameters."""
        self.adopt_applied()  # torch makes other parameters, without the optimizer that was applied
        super()._apply(fn, recurse)
        if isinstance(self.engine, LateEngine) and self.engine.on_meta:
            moved = next(self.parameters()).device
            self.engine.on_meta = moved.type == "meta"
            if not self.engine.on_meta:
                self.engine.config = placed(self.engine.config, moved)
            for shown in self._shown:
                shown.accept()
        return self

    def config_number(self, name: str | None) -> int:
        """Return the number of a table in the configuration; ``None`` means the only table. Raises
        InputError."""
        names = [config.name for config in self.configs]
        if (name is None and len(names) > 1) or (name is not None and name not in names):
            raise InputError(f"there is no table {name!r}; name one of {names}")
        return 0 if name is None else names.index(name)

    def table_number(self, name: str | None) -> int:
        return self.table_numbers[self.config_number(name)]

    def feature_names(self) -> list[str]:
        return self.features.names

    def forward_arguments(
        self, ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, keys: Sequence[str] | None
    ) -> tuple[KeyedJaggedTensor]:
        return (KeyedJaggedTensor(list(keys or []), ids, lengths=lengths, offsets=offsets),)

    def lookup_inputs(self, features: object) -> tuple[Tensor, ...]:
        keyed = as_keyed_jagged_tensor(features)
        return keyed.values(), keyed.lengths()

    def lookup_form(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return the keys, and how the output has their bags: the same tensors may be of other keys."""
        keyed = as_keyed_jagged_tensor(args[0] if args else kwargs["features"])
        return list(keyed.keys()), list(keyed.stride_per_key()), PooledFeatures.expands(keyed)

    def make_lookup(self, features: object) -> FeatureLookup:
        if self.engine.waits:
            self.engine.need_rows()
        if self.observer is not None and not self.collective:
            # A prefetcher that learns what is looked up will leave it on the host.
            keyed = as_keyed_jagged_tensor(features)
            features = keyed_on_host(keyed, self.engine.device_name, warns=False)
        return self.lookups.make(features)
