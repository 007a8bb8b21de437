"""EmbeddingCollection whose tables are cut over the ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tierstore.modules.collection import FeatureIds
from tierstore.modules.compiling import opaque
from tierstore.modules.configs import EmbeddingConfig
from tierstore.modules.embedding_collection import EmbeddingCollection
from tierstore.placement import ShardingPlan
from tierstore.sharding.collection import ShardedCollection
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.input_exchange import InputExchange
from tierstore.sharding.lookups import ShardedLookup
from tierstore.sparse import JaggedTensor, as_keyed_jagged_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tierstore.sharding.collection import Options


class ShardedEmbeddingCollection(ShardedCollection, EmbeddingCollection):
    """KeyedJaggedTensor of this rank's part of the batch → its rows, from the tables of all ranks.

    As EmbeddingCollection of the whole batch (feature by feature the ranks' parts one after another), with
    every gradient divided by the number of ranks. All ranks make it, and call forward and backward, in the
    same order.

    Args:
        tables, need_indices: as for EmbeddingCollection, the same on all ranks.
        plan, env, options: as for ShardedCollection.
    """

    _views = "embeddings"
    _rows_only = True

    def __init__(
        self,
        tables: Sequence[Any],
        plan: ShardingPlan,
        env: ShardingEnv,
        need_indices: bool = False,
        **options: Unpack[Options],
    ) -> None:
        ShardedCollection.__init__(self, tables, plan, env, **options)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._configs

    def _checked(self, features: Any) -> list[FeatureIds]:
        return self._feature_ids(as_keyed_jagged_tensor(features))

    def finish_exchange(self, exchange: InputExchange) -> ShardedLookup:
        return self._row_lookup(exchange)

    @opaque
    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """For every feature its rows, (ids, dim) float32, with the lengths of its bags, of this rank's part.

        Raises InputError on every rank if the input of one is wrong.
        """
        with self.env.peers.in_step():
            return self._rows_by_feature(features)

    def _rows_by_feature(self, features: Any) -> dict[str, JaggedTensor]:
        lookup = self._find_lookup(features)
        assert isinstance(lookup, ShardedLookup)
        keyed = as_keyed_jagged_tensor(features)
        found = {}
        rows = self._exchanged_rows(lookup)
        for number, feature in enumerate(self._features):
            part, inverse = keyed[feature.name], lookup.exchange.inverse
            found[feature.output] = JaggedTensor(
                rows[number].index_select(0, inverse[number]) if inverse else rows[number],
                part.values() if self._need_indices else None,
                part.lengths(),
            )
        return found
