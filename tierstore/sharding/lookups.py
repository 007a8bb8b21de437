"""Lookups that ask other ranks: what the sharded collections share of a step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore.errors import RankError
from tierstore.modules.collection import Collection, FeatureIds
from tierstore.modules.inputs import FeatureLookup, Ids, sequence_lookup
from tierstore.sharding.comms import CommsConfig, OutputMemory, WireMemory
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.input_exchange import InputExchange, check_range
from tierstore.sharding.output_exchange import (
    OutputExchange,
    OutputPlan,
    Target,
    local_offsets,
    sizes_of,
    sources_of,
)
from tierstore.sharding.routing import Routing

_INT32_ROWS = 1 << 31


@dataclass
class ShardedLookup(FeatureLookup):
    """A lookup in this rank's shards for all ranks; ``exchange`` knows who asked for what."""

    exchange: InputExchange = field(kw_only=True)
    wire: WireMemory = field(kw_only=True)

    def new_output(self) -> Tensor:
        return self.wire.take("local", math.prod(self.out_shape))


class NoRows(torch.autograd.Function):
    """``apply(anchor, module)`` → no floats, what a rank without shards looks up. Its backward pass joins the
    exchange of the gradients and counts the update that the other ranks make."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: ShardedLookups) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(anchor)  # so that a second backward pass fails here as it does on other ranks
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        assert ctx.saved_tensors
        ctx.module.count_update()
        ctx.module.report_gradients(None)
        return None, None


class ShardedLookups(Collection):
    """A collection that looks rows up for all ranks, and gets those of its own batch from all ranks."""

    env: ShardingEnv
    comms: CommsConfig
    routing: Routing
    collective = True
    _rows_only = False
    """Whether rows are asked for one by one, and not pooled by their owners."""

    def _set_routing(self, routing: Routing, env: ShardingEnv, comms: CommsConfig | None) -> None:
        self.env, self.routing, self.comms = env, routing, comms or CommsConfig()
        self._wire, self._outputs = WireMemory(), OutputMemory()
        self._bounds = [feature.config.num_embeddings for feature in routing.features]
        self._id_type = torch.int32 if max(self._bounds) <= _INT32_ROWS else torch.int64
        self._local = [self.engine.table_index(request.table) for request in routing.own]
        self._widths = np.array([request.width for request in routing.own], np.int64).reshape(-1, 1)
        self._replica = np.array([request.replica for request in routing.own], bool)

    def least(self, value: int) -> int:
        """The smallest ``value`` of any rank. All ranks call it."""
        return self.env.least(value)

    def begin_exchange(self, features: Any) -> InputExchange:
        """Begins to send the ids of a batch to the ranks that hold their rows."""
        found: list[FeatureIds] = []
        error: Exception | None = None
        try:
            found = self._checked(features)
            check_range(found, self._bounds)
        except Exception as raised:  # every rank raises it, so that none waits for this one
            error = raised
        return InputExchange(
            self.env,
            self.routing,
            self._id_type,
            found,
            error,
            rows_only=self._rows_only,
            dedup=self.comms.dedup,
            weights_learn=error is None and self._weights_learn(features),
        )

    def _weights_learn(self, features: Any) -> bool:
        """Whether the weights of a batch require gradients."""
        return False

    def announce_end(self, error: Exception | None) -> InputExchange:
        """In place of :meth:`begin_exchange`: this rank has no more batches, perhaps because of ``error``."""
        if error is not None:
            error = RankError(f"its loader raised {type(error).__name__}: {error}")
        return InputExchange(self.env, self.routing, self._id_type, [], error, ended=True)

    def make_lookup(self, features: Any) -> ShardedLookup:
        """Exchanges the ids with the other ranks, which must do the same, and deduplicates what arrives.

        Raises InputError on every rank if the input of one is wrong.
        """
        return self.finish_exchange(self.begin_exchange(features))

    @abstractmethod
    def finish_exchange(self, exchange: InputExchange) -> ShardedLookup:
        """The lookup of what all ranks ask this one for."""

    @abstractmethod
    def _checked(self, features: Any) -> list[FeatureIds]:
        """This rank's features; InputError if something is wrong with them."""

    def _lookup(self, found: FeatureLookup, exchange: InputExchange) -> ShardedLookup:
        return ShardedLookup(
            found.parts,
            found.out_shape,
            found.features,
            found.counts,
            exchange=exchange,
            wire=self._wire,
        )

    def _offsets(self, floats: NDArray[np.int64]) -> NDArray[np.int64]:
        return local_offsets(floats, self._replica, self.env)

    def _output_plan(
        self,
        exchange: InputExchange,
        answered: NDArray[np.int64],
        counts: Sequence[int],
        places: Sequence[tuple[int, int]],
        shape: tuple[int, ...],
        divisors: Sequence[Tensor | None] | None = None,
    ) -> OutputPlan:
        """The exchange that fills an output of ``shape``: vector i of ``counts`` of a feature is at float
        ``first + i * stride`` of ``places``. ``answered``: floats by own request and rank."""
        rows = self._rows_of_answers(exchange) if self._rows_only else [None] * len(self.routing.answers)
        expected = [
            (counts[answer.feature] if at is None else len(at)) * answer.width
            for answer, at in zip(self.routing.answers, rows, strict=True)
        ]
        sizes = sizes_of(self.env, answered, self._replica, self.routing, expected)
        sources = sources_of(self.env, self.routing, sizes, expected, rows)
        targets = []
        for feature, columns in enumerate(self.routing.columns):
            first, stride = places[feature]
            divisor = None if divisors is None else divisors[feature]
            for numbers in columns:
                answer = self.routing.answers[numbers[0]]
                pieces = [sources[number] for number in numbers]
                targets.append(
                    Target(first + answer.column, stride, counts[feature], answer.width, pieces, divisor)
                )
        return OutputPlan(self.env, self.comms, self._wire, self._outputs, sizes, targets, shape)

    # -- lookups of rows one by one ------------------------------------------------------

    def _row_lookup(self, exchange: InputExchange) -> ShardedLookup:
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
        return self._lookup(sequence_lookup(self.engine, ids), exchange)

    def _rows_of_answers(self, exchange: InputExchange) -> list[Tensor | None]:
        """Which of a feature's rows each answer has; None: all."""
        return [
            torch.from_numpy(sent.positions - exchange.asked[answer.feature].begin) if answer.rows else None
            for sent, answer in zip(exchange.sent_by_answer(), self.routing.answers, strict=True)
        ]

    def _exchanged_rows(self, lookup: ShardedLookup) -> list[Tensor]:
        """For every feature the rows of its ids, (ids asked for, dim)."""
        exchange = lookup.exchange
        answered = np.array(lookup.counts, np.int64).reshape(-1, self.env.world_size) * self._widths
        counts = [feature.ids.numel() for feature in exchange.asked]
        dims = [feature.config.embedding_dim for feature in self._features]
        floats = [count * dim for count, dim in zip(counts, dims, strict=True)]
        places = list(zip((np.cumsum(floats) - floats).tolist(), dims, strict=True))
        plan = self._output_plan(exchange, answered, counts, places, (sum(floats),))
        values = OutputExchange.apply(self._by_rank(lookup), plan)
        return [block.view(-1, dim) for block, dim in zip(values.split(floats), dims, strict=True)]

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
            for rank in self.env.others_first
            for number, request in enumerate(self.routing.own)
            if request.replica == kind
        ]
        if self.trains and not lookup.parts:
            ordered.append(NoRows.apply(self._anchor, self))
        return torch.cat(ordered) if ordered else torch.empty(0)
