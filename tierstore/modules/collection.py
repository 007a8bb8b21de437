"""What the two collections share: tables, features, and what a batch has of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tierstore.cache.engine import Table
from tierstore.config import TierConfig
from tierstore.errors import ConfigError, InputError
from tierstore.initializers import Init
from tierstore.modules.base import TieredModule
from tierstore.modules.configs import BaseEmbeddingConfig, from_torchrec
from tierstore.modules.inputs import FeatureLookup, Ids, checked_ids
from tierstore.modules.tables import HasWeight, SharedEngine, check_placement, open_tables
from tierstore.optim import OptimizerSpec
from tierstore.sparse import KeyedJaggedTensor, as_keyed_jagged_tensor


@dataclass(frozen=True)
class FeatureTable:
    """One feature of one table. ``output``: its name in the result; ``index``: the table's in the engine."""

    name: str
    output: str
    config: BaseEmbeddingConfig
    index: int


@dataclass(frozen=True)
class FeatureIds(Ids):
    """A feature's ids in a batch, and the lengths of its bags."""

    lengths: NDArray[np.int64] | None = None


class TableView(HasWeight):
    """One table of a collection: its place in the module tree, for its rows and its state dict entry."""

    def __init__(self, collection: Collection, config: BaseEmbeddingConfig, index: int) -> None:
        super().__init__()
        # not as a submodule, which the collection is not
        object.__setattr__(self, "_collection", collection)
        self.name = config.name
        self.num_embeddings = config.num_embeddings
        self.embedding_dim = config.embedding_dim
        self._index = index

    @property
    def table(self) -> Table:
        return self._collection.engine.tables[self._index]

    def rows_version(self) -> str:
        return self._collection.engine.versions.of(self._index)

    def rows(self, ids: object) -> Tensor:
        """As TieredModule.rows."""
        return self._collection.rows(ids, self.name)

    def optimizer_rows(self, ids: object) -> dict[str, Tensor]:
        """As TieredModule.optimizer_rows."""
        return self._collection.optimizer_rows(ids, self.name)

    def load_rows(self, ids: object, weight: Tensor, optimizer: dict[str, Tensor] | None = None) -> None:
        """As TieredModule.load_rows."""
        self._collection.load_rows(ids, weight, optimizer, self.name)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class TableViews(nn.ModuleDict):
    """Views by table name; a table may be called like a method of the dictionary ("items", "type")."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        assert module is not None
        self._modules[name] = module


class Collection(TieredModule):
    """Tables by name, and features that are looked up in them, in the order of the configuration."""

    def __init__(
        self,
        tables: Sequence[Any],
        device: Any,
        views: str,
        config: TierConfig | None,
        optimizer: OptimizerSpec | None,
        seed: int,
        shared: SharedEngine | None,
    ) -> None:
        check_placement(device)
        self_configs = [from_torchrec(table) for table in tables]
        _check_names(self_configs)
        engine, indices = open_tables([table_of(c) for c in self_configs], config, optimizer, seed, shared)
        super().__init__(engine, indices, optimizer)
        self._configs: list[Any] = self_configs
        self._index_of = {c.name: index for c, index in zip(self_configs, indices, strict=True)}
        self._features = _features(self_configs, self._index_of)
        view_of = {c.name: TableView(self, c, self._index_of[c.name]) for c in self_configs}
        self.add_module(views, TableViews(view_of))
        self._show_parameters(list(view_of.values()))

    @property
    def device(self) -> torch.device:
        """Where outputs are."""
        return torch.device("cpu")

    def _table(self, name: str | None) -> int:
        if (name is None and len(self._tables) > 1) or (name is not None and name not in self._index_of):
            raise InputError(f"there is no table {name!r}; name one of {list(self._index_of)}")
        return self._tables[0] if name is None else self._index_of[name]

    def feature_names(self) -> list[str]:
        return [feature.name for feature in self._features]

    def lookup_inputs(self, features: Any) -> tuple[Tensor, ...]:
        keyed = as_keyed_jagged_tensor(features)
        return keyed.values(), keyed.lengths()

    def _feature_ids(self, keyed: KeyedJaggedTensor) -> list[FeatureIds]:
        """What ``keyed`` has for every feature; InputError if one is missing or doubled, or lengths
        do not fit."""
        values = checked_ids("values of the KeyedJaggedTensor", keyed.values())
        if values.dim() != 1:
            raise InputError(f"values of the KeyedJaggedTensor must have one dimension, got {values.dim()}")
        keyed.sync()
        lengths = keyed.lengths().to(torch.int64).numpy()
        if len(lengths) and lengths.min() < 0:
            keyed.validate()  # which says where
        position, at, bags = keyed.index_per_key(), keyed.offset_per_key(), keyed.lengths_offset_per_key()
        if len(position) < len(keyed.keys()):
            keyed.validate()  # which says what is doubled
        found = []
        for feature in self._features:
            key = position.get(feature.name)
            if key is None:
                raise InputError(
                    f"feature {feature.name!r} of table {feature.config.name!r} is missing; the "
                    f"KeyedJaggedTensor has {keyed.keys()}"
                )
            found.append(
                FeatureIds(
                    f"feature {feature.name!r}",
                    feature.index,
                    values[at[key] : at[key + 1]],
                    at[key],
                    lengths=lengths[bags[key] : bags[key + 1]],
                )
            )
        return found

    def _split(self, lookup: FeatureLookup, outputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Per feature its share of the parts' outputs, whose leading dimension is divided by ``sizes``."""
        pieces: list[Tensor | None] = [None] * len(self._features)
        for members, output in zip(lookup.features, outputs, strict=True):
            # one split node, since slices would each be a full gradient in the backward pass
            for number, piece in zip(members, output.split([sizes[m] for m in members]), strict=True):
                pieces[number] = piece
        return pieces  # type: ignore[return-value]


def table_of(config: BaseEmbeddingConfig) -> Table:
    return Table(config.name, config.num_embeddings, config.embedding_dim, Init(*config.init_rule()))


def _check_names(configs: Sequence[BaseEmbeddingConfig]) -> None:
    counts = Counter(config.name for config in configs)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ConfigError(f"Duplicate table name {repeated[0]}: every table of a collection needs its own")
    for name in counts:
        if not name or "." in name:
            raise ConfigError(
                f"table name {name!r} must not be empty nor contain a dot; state dicts use the dot"
            )


def _features(configs: Sequence[BaseEmbeddingConfig], index_of: dict[str, int]) -> list[FeatureTable]:
    """Features in the order of the tables; those of several tables are called feature@table in the output."""
    counts = Counter(feature for config in configs for feature in config.feature_names)
    found = [
        FeatureTable(
            feature,
            f"{feature}@{config.name}" if counts[feature] > 1 else feature,
            config,
            index_of[config.name],
        )
        for config in configs
        for feature in config.feature_names
    ]
    outputs = Counter(feature.output for feature in found)
    for output, count in outputs.items():
        if count > 1:
            raise ConfigError(
                f"two outputs would be called {output!r}, which is how a feature of several tables is called "
                "in the output; rename that feature or table"
            )
    return found
