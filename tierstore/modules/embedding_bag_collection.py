"""EmbeddingBagCollection: pooled embeddings of many features, from tables in tiers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tierstore.config import TierConfig
from tierstore.errors import ConfigError, InputError
from tierstore.modules.collection import Collection, FeatureIds
from tierstore.modules.compiling import opaque
from tierstore.modules.configs import EmbeddingBagConfig, PoolingType
from tierstore.modules.inputs import Bags, FeatureLookup, pooled_lookup
from tierstore.modules.lookup import MODES
from tierstore.modules.tables import SharedEngine
from tierstore.optim import NOT_GIVEN, OptimizerSpec
from tierstore.sparse import KeyedJaggedTensor, KeyedTensor, as_keyed_jagged_tensor


class EmbeddingBagCollection(Collection):
    """KeyedJaggedTensor → KeyedTensor: torchrec's EmbeddingBagCollection, with tables in tiers.

    Its keys are the features in the order of the configuration, ``feature@table`` if several tables have it.
    State dicts have ``embedding_bags.<table>.weight``. The backward pass applies ``optimizer`` to the rows.

    Args:
        tables: EmbeddingBagConfigs, ours or torchrec's; dims and poolings may differ.
        is_weighted: rows are multiplied by the weights of the KeyedJaggedTensor, which may require gradients.
        device: None or the CPU.
        config: budgets and places of the tiers; ``TierConfig()`` if None.
        optimizer: one of tierstore.optim, without which tables can only be read; None freezes them.
        seed: initial rows are a function of this and the table's name.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool = False,
        device: Any = None,
        *,
        config: TierConfig | None = None,
        optimizer: OptimizerSpec | None = NOT_GIVEN,
        seed: int = 0,
        _shared: SharedEngine | None = None,
    ) -> None:
        super().__init__(tables, device, "embedding_bags", config, optimizer, seed, _shared)
        self._set_pooling(is_weighted)

    def _set_pooling(self, is_weighted: bool) -> None:
        self._is_weighted = is_weighted
        for table in self._configs:
            if is_weighted and table.pooling is PoolingType.MAX:
                raise ConfigError(f"table {table.name!r}: max pooling has no weights; use is_weighted=False")
        pooling_of = {table.name: table.pooling for table in self._configs}
        self._poolings = [pooling_of[feature.config.name] for feature in self._features]
        self._modes = [MODES[pooling.value.lower()] for pooling in self._poolings]
        self._dims = [feature.config.embedding_dim for feature in self._features]
        self._columns = [0, *accumulate(self._dims)]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether rows are multiplied by the weights of the input."""
        return self._is_weighted

    def make_lookup(self, features: Any) -> FeatureLookup:
        keyed = as_keyed_jagged_tensor(features)
        found = self._feature_ids(keyed)
        places, shape = self._places(self._bag_counts(keyed, found), self._expands(keyed))
        bags = [self._bags(number, f, *places[number]) for number, f in enumerate(found)]
        return pooled_lookup(self.engine, bags, shape)

    def _bag_counts(self, keyed: KeyedJaggedTensor, found: Sequence[FeatureIds]) -> list[int]:
        """Bags of every feature; InputError if they differ without inverse indices."""
        counts = [0 if feature.lengths is None else len(feature.lengths) for feature in found]
        if len(set(counts)) > 1 and not self._expands(keyed):
            sizes = dict(zip([feature.name for feature in self._features], counts, strict=True))
            raise InputError(f"features have different batch sizes, and no inverse indices: {sizes}")
        return counts

    def _places(self, counts: Sequence[int], expands: bool) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
        """First float and stride of every feature's vectors in the output, and the output's shape."""
        if expands:
            # every feature's vectors in a block of its own, one after another
            starts = [0, *accumulate(n * dim for n, dim in zip(counts, self._dims, strict=True))]
            return list(zip(starts, self._dims, strict=False)), (starts[-1],)
        columns = self._columns[-1]
        return [(column, columns) for column in self._columns], (counts[0] if counts else 0, columns)

    def _bags(self, number: int, ids: FeatureIds, offset: int, stride: int) -> Bags:
        assert ids.lengths is not None
        return Bags(
            ids.name,
            ids.table,
            ids.ids,
            ids.begin,
            lengths=ids.lengths,
            mode=self._modes[number],
            out_offset=offset,
            out_stride=stride,
        )

    @staticmethod
    def _expands(keyed: KeyedJaggedTensor) -> bool:
        inverse = keyed.inverse_indices_or_none()
        return inverse is not None and inverse[1].numel() > 0

    @opaque
    def forward(self, features: Any) -> KeyedTensor:
        """Pooled rows, (B, sum of dims) float32; empty bags give zeros.

        Args:
            features: a KeyedJaggedTensor, ours or torchrec's, with all features; other keys are ignored.
        """
        keyed = as_keyed_jagged_tensor(features)
        weights = self._weights(keyed)
        expand = self._inverse_rows(keyed)
        lookup = self._find_lookup(keyed)
        values = self._pooled(lookup, weights)
        if expand is not None:
            assert isinstance(lookup, FeatureLookup)
            values = self._expanded(values, lookup.counts, expand)
        return KeyedTensor([feature.output for feature in self._features], list(self._dims), values)

    def _weights(self, keyed: KeyedJaggedTensor) -> Tensor | None:
        if not self._is_weighted:
            return None
        weights = keyed.weights_or_none()
        if weights is None:
            raise InputError("the collection is weighted, but the KeyedJaggedTensor has no weights")
        if weights.dim() != 1 or not weights.is_floating_point():
            raise InputError(
                f"weights of the KeyedJaggedTensor must be floats in one dimension, got {weights.dtype} "
                f"of shape {tuple(weights.shape)}"
            )
        return weights

    def _inverse_rows(self, keyed: KeyedJaggedTensor) -> list[Tensor] | None:
        """For every feature which of its bags each example has; None without inverse indices."""
        if not self._expands(keyed):
            return None
        keyed.validate()
        names, indices = keyed.inverse_indices()
        row_of = {name: row for row, name in enumerate(names)}
        missing = [feature.name for feature in self._features if feature.name not in row_of]
        if missing:
            raise InputError(f"the inverse indices have no row for feature {missing[0]!r}; they have {names}")
        return [indices[row_of[feature.name]] for feature in self._features]

    def _expanded(self, flat: Tensor, counts: list[int], rows: list[Tensor]) -> Tensor:
        """Blocks of deduplicated vectors → (B, sum of dims)."""
        blocks = flat.split([n * dim for n, dim in zip(counts, self._dims, strict=True)])
        parts = zip(blocks, counts, self._dims, rows, strict=True)
        return torch.cat([block.view(n, dim).index_select(0, at) for block, n, dim, at in parts], dim=1)
