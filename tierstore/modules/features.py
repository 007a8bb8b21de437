"""The features of a collection: which tables they are looked up in, and what a batch has of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tierstore.cache.engine import Table
from tierstore.errors import ConfigError, InputError
from tierstore.initializers import of_kind
from tierstore.modules.bounds import KeyBounds
from tierstore.modules.configs import TABLE_DTYPE_OF, BaseEmbeddingConfig, PoolingType, from_torchrec
from tierstore.modules.inputs import Bags, checked_ids
from tierstore.modules.parts import MODES
from tierstore.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class Feature:
    """One feature of one table. ``output``: its name in the result; ``table``: the table's number."""

    name: str
    output: str
    config: BaseEmbeddingConfig
    table: int

    @cached_property
    def title(self) -> str:
        """The feature's name in messages."""
        return f"feature {self.name!r}"


class Features:
    """The tables of a collection, and the features that are looked up in them, in the configuration's order.

    Raises ConfigError if two tables or two outputs have the same name.
    """

    def __init__(self, tables: Sequence[object]) -> None:
        self.configs: list[Any] = [from_torchrec(table) for table in tables]
        _check_names(self.configs)
        self.all = _features(self.configs)
        self.names = [feature.name for feature in self.all]
        """The features' names in the input."""
        self.outputs = [feature.output for feature in self.all]
        """The features' names in the output: ``feature@table`` if several tables have the feature."""
        self.number_of = {name: number for number, name in enumerate(self.outputs)}
        """The features' numbers by their names in the output."""
        self.dims = [feature.config.embedding_dim for feature in self.all]
        self.bounds = [feature.config.num_embeddings for feature in self.all]
        self.modes = [0] * len(self.all)
        """How bags are pooled; where rows are returned one by one nothing asks."""
        self._key_bounds: KeyBounds | None = None
        self.bounds_ids = False
        """Whether ids that are out of range may be no error."""

    def tables(self) -> list[Table]:
        """Return the tables as an engine takes them."""
        return [table_of(config) for config in self.configs]

    def outputs_by_table(self) -> list[list[str]]:
        """Return the names in the output of every table's features."""
        return [[feature.output for feature in self.all if feature.config is c] for c in self.configs]

    def common_dim(self) -> int:
        """Return the embedding_dim of all tables; -1 if they differ."""
        dims = {config.embedding_dim for config in self.configs}
        return dims.pop() if len(dims) == 1 else -1

    def ids_of(self, keyed: KeyedJaggedTensor, tables: Sequence[int]) -> list[Bags]:
        """Return the ids in ``keyed`` of every feature, in bags. ``tables``: the engine's number of each
        feature's table.

        Raises InputError if a feature is missing or doubled, or if lengths do not fit.
        """
        values = self.values_of(keyed)
        keyed.sync()
        lengths = keyed.lengths().to(torch.int64).numpy()
        if len(lengths) and lengths.min() < 0:
            keyed.validate()  # which says where
        at, bags = keyed.offset_per_key(), keyed.lengths_offset_per_key()
        pieces = values.split(keyed.length_per_key())
        return [
            Bags(feature.title, table, pieces[key], at[key], lengths=lengths[bags[key] : bags[key + 1]])
            for feature, table, key in zip(self.all, tables, self.keys_of(keyed), strict=True)
        ]

    def check_bounds(self, modes: Mapping[str, str]) -> None:
        """Let ids that are out of range do what ``modes`` say, by table: of config.BOUNDS_CHECKS."""
        self._key_bounds = KeyBounds(self.configs, modes) or None
        self.bounds_ids = self._key_bounds is not None

    def values_of(self, keyed: KeyedJaggedTensor) -> Tensor:
        """Return the ids of all keys, checked and in contiguous memory."""
        values = checked_ids("values of the KeyedJaggedTensor", keyed.values())
        if values.dim() != 1:
            raise InputError(f"values of the KeyedJaggedTensor must have one dimension, got {values.dim()}")
        return values if self._key_bounds is None else self._key_bounds.kept(keyed, values)

    def keys_of(self, keyed: KeyedJaggedTensor) -> list[int]:
        """Return the number of every feature's key. Raises InputError if a key is missing or doubled."""
        number_of = keyed.index_per_key()
        if len(number_of) < len(keyed.keys()):
            keyed.validate()  # which says what is doubled
        for feature in self.all:
            if feature.name not in number_of:
                raise InputError(
                    f"{feature.title} of table {feature.config.name!r} is missing; the "
                    f"KeyedJaggedTensor has {keyed.keys()}"
                )
        return [number_of[feature.name] for feature in self.all]


class PooledFeatures(Features):
    """Features whose bags are pooled into one vector each.

    ``is_weighted``: rows are multiplied by the weights of the input. Raises ConfigError for weighted features
    of tables with max pooling.
    """

    def __init__(self, tables: Sequence[object], is_weighted: bool) -> None:
        super().__init__(tables)
        self.is_weighted = is_weighted
        for table in self.configs:
            if is_weighted and table.pooling is PoolingType.MAX:
                raise ConfigError(f"table {table.name!r}: max pooling has no weights; use is_weighted=False")
        pooling_of = {table.name: table.pooling for table in self.configs}
        self.poolings: list[PoolingType] = [pooling_of[feature.config.name] for feature in self.all]
        self.modes = [MODES[pooling.value.lower()] for pooling in self.poolings]
        ends, self.width = accumulate(self.dims), sum(self.dims)
        self.side_by_side = [(end - dim, self.width) for end, dim in zip(ends, self.dims, strict=True)]
        """The first float and the stride of every feature's vectors in an output that has a row for each
        example."""
        self.takes_max = PoolingType.MAX in self.poolings

    def check_counts(self, keyed: KeyedJaggedTensor, counts: Sequence[int]) -> None:
        """Raise InputError if the features' numbers of bags differ and there are no inverse indices."""
        if len(set(counts)) > 1 and not self.expands(keyed):
            sizes = dict(zip(self.names, counts, strict=True))
            raise InputError(
                f"features have different batch sizes: {sizes}; give inverse_indices, or equal sizes"
            )

    def places(self, counts: Sequence[int], expands: bool) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
        """Return the first float and the stride of every feature's vectors in the output, and its shape."""
        if expands:
            # every feature's vectors in a block of its own, one after another
            starts = [0, *accumulate(n * dim for n, dim in zip(counts, self.dims, strict=True))]
            return list(zip(starts, self.dims, strict=False)), (starts[-1],)
        return self.side_by_side, (counts[0] if counts else 0, self.width)

    @staticmethod
    def expands(keyed: KeyedJaggedTensor) -> bool:
        """Return whether examples share bags, as inverse indices say."""
        inverse = keyed.inverse_indices_or_none()
        return inverse is not None and inverse[1].numel() > 0

    def weights_of(self, keyed: KeyedJaggedTensor) -> Tensor | None:
        """Return the weights (ids,) of weighted features. Raises InputError if there are none."""
        if not self.is_weighted:
            return None
        weights = keyed.weights_or_none()
        if weights is None:
            raise InputError(
                "the collection is weighted, but the KeyedJaggedTensor has no weights; give weights=..."
            )
        if weights.dim() != 1 or not weights.is_floating_point():
            raise InputError(
                f"weights of the KeyedJaggedTensor must be floats in one dimension, got {weights.dtype} "
                f"of shape {tuple(weights.shape)}"
            )
        return weights

    def inverse_rows(self, keyed: KeyedJaggedTensor) -> list[Tensor] | None:
        """Return for every feature which of its bags each example has; None without inverse indices."""
        if not self.expands(keyed):
            return None
        keyed.validate()
        names, indices = keyed.inverse_indices()
        row_of = {name: row for row, name in enumerate(names)}
        missing = [name for name in self.names if name not in row_of]
        if missing:
            raise InputError(f"the inverse indices have no row for feature {missing[0]!r}; they have {names}")
        return [indices[row_of[name]] for name in self.names]

    def expanded(self, flat: Tensor, counts: Sequence[int], rows: Sequence[Tensor]) -> Tensor:
        """Return blocks of deduplicated vectors as (examples, sum of dims)."""
        blocks = flat.split([n * dim for n, dim in zip(counts, self.dims, strict=True)])
        parts = zip(blocks, counts, self.dims, rows, strict=True)
        return torch.cat(
            [block.view(n, dim).index_select(0, at.to(flat.device)) for block, n, dim, at in parts], dim=1
        )


def table_of(config: BaseEmbeddingConfig) -> Table:
    """Return the table that ``config`` describes."""
    dtype = TABLE_DTYPE_OF[config.data_type]
    rule = of_kind(*config.init_rule())
    return Table(config.name, config.num_embeddings, config.embedding_dim, rule, dtype=dtype)


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


def _features(configs: Sequence[BaseEmbeddingConfig]) -> list[Feature]:
    """Return the features in the order of the tables."""
    counts = Counter(feature for config in configs for feature in config.feature_names)
    found = [
        Feature(feature, f"{feature}@{config.name}" if counts[feature] > 1 else feature, config, number)
        for number, config in enumerate(configs)
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
