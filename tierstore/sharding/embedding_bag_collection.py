"""EmbeddingBagCollection whose tables are cut over the ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierstore.modules.compiling import opaque
from tierstore.modules.configs import EmbeddingBagConfig
from tierstore.modules.features import PooledFeatures
from tierstore.placement import ShardingPlan
from tierstore.sharding.collection import ShardedCollection
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.opening import ShardingOptions, open_shards
from tierstore.sharding.pooled_lookups import ExchangedPooling
from tierstore.sparse import KeyedTensor


class ShardedEmbeddingBagCollection(ShardedCollection):
    """Maps a KeyedJaggedTensor of this rank's part of the batch to a KeyedTensor, with the tables of all
    ranks.

    The collection equals an EmbeddingBagCollection of the whole batch (the ranks' parts one after another),
    with every gradient divided by the number of ranks. All ranks make it, and call forward and backward, in
    the same order.

    Args:
        tables, is_weighted: as for EmbeddingBagCollection, the same on all ranks.
        plan: which shards are on which rank; it may have other collections' tables too.
        env: the ranks.
        options: budgets, optimizer, seed, and how the ranks exchange rows.
    """

    views_name = "embedding_bags"
    features: PooledFeatures
    lookups: ExchangedPooling

    def __init__(
        self,
        tables: Sequence[Any],
        plan: ShardingPlan,
        env: ShardingEnv,
        is_weighted: bool = False,
        options: ShardingOptions | None = None,
    ) -> None:
        kind = (type(self).__name__, is_weighted)
        opened = open_shards(
            kind, tables, lambda c: PooledFeatures(c, is_weighted), plan, env, options or ShardingOptions()
        )
        super().__init__(opened, ExchangedPooling(opened))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables."""
        return self.configs

    def is_weighted(self) -> bool:
        """Return whether rows are multiplied by the weights of the input."""
        return self.features.is_weighted

    @opaque
    def forward(self, features: Any) -> KeyedTensor:
        """Return the pooled rows, (B, sum of dims) float32, of this rank's part of the batch.

        Raises InputError on every rank if the input of one is wrong.
        """
        values = self.lookups.pooled(self, features)
        return KeyedTensor(list(self.features.outputs), list(self.features.dims), values)
