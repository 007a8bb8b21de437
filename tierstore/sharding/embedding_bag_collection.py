"""EmbeddingBagCollection whose tables are cut over the ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore.config import TierConfig
from tierstore.errors import ConfigError, InputError
from tierstore.modules.collection import FeatureIds
from tierstore.modules.configs import EmbeddingBagConfig, PoolingType
from tierstore.modules.embedding_bag_collection import EmbeddingBagCollection
from tierstore.modules.inputs import Bags, pooled_lookup
from tierstore.modules.lookup import MODES
from tierstore.optim import SGD, OptimizerSpec
from tierstore.placement import ShardingPlan
from tierstore.sharding.collection import ShardedCollection, ShardedLookup
from tierstore.sharding.commits import Commits
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.input_exchange import InputExchange
from tierstore.sharding.output_exchange import OutputExchange, WeightExchange
from tierstore.sparse import KeyedTensor, as_keyed_jagged_tensor


class ShardedEmbeddingBagCollection(ShardedCollection, EmbeddingBagCollection):
    """KeyedJaggedTensor of this rank's part of the batch → its KeyedTensor, from the tables of all ranks.

    As EmbeddingBagCollection of the whole batch (the ranks' parts one after another), with every gradient
    divided by the number of ranks. All ranks make it, and call forward and backward, in the same order.

    Args:
        tables, is_weighted, optimizer, seed: as for EmbeddingBagCollection, the same on all ranks.
        plan: which shards are on which rank; it may have other collections' tables too.
        env: the ranks.
        config: budgets of one rank, where the plan states no bytes; ``path`` gets a folder for every rank.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        plan: ShardingPlan,
        env: ShardingEnv,
        is_weighted: bool = False,
        *,
        config: TierConfig | None = None,
        optimizer: OptimizerSpec | None = SGD(),  # noqa: B008  (immutable)
        seed: int = 0,
        _commits: Commits | None = None,
        _name: str = "",
    ) -> None:
        ShardedCollection.__init__(
            self, tables, plan, env, "embedding_bags", config, optimizer, seed, _commits, _name
        )
        self._is_weighted = is_weighted
        self._pooled_by: list[PoolingType] = [feature.config.pooling for feature in self._features]  # type: ignore[attr-defined]
        for number, pooling in enumerate(self._pooled_by):
            name = self._features[number].config.name
            if pooling is PoolingType.MAX and self.routing.cut_by_rows[number]:
                raise ConfigError(f"table {name!r}: max pooling cannot be cut by rows; use another cut")
            if pooling is PoolingType.MAX and is_weighted:
                raise ConfigError(f"table {name!r}: max pooling has no weights; use is_weighted=False")
        self._dims = [feature.config.embedding_dim for feature in self._features]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def _checked(self, features: Any) -> list[FeatureIds]:
        keyed = as_keyed_jagged_tensor(features)
        found = self._feature_ids(keyed)
        counts = {f.name: 0 if f.lengths is None else len(f.lengths) for f in found}
        if len(set(counts.values())) > 1 and not self._expands(keyed):
            raise InputError(f"features have different batch sizes, and no inverse indices: {counts}")
        self._weights(keyed)
        self._inverse_rows(keyed)
        return found

    def finish_exchange(self, exchange: InputExchange) -> ShardedLookup:
        arrived = exchange.receive()
        at = self._offsets(exchange)
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
        return ShardedLookup(
            lookup.parts, lookup.out_shape, lookup.features, lookup.counts, exchange=exchange
        )

    def _mode(self, feature: int) -> int:
        """Means of tables cut by rows are sums here, divided by the rank that has the whole bag."""
        pooling = self._pooled_by[feature]
        if pooling is PoolingType.MEAN and self.routing.cut_by_rows[feature]:
            pooling = PoolingType.SUM
        return MODES[pooling.value.lower()]

    def _answered(self, exchange: InputExchange) -> np.ndarray:
        """Floats by own request and rank that asks."""
        own = self.routing.own
        bags = exchange.bags.T[[request.feature for request in own]].reshape(len(own), self.env.world_size)
        return bags * np.array([[request.width] for request in own], np.int64).reshape(len(own), 1)

    def _offsets(self, exchange: InputExchange) -> np.ndarray:
        """Where each answer begins: by rank, by request; behind them those of replicas, the same way."""
        floats = self._answered(exchange)
        replica = np.array([request.replica for request in self.routing.own], bool)
        offsets = np.zeros_like(floats)
        at = 0
        for kind in (~replica, replica):
            flat = floats[kind].T.reshape(-1)
            ends = at + np.cumsum(flat)
            offsets[kind] = (ends - flat).reshape(self.env.world_size, -1).T
            at += int(flat.sum())
        return offsets

    def forward(self, features: Any) -> KeyedTensor:
        """Pooled rows, (B, sum of dims) float32, of this rank's part of the batch.

        Raises InputError on every rank if the input of one is wrong.
        """
        lookup = self._find_lookup(features)
        assert isinstance(lookup, ShardedLookup)
        keyed = as_keyed_jagged_tensor(features)
        exchange = lookup.exchange
        weights = self._weights(keyed)
        local = self._local_output(lookup, weights, exchange)
        counts = exchange.bags[self.env.rank].tolist()
        expected = [counts[answer.feature] * answer.width for answer in self.routing.answers]
        floats = self._floats(self._answered(exchange).tolist(), expected)
        received, replicas = OutputExchange.apply(local, self.env, floats)
        split = torch.cat([received, replicas]) if len(replicas) else received
        answers = [
            block.view(counts[answer.feature], answer.width)
            for block, answer in zip(split.split(expected), self.routing.answers, strict=True)
        ]
        values = self._columns_of_features(answers, exchange, self._inverse_rows(keyed))
        return KeyedTensor([feature.output for feature in self._features], list(self._dims), values)

    def _columns_of_features(
        self, answers: list[Tensor], exchange: InputExchange, inverse: list[Tensor] | None
    ) -> Tensor:
        blocks: list[Tensor] = []
        for number, pooling in enumerate(self._pooled_by):
            columns = self._assembled(number, answers)
            if pooling is PoolingType.MEAN and self.routing.cut_by_rows[number]:
                lengths = torch.from_numpy(exchange.lengths[number]).clamp(min=1).unsqueeze(1)
                columns = [column / lengths for column in columns]
            if inverse is not None:
                columns = [column.index_select(0, inverse[number]) for column in columns]
            blocks += columns
        return torch.cat(blocks, dim=1)

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
        if not counted.all():  # replicas on other ranks compute the same gradients once more
            picked = torch.where(torch.from_numpy(counted), picked, picked.detach())
        return WeightExchange.apply(picked, self.env, *exchange.weight_sizes())
