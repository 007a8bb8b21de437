"""EmbeddingCollection: the rows of many features one by one, from tables in tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tierstore.config import TierConfig
from tierstore.modules.collection import Collection
from tierstore.modules.compiling import opaque
from tierstore.modules.configs import EmbeddingConfig
from tierstore.modules.inputs import FeatureLookup, sequence_lookup
from tierstore.modules.tables import SharedEngine
from tierstore.optim import NOT_GIVEN, OptimizerSpec
from tierstore.sparse import JaggedTensor, as_keyed_jagged_tensor


class EmbeddingCollection(Collection):
    """KeyedJaggedTensor → dict of JaggedTensors: torchrec's EmbeddingCollection, with tables in tiers.

    Its keys are the features in the order of the configuration, ``feature@table`` if several tables have it.
    State dicts have ``embeddings.<table>.weight``. The backward pass applies ``optimizer`` to the rows.

    Args:
        tables: EmbeddingConfigs, ours or torchrec's; dims may differ.
        device: None or the CPU.
        need_indices: the ids are the ``weights()`` of the JaggedTensors.
        use_gather_select, use_gather_select_per_sharding: accepted, without effect.
        config, optimizer, seed: as for EmbeddingBagCollection.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        device: Any = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: Any = None,
        *,
        config: TierConfig | None = None,
        optimizer: OptimizerSpec | None = NOT_GIVEN,
        seed: int = 0,
        _shared: SharedEngine | None = None,
    ) -> None:
        super().__init__(tables, device, "embeddings", config, optimizer, seed, _shared)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether the ids are returned too."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """The dim of all tables; -1 if they differ."""
        dims = {config.embedding_dim for config in self._configs}
        return dims.pop() if len(dims) == 1 else -1

    def embedding_names_by_table(self) -> list[list[str]]:
        """For every table the names of its features in the output."""
        return [
            [feature.output for feature in self._features if feature.config is config]
            for config in self._configs
        ]

    def make_lookup(self, features: Any) -> FeatureLookup:
        return sequence_lookup(self.engine, self._feature_ids(as_keyed_jagged_tensor(features)))

    @opaque
    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """For every feature its rows, (ids, dim) float32, with the lengths of its bags.

        Args:
            features: a KeyedJaggedTensor, ours or torchrec's, with all features; other keys are ignored.
        """
        keyed = as_keyed_jagged_tensor(features)
        lookup = self._find_lookup(keyed)
        assert isinstance(lookup, FeatureLookup)
        pieces: list[Tensor] = self._split(lookup, self._sequence(lookup), lookup.counts)
        found = {}
        for feature, rows in zip(self._features, pieces, strict=True):
            part = keyed[feature.name]
            found[feature.output] = JaggedTensor(
                rows, part.values() if self._need_indices else None, part.lengths()
            )
        return found
