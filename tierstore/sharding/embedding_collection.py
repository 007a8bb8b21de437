"""EmbeddingCollection whose tables are cut over the ranks of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore.config import TierConfig
from tierstore.modules.collection import FeatureIds
from tierstore.modules.configs import EmbeddingConfig
from tierstore.modules.embedding_collection import EmbeddingCollection
from tierstore.modules.inputs import Ids, sequence_lookup
from tierstore.optim import SGD, OptimizerSpec
from tierstore.placement import ShardingPlan
from tierstore.sharding.collection import ShardedCollection, ShardedLookup
from tierstore.sharding.commits import Commits
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.input_exchange import InputExchange
from tierstore.sharding.output_exchange import OutputExchange
from tierstore.sparse import JaggedTensor, as_keyed_jagged_tensor


class ShardedEmbeddingCollection(ShardedCollection, EmbeddingCollection):
    """KeyedJaggedTensor of this rank's part of the batch → its rows, from the tables of all ranks.

    As EmbeddingCollection of the whole batch (feature by feature the ranks' parts one after another), with
    every gradient divided by the number of ranks. All ranks make it, and call forward and backward, in the
    same order.

    Args:
        tables, need_indices, optimizer, seed: as for EmbeddingCollection, the same on all ranks.
        plan, env, config: as for ShardedEmbeddingBagCollection.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        plan: ShardingPlan,
        env: ShardingEnv,
        need_indices: bool = False,
        *,
        config: TierConfig | None = None,
        optimizer: OptimizerSpec | None = SGD(),  # noqa: B008  (immutable)
        seed: int = 0,
        _commits: Commits | None = None,
        _name: str = "",
    ) -> None:
        ShardedCollection.__init__(
            self, tables, plan, env, "embeddings", config, optimizer, seed, _commits, _name
        )
        self._need_indices = need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._configs

    def _checked(self, features: Any) -> list[FeatureIds]:
        return self._feature_ids(as_keyed_jagged_tensor(features))

    def finish_exchange(self, exchange: InputExchange) -> ShardedLookup:
        arrived = exchange.receive()
        ids = [
            Ids(
                f"{self._features[request.feature].name!r} of rank {rank}",
                self._local[number],
                piece.ids,
                piece.begin,
            )
            for number, request in enumerate(self.routing.own)
            for rank, piece in enumerate(arrived[number])
        ]
        lookup = sequence_lookup(self.engine, ids)
        return ShardedLookup(lookup.parts, (), lookup.features, lookup.counts, exchange=exchange)

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """For every feature its rows, (ids, dim) float32, with the lengths of its bags, of this rank's part.

        Raises InputError on every rank if the input of one is wrong.
        """
        lookup = self._find_lookup(features)
        assert isinstance(lookup, ShardedLookup)
        keyed = as_keyed_jagged_tensor(features)
        exchange = lookup.exchange
        answered = np.array(lookup.counts, np.int64).reshape(-1, self.env.world_size)
        answered = answered * np.array([r.width for r in self.routing.own], np.int64).reshape(-1, 1)
        sent = exchange.sent_by_answer()
        expected = [
            len(piece.positions) * answer.width
            for piece, answer in zip(sent, self.routing.answers, strict=True)
        ]
        local = self._by_rank(lookup)
        floats = self._floats(answered.tolist(), expected)
        received, replicas = OutputExchange.apply(local, self.env, floats)
        blocks = torch.cat([received, replicas]).split(expected)
        answers = [
            block.view(-1, answer.width) for block, answer in zip(blocks, self.routing.answers, strict=True)
        ]
        found = {}
        for number, feature in enumerate(self._features):
            part = keyed[feature.name]
            columns = [
                _in_order([answers[at] for at in numbers], [sent[at].positions for at in numbers])
                for numbers in self.routing.columns[number]
            ]
            found[feature.output] = JaggedTensor(
                columns[0] if len(columns) == 1 else torch.cat(columns, dim=1),
                part.values() if self._need_indices else None,
                part.lengths(),
            )
        return found

    def _by_rank(self, lookup: ShardedLookup) -> Tensor:
        """The looked-up rows in one piece, in the order of OutputExchange."""
        world = self.env.world_size
        pieces: list[Tensor] = [torch.empty(0)] * len(lookup.counts)
        for members, output in zip(lookup.features, self._sequence(lookup), strict=True):
            for number, piece in zip(members, output.split([lookup.counts[m] for m in members]), strict=True):
                pieces[number] = piece.reshape(-1)
        ordered = [
            pieces[number * world + rank]
            for kind in (False, True)
            for rank in range(world)
            for number, request in enumerate(self.routing.own)
            if request.replica == kind
        ]
        if self.trains:  # so that a rank without shards joins the exchange of the gradients
            ordered.append(self._anchor)
        return torch.cat(ordered) if ordered else torch.empty(0)


def _in_order(pieces: list[Tensor], positions: list[np.ndarray]) -> Tensor:
    """Rows from several shards, in the order of their positions in the batch."""
    if len(pieces) == 1:
        return pieces[0]
    at = np.argsort(np.concatenate(positions), kind="stable")
    return torch.cat(pieces).index_select(0, torch.from_numpy(at))
