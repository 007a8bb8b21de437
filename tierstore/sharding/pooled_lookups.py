"""Pooled lookups that ask all ranks. The owners of rows pool them, or the rank that has the bags."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from tierstore.modules.base import TieredModule
from tierstore.modules.configs import PoolingType
from tierstore.modules.features import PooledFeatures
from tierstore.modules.gpu import brought
from tierstore.modules.inputs import Bags, pooled_lookup
from tierstore.modules.parts import MODES
from tierstore.sharding.input_exchange import InputExchange
from tierstore.sharding.lookups import ExchangedLookups, Layout, ShardedLookup, checked_features
from tierstore.sharding.opening import OpenShards
from tierstore.sharding.output_exchange import WeightExchange
from tierstore.sparse import as_keyed_jagged_tensor


class _WithWeights(torch.autograd.Function):
    """``apply(pooled, weights)`` → ``pooled``. The backward pass reaches the weights also on a rank without
    shards, which must join the exchange of their gradients."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, weights: Tensor) -> Tensor:
        ctx.count = len(weights)
        return pooled.view_as(pooled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_zeros(ctx.count)


class ExchangedPooling(ExchangedLookups):
    """Pools bags of the rows of all ranks. With ``dedup`` the owners give rows, and this rank pools them."""

    _features: PooledFeatures

    def __init__(self, opened: OpenShards) -> None:
        super().__init__(opened, rows_only=opened.options.comms.dedup)

    def checked(self, features: Any) -> list[Bags]:
        keyed, own = as_keyed_jagged_tensor(features), self._features
        found = checked_features(own, keyed)
        own.check_counts(keyed, [len(feature.lengths) for feature in found])
        own.weights_of(keyed)
        own.inverse_rows(keyed)
        return found

    def weights_learn(self, features: Any) -> bool:
        weights = self._features.weights_of(as_keyed_jagged_tensor(features))
        return weights is not None and weights.requires_grad

    def finish(self, exchange: InputExchange) -> ShardedLookup:
        if self.rows_only:
            return self.row_lookup(exchange)
        arrived = exchange.receive()
        answered = self._answered(exchange)
        at = self.offsets(answered)
        bags = [
            Bags(
                f"{self._features.all[request.feature].name!r} of rank {rank}",
                self._own_tables[number],
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
        return self.sharded(pooled_lookup(self._engine, bags, (int(answered.sum()),)), exchange)

    def _divides(self, feature: int) -> bool:
        """Return whether owners give sums, which the rank that has the whole bag divides into means."""
        is_mean = self._features.poolings[feature] is PoolingType.MEAN
        return is_mean and self.routing.cut_by_rows[feature]

    def _mode(self, feature: int) -> int:
        return MODES["sum"] if self._divides(feature) else self._features.modes[feature]

    def _answered(self, exchange: InputExchange) -> NDArray[np.int64]:
        """Return floats by own request and rank that asks."""
        own = self.routing.own
        bags = exchange.bags.T[[request.feature for request in own]].reshape(len(own), self.env.world_size)
        return bags * self._widths

    def pooled(self, module: TieredModule, features: Any) -> Tensor:
        """Return the pooled rows of this rank's batch, float32 (examples, sum of dims).

        Raises InputError on every rank if the input of one is wrong.
        """
        with self.env.peers.in_step():
            lookup = module.find_lookup(features)
            assert isinstance(lookup, ShardedLookup)
            keyed, own = as_keyed_jagged_tensor(features), self._features
            exchange, weights, inverse = lookup.exchange, own.weights_of(keyed), own.inverse_rows(keyed)
            if self.rows_only:
                return self._pooled_here(self.exchanged_rows(module, lookup), exchange, weights, inverse)
            counts = [len(lengths) for lengths in exchange.lengths]
            places, shape = own.places(counts, inverse is not None)
            divisors = [self._divisor(number, exchange) for number in range(len(counts))]
            layout = Layout(counts, places, shape, divisors)
            local = self.local_output(module, lookup, weights)
            values = self.exchanged(local, exchange, self._answered(exchange), layout)
            return values if inverse is None else own.expanded(values, counts, inverse)

    def _divisor(self, feature: int, exchange: InputExchange) -> Tensor | None:
        if not self._divides(feature):
            return None
        return self._bag_lengths(exchange.lengths[feature])

    def _bag_lengths(self, lengths: NDArray[np.int64]) -> Tensor:
        """Return the divisors of means, (bags, 1)."""
        return brought(torch.from_numpy(lengths).clamp(min=1).unsqueeze(1), self.device)

    def local_output(self, module: TieredModule, lookup: ShardedLookup, weights: Tensor | None) -> Tensor:
        """Return the vectors that this rank pools for all ranks, (floats,). ``weights``: of its own batch."""
        if weights is None:
            return module.pooled_rows(lookup, None)
        arrived = self._exchanged_weights(weights, lookup.exchange)
        return _WithWeights.apply(module.pooled_rows(lookup, arrived), arrived)  # type: ignore[no-any-return]

    def _exchanged_weights(self, weights: Tensor, exchange: InputExchange) -> Tensor:
        """Return the weights of the ids that arrived, in their order."""
        positions, counted = exchange.positions()
        picked = weights.index_select(0, brought(torch.from_numpy(positions), weights.device))
        if exchange.weights_learn and not picked.requires_grad:  # another rank's do
            picked.requires_grad_()
        if not counted.all():  # replicas on other ranks compute the same gradients once more
            here = brought(torch.from_numpy(counted), weights.device)
            picked = torch.where(here, picked, picked.detach())
        sizes = exchange.weight_sizes()
        return WeightExchange.apply(picked, self.env, self.device, *sizes)  # type: ignore[no-any-return]

    def _weights(self, own: Tensor) -> Tensor:
        """Return weights of this rank's batch as torch multiplies rows by them."""
        own = own.to(torch.float32)
        return own.to(self.device) if own.requires_grad else brought(own, self.device)

    def _pooled_here(
        self,
        found: list[Tensor],
        exchange: InputExchange,
        weights: Tensor | None,
        inverse: list[Tensor] | None,
    ) -> Tensor:
        """Return pooled rows; ``found``: the rows that were asked for one by one, by feature."""
        blocks = []
        for number, rows in enumerate(found):
            begin, lengths = exchange.begins[number], exchange.lengths[number]
            at = brought(exchange.inverse[number], self.device)
            pooling = self._features.poolings[number]
            own = None if weights is None else self._weights(weights[begin : begin + len(at)])
            mean = pooling is PoolingType.MEAN and own is not None
            begins = torch.from_numpy(np.cumsum(lengths) - lengths).to(at.dtype)
            offsets = brought(begins, self.device)
            mode = "sum" if mean else pooling.value.lower()
            block = embedding_bag(at, rows, offsets, mode=mode, per_sample_weights=own)
            if mean:  # torch has weights with sums only
                block = block / self._bag_lengths(lengths)
            expand = None if inverse is None else brought(inverse[number], self.device)
            blocks.append(block if expand is None else block.index_select(0, expand))
        return torch.cat(blocks, dim=1)
