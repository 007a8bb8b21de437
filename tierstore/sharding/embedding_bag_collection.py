"""EmbeddingBagCollection whose tables are cut over the ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from tierstore.errors import ConfigError
from tierstore.modules.collection import FeatureIds
from tierstore.modules.compiling import opaque
from tierstore.modules.configs import EmbeddingBagConfig, PoolingType
from tierstore.modules.embedding_bag_collection import EmbeddingBagCollection
from tierstore.modules.inputs import Bags, pooled_lookup
from tierstore.modules.lookup import MODES
from tierstore.placement import ShardingPlan
from tierstore.sharding.collection import ShardedCollection
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.input_exchange import InputExchange
from tierstore.sharding.lookups import ShardedLookup
from tierstore.sharding.output_exchange import OutputExchange, WeightExchange
from tierstore.sparse import KeyedTensor, as_keyed_jagged_tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tierstore.sharding.collection import Options


class ShardedEmbeddingBagCollection(ShardedCollection, EmbeddingBagCollection):
    """KeyedJaggedTensor of this rank's part of the batch → its KeyedTensor, from the tables of all ranks.

    As EmbeddingBagCollection of the whole batch (the ranks' parts one after another), with every gradient
    divided by the number of ranks. All ranks make it, and call forward and backward, in the same order.

    Args:
        tables, is_weighted: as for EmbeddingBagCollection, the same on all ranks.
        plan, env, options: as for ShardedCollection.
    """

    _views = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[Any],
        plan: ShardingPlan,
        env: ShardingEnv,
        is_weighted: bool = False,
        **options: Unpack[Options],
    ) -> None:
        ShardedCollection.__init__(self, tables, plan, env, is_weighted=is_weighted, **options)
        self._set_pooling(is_weighted)
        self._rows_only = self.comms.dedup
        for number, pooling in enumerate(self._poolings):
            if pooling is PoolingType.MAX and self.routing.cut_by_rows[number] and not self._rows_only:
                self.close_here()
                raise ConfigError(
                    f"table {self._features[number].config.name!r}: max pooling cannot be cut by rows; use "
                    "another cut, or CommsConfig(dedup=True)"
                )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def _checked(self, features: Any) -> list[FeatureIds]:
        keyed = as_keyed_jagged_tensor(features)
        found = self._feature_ids(keyed)
        self._bag_counts(keyed, found)
        self._weights(keyed)
        self._inverse_rows(keyed)
        return found

    def _weights_learn(self, features: Any) -> bool:
        weights = self._weights(as_keyed_jagged_tensor(features))
        return weights is not None and weights.requires_grad

    def finish_exchange(self, exchange: InputExchange) -> ShardedLookup:
        if self._rows_only:
            return self._row_lookup(exchange)
        arrived = exchange.receive()
        at = self._offsets(self._answered(exchange))
        bags = [
            Bags(
                f"{self._features[request.feature].name!r} of rank {rank}",
                self._local[number],
                piece.ids,
                piece.begin,
                lengths=piece.lengths,
                mode=self._mode(request.feature),
                out_offset=int(at[number, rank]),
                out_stride=request.width,
            )
            for number, request in enumerate(self.routing.own)
            for rank, piece in enumerate(arrived[number])
        ]
        lookup = pooled_lookup(self.engine, bags, (int(self._answered(exchange).sum()),))
        return self._lookup(lookup, exchange)

    def _divides(self, feature: int) -> bool:
        """Means of tables cut by rows are sums here, divided by the rank that has the whole bag."""
        return self._poolings[feature] is PoolingType.MEAN and self.routing.cut_by_rows[feature]

    def _mode(self, feature: int) -> int:
        return MODES["sum"] if self._divides(feature) else self._modes[feature]

    def _answered(self, exchange: InputExchange) -> NDArray[np.int64]:
        """Floats by own request and rank that asks."""
        own = self.routing.own
        bags = exchange.bags.T[[request.feature for request in own]].reshape(len(own), self.env.world_size)
        return bags * self._widths

    @opaque
    def forward(self, features: Any) -> KeyedTensor:
        """Pooled rows, (B, sum of dims) float32, of this rank's part of the batch.

        Raises InputError on every rank if the input of one is wrong.
        """
        with self.env.peers.in_step():
            return self._pooled_rows(features)

    def _pooled_rows(self, features: Any) -> KeyedTensor:
        lookup = self._find_lookup(features)
        assert isinstance(lookup, ShardedLookup)
        keyed = as_keyed_jagged_tensor(features)
        exchange, weights, inverse = lookup.exchange, self._weights(keyed), self._inverse_rows(keyed)
        counts = [len(lengths) for lengths in exchange.lengths]
        if self._rows_only:
            values = self._pooled_here(lookup, weights, inverse)
        else:
            places, shape = self._places(counts, inverse is not None)
            divisors = [self._divisor(number, exchange) for number in range(len(counts))]
            plan = self._output_plan(exchange, self._answered(exchange), counts, places, shape, divisors)
            values = OutputExchange.apply(self._local_output(lookup, weights, exchange), plan)
            if inverse is not None:
                values = self._expanded(values, counts, inverse)
        return KeyedTensor([feature.output for feature in self._features], list(self._dims), values)

    def _divisor(self, feature: int, exchange: InputExchange) -> Tensor | None:
        if not self._divides(feature):
            return None
        return torch.from_numpy(exchange.lengths[feature]).clamp(min=1).unsqueeze(1)

    def _local_output(self, lookup: ShardedLookup, weights: Tensor | None, exchange: InputExchange) -> Tensor:
        if weights is None:
            return self._pooled(lookup, None)
        arrived = self._exchanged_weights(weights, exchange)
        # a rank without shards must join the exchange of the weights' gradients too
        return torch.cat([self._pooled(lookup, arrived), arrived[:0]])

    def _exchanged_weights(self, weights: Tensor, exchange: InputExchange) -> Tensor:
        """The weights of the ids that arrived, in their order."""
        positions, counted = exchange.positions()
        picked = weights.index_select(0, torch.from_numpy(positions))
        if exchange.weights_learn and not picked.requires_grad:  # those of another rank do
            picked.requires_grad_()
        if not counted.all():  # replicas on other ranks compute the same gradients once more
            picked = torch.where(torch.from_numpy(counted), picked, picked.detach())
        return WeightExchange.apply(picked, self.env, *exchange.weight_sizes())

    def _pooled_here(
        self, lookup: ShardedLookup, weights: Tensor | None, inverse: list[Tensor] | None
    ) -> Tensor:
        """Pools rows that were asked for one by one."""
        exchange = lookup.exchange
        blocks = []
        for number, rows in enumerate(self._exchanged_rows(lookup)):
            begin, lengths = exchange.begins[number], exchange.lengths[number]
            at = exchange.inverse[number]
            pooling = self._poolings[number]
            own = None if weights is None else weights[begin : begin + len(at)].to(torch.float32)
            mean = pooling is PoolingType.MEAN and own is not None
            offsets = torch.from_numpy(np.cumsum(lengths) - lengths).to(at.dtype)
            mode = "sum" if mean else pooling.value.lower()
            block = embedding_bag(at, rows, offsets, mode=mode, per_sample_weights=own)
            if mean:  # torch has weights with sums only
                block = block / torch.from_numpy(lengths).clamp(min=1).unsqueeze(1)
            blocks.append(block if inverse is None else block.index_select(0, inverse[number]))
        return torch.cat(blocks, dim=1)
