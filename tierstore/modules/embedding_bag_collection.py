"""EmbeddingBagCollection: pooled embeddings of many features, from tables in tiers."""

from __future__ import annotations

from collections.abc import Sequence

from torch.types import Device

from tierstore.config import TierConfig
from tierstore.modules.collection import Collection, check_bounds
from tierstore.modules.compiling import compiled_as
from tierstore.modules.configs import EmbeddingBagConfig
from tierstore.modules.features import PooledFeatures
from tierstore.modules.local_lookups import LocalPooling
from tierstore.modules.tables import Opening, SharedEngine, is_meta, open_tables
from tierstore.modules.traced import bags_of_keys, jagged_of, traced_pooling
from tierstore.optim import NOT_GIVEN
from tierstore.optim.tables import Optimizers
from tierstore.sparse import KeyedTensor, as_keyed_jagged_tensor


class EmbeddingBagCollection(Collection):
    """KeyedJaggedTensor → KeyedTensor: torchrec's EmbeddingBagCollection, with tables in tiers.

    The keys of the output are the features in the order of the configuration, ``feature@table`` if several
    tables have it. State dicts have ``embedding_bags.<table>.weight``. The backward pass applies
    ``optimizer`` to the rows.

    Args:
        tables: EmbeddingBagConfigs, ours or torchrec's; dims and poolings may differ.
        is_weighted: rows are multiplied by the weights of the KeyedJaggedTensor, which may require gradients.
        device: where ``hbm`` is, and outputs are: the CPU or a GPU; None: as ``config`` says. "meta": a
            description without rows, to be sharded, or to be given rows by ``to_empty(device=)``.
        config: budgets and places of the tiers; the default one if None.
        optimizer: one of tierstore.optim, without which tables can only be read; None freezes them.
        seed: initial rows are a function of this and the table's name.
    """

    views_name = "embedding_bags"
    features: PooledFeatures
    lookups: LocalPooling

    def __init__(
        self,
        tables: Sequence[object],
        is_weighted: bool = False,
        device: Device = None,
        *,
        config: TierConfig | None = None,
        optimizer: Optimizers = NOT_GIVEN,
        seed: int = 0,
        _shared: SharedEngine | None = None,
    ) -> None:
        features = PooledFeatures(tables, is_weighted)
        on_meta = is_meta(device)
        place = None if on_meta else device
        opening = Opening(config, optimizer, seed, _shared, place, on_meta, self.opens_late)
        opened = open_tables(features.tables(), opening)
        check_bounds(features, opened)
        super().__init__(opened, optimizer, features, LocalPooling(features, opened))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables."""
        return self.configs

    def is_weighted(self) -> bool:
        """Return whether rows are multiplied by the weights of the input."""
        return self.features.is_weighted

    def _traced(self, features: object) -> KeyedTensor:
        keyed, own = as_keyed_jagged_tensor(features), self.features
        bags = bags_of_keys(keyed)
        if bags is None:
            return NotImplemented
        shape = (bags, own.width)
        values = traced_pooling(self, jagged_of(keyed), own.weights_of(keyed), shape)
        return KeyedTensor(list(own.outputs), list(own.dims), values)

    @compiled_as(_traced)
    def forward(self, features: object) -> KeyedTensor:
        """Return the pooled rows, (B, sum of dims) float32; empty bags give zeros.

        Args:
            features: a KeyedJaggedTensor, ours or torchrec's, with all features; other keys are ignored.
        """
        lookups = self.lookups  # whose attributes are found sooner than those of a module
        values, own = lookups.pooled(self, features), lookups.features
        return KeyedTensor.of_parts(list(own.outputs), list(own.dims), values)
