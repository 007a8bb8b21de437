"""EmbeddingCollection whose tables are cut over the ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierstore.modules.compiling import opaque
from tierstore.modules.configs import EmbeddingConfig
from tierstore.modules.features import Features
from tierstore.modules.jagged_rows import JaggedRows
from tierstore.placement import ShardingPlan
from tierstore.sharding.collection import ShardedCollection
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.lookups import ExchangedRows
from tierstore.sharding.opening import ShardingOptions, open_shards
from tierstore.sparse import JaggedTensor, as_keyed_jagged_tensor


class ShardedEmbeddingCollection(ShardedCollection):
    """Maps a KeyedJaggedTensor of this rank's part of the batch to its rows, with the tables of all ranks.

    The collection equals an EmbeddingCollection of the whole batch (feature by feature the ranks' parts one
    after another), with every gradient divided by the number of ranks. All ranks make it, and call forward
    and backward, in the same order.

    Args:
        tables, need_indices: as for EmbeddingCollection, the same on all ranks.
        plan, env, options: as for ShardedEmbeddingBagCollection.
    """

    views_name = "embeddings"
    lookups: ExchangedRows

    def __init__(
        self,
        tables: Sequence[Any],
        plan: ShardingPlan,
        env: ShardingEnv,
        need_indices: bool = False,
        options: ShardingOptions | None = None,
    ) -> None:
        kind = (type(self).__name__,)
        opened = open_shards(kind, tables, Features, plan, env, options or ShardingOptions())
        super().__init__(opened, ExchangedRows(opened))
        self._need_indices = need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables."""
        return self.configs

    def need_indices(self) -> bool:
        """Return whether the ids are returned too."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the dim of all tables; -1 if they differ."""
        return self.features.common_dim()

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return for every table the names of its features in the output."""
        return self.features.outputs_by_table()

    @opaque
    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Return for every feature its rows, (ids, dim) float32, with the lengths of its bags.

        Both results are of this rank's part of the batch. Raises InputError on all ranks if one has a wrong
        input.
        """
        keyed, rows = as_keyed_jagged_tensor(features), self.lookups.rows(self, features)
        device = self.engine.device_name
        return JaggedRows(self.features, keyed, lambda: rows, device, self._need_indices).by_output()
