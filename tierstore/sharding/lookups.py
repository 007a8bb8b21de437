"""Lookups that ask all ranks: ids go to the owners of their rows, and vectors come back."""

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
from tierstore.modules.base import TieredModule
from tierstore.modules.features import Features
from tierstore.modules.gpu import brought
from tierstore.modules.inputs import Bags, FeatureLookup, Ids, keyed_on_host, sequence_lookup
from tierstore.modules.jagged_rows import rows_by_feature
from tierstore.modules.lookup import sequence_backward
from tierstore.sharding.comms import OutputMemory, WireMemory
from tierstore.sharding.input_exchange import ExchangeRules, InputExchange, OwnBatch, check_range
from tierstore.sharding.opening import OpenShards
from tierstore.sharding.output_exchange import (
    OutputExchange,
    OutputPlan,
    Target,
    joined,
    local_offsets,
    sizes_of,
    sources_of,
)
from tierstore.sparse import as_keyed_jagged_tensor

_INT32_ROWS = 1 << 31


@dataclass
class ShardedLookup(FeatureLookup):
    """A lookup in this rank's shards for all ranks; ``exchange`` knows which rank asked for which rows."""

    exchange: InputExchange = field(kw_only=True)
    wire: WireMemory = field(kw_only=True)

    def new_output(self) -> Tensor:
        return self.wire.take("local", math.prod(self.out_shape))


class NoRows(torch.autograd.Function):
    """The lookup of a rank without shards: ``apply(anchor, module, lookup)`` → no floats. The backward pass
    joins the exchange of the gradients and takes part in the update that the other ranks make."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: TieredModule, lookup: ShardedLookup) -> Tensor:
        ctx.module, ctx.lookup = module, lookup
        ctx.save_for_backward(anchor)  # a second backward pass then fails here as it does on other ranks
        return torch.empty(0, dtype=torch.float32, device=module.engine.device_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        assert ctx.saved_tensors
        sequence_backward(ctx, ())
        return None, None, None


@dataclass(frozen=True)
class Layout:
    """Places of vectors in an output of ``shape``: vector i of ``counts[f]`` of feature f is at float ``first
    + i * stride`` of ``places[f]``, divided by ``divisors[f]`` unless that is None."""

    counts: Sequence[int]
    places: Sequence[tuple[int, int]]
    shape: tuple[int, ...]
    divisors: Sequence[Tensor | None]


class ExchangedLookups:
    """Looks rows up for all ranks, and gets the rows of this rank's own batch from all ranks.

    ``rows_only``: rows are asked for one by one, and not pooled by their owners.
    """

    def __init__(self, opened: OpenShards, rows_only: bool) -> None:
        self.env, self.routing, self.comms = opened.env, opened.routing, opened.options.comms
        self.rows_only = rows_only
        self._engine, self._features = opened.engine, opened.features
        self.device = torch.device(self._engine.device_name)
        """Where vectors and their gradients are."""
        self._wire, self._outputs = WireMemory(self.device), OutputMemory(self.device)
        id_type = torch.int32 if max(self._features.bounds) <= _INT32_ROWS else torch.int64
        self._rules = ExchangeRules(self.routing, id_type, rows_only, self.comms.dedup)
        self._own_tables = [self._engine.table_index(request.table) for request in self.routing.own]
        self._widths = np.array([request.width for request in self.routing.own], np.int64).reshape(-1, 1)
        self._replica = np.array([request.replica for request in self.routing.own], bool)
        self._last: tuple[object, OutputPlan] | None = None
        """Sizes of the last batch, and its exchange of outputs, which batches of these sizes have, too."""

    def begin(self, features: Any, ahead: bool = True) -> InputExchange:
        """Begin to send the ids of a batch to the ranks that hold their rows. All ranks call it. ``ahead``:
        the lookup is made before its forward call."""
        found: list[Bags] = []
        error: Exception | None = None
        weights_learn = False
        try:
            keyed = as_keyed_jagged_tensor(features)
            found = self.checked(keyed_on_host(keyed, self._engine.device_name))
            check_range(found, self._features.bounds)
            weights_learn = self.weights_learn(features)
        except Exception as raised:  # every rank raises it, so that none waits for this one
            error = raised
        return InputExchange(self.env, self._rules, OwnBatch(found, error, weights_learn, ahead=ahead))

    def announce_end(self, error: Exception | None) -> InputExchange:
        """Tell the other ranks, in place of :meth:`begin`, that this rank has no more batches, perhaps
        because of ``error``."""
        if error is not None:
            error = RankError(f"its loader raised {type(error).__name__}: {error}")
        return InputExchange(self.env, self._rules, OwnBatch([], error, ended=True))

    def make(self, features: Any) -> ShardedLookup:
        """Exchange the ids with the other ranks, which must do the same, and deduplicate the ids that arrive.

        Raises InputError on every rank if the input of one is wrong.
        """
        return self.finish(self.begin(features, ahead=False))

    @abstractmethod
    def finish(self, exchange: InputExchange) -> ShardedLookup:
        """Return the lookup of the rows that all ranks ask this rank for."""

    @abstractmethod
    def checked(self, features: Any) -> list[Bags]:
        """Return this rank's features; raises InputError if something is wrong with them."""

    def weights_learn(self, features: Any) -> bool:
        """Return whether the weights of a batch require gradients."""
        return False

    def sharded(self, found: FeatureLookup, exchange: InputExchange) -> ShardedLookup:
        """Return ``found``, which serves ``exchange``."""
        own = found.parts, found.out_shape, found.features, found.counts
        return ShardedLookup(*own, exchange=exchange, wire=self._wire)

    def offsets(self, floats: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each answer begins, by own request and rank; ``floats``: how long it is."""
        return local_offsets(floats, self._replica, self.env)

    def exchanged(
        self, local: Tensor, exchange: InputExchange, answered: NDArray[np.int64], layout: Layout
    ) -> Tensor:
        """Return the output of ``layout``, filled by all ranks with their ``local`` answers.

        ``answered``: floats by own request and rank.
        """
        if self.rows_only or any(divisor is not None for divisor in layout.divisors):
            plan = self._output_plan(exchange, answered, layout)
        else:
            sizes = exchange.bags.tobytes(), layout.places, layout.shape
            if self._last is None or self._last[0] != sizes:
                self._last = sizes, self._output_plan(exchange, answered, layout)
            plan = self._last[1]
        return OutputExchange.apply(local, plan)  # type: ignore[no-any-return]

    def _output_plan(
        self, exchange: InputExchange, answered: NDArray[np.int64], layout: Layout
    ) -> OutputPlan:
        counts, answers = layout.counts, self.routing.answers
        rows = self._rows_of_answers(exchange) if self.rows_only else [None] * len(answers)
        expected = [
            (counts[answer.feature] if at is None else len(at)) * answer.width
            for answer, at in zip(answers, rows, strict=True)
        ]
        sizes = sizes_of(self.env, answered, self._replica, self.routing, expected)
        sources = sources_of(self.env, self.routing, sizes, expected, rows)
        targets = []
        for feature, columns in enumerate(self.routing.columns):
            (first, stride), divisor = layout.places[feature], layout.divisors[feature]
            for numbers in columns:
                answer = answers[numbers[0]]
                pieces = [sources[number] for number in numbers]
                offset, count = first + answer.column, counts[feature]
                targets.append(Target(offset, stride, count, answer.width, pieces, divisor))
        return OutputPlan(
            self.env, self.comms, self._wire, self._outputs, sizes, joined(targets), layout.shape
        )

    # -- lookups of rows one by one ------------------------------------------------------

    def row_lookup(self, exchange: InputExchange) -> ShardedLookup:
        """Return the lookup of the rows that all ranks ask this rank for, one by one."""
        arrived = exchange.receive()
        ids = [
            Ids(
                f"{self._features.all[request.feature].name!r} of rank {rank}",
                self._own_tables[number],
                piece.ids,
                piece.begin,
            )
            for number, request in enumerate(self.routing.own)
            for rank, piece in enumerate(arrived[number])
        ]
        return self.sharded(sequence_lookup(self._engine, ids), exchange)

    def _rows_of_answers(self, exchange: InputExchange) -> list[Tensor | None]:
        """Return which of a feature's rows each answer has; None: all."""
        return [
            brought(torch.from_numpy(sent.positions - exchange.asked[answer.feature].begin), self.device)
            if answer.rows
            else None
            for sent, answer in zip(exchange.sent_by_answer(), self.routing.answers, strict=True)
        ]

    def exchanged_rows(self, module: TieredModule, lookup: ShardedLookup) -> list[Tensor]:
        """Return for every feature the rows of the ids that were asked for, (ids asked for, dim)."""
        exchange, dims = lookup.exchange, self._features.dims
        answered = np.array(lookup.counts, np.int64).reshape(-1, self.env.world_size) * self._widths
        counts = [feature.ids.numel() for feature in exchange.asked]
        floats = [count * dim for count, dim in zip(counts, dims, strict=True)]
        places = list(zip((np.cumsum(floats) - floats).tolist(), dims, strict=True))
        layout = Layout(counts, places, (sum(floats),), [None] * len(counts))
        values = self.exchanged(self._by_rank(module, lookup), exchange, answered, layout)
        return [block.view(-1, dim) for block, dim in zip(values.split(floats), dims, strict=True)]

    def _by_rank(self, module: TieredModule, lookup: ShardedLookup) -> Tensor:
        """Return the looked-up rows in one piece, in the order of OutputExchange."""
        world = self.env.world_size
        pieces = rows_by_feature(lookup, module.rows_one_by_one(lookup))
        ordered = [
            pieces[number * world + rank].reshape(-1)
            for kind in (False, True)
            for rank in self.env.others_first
            for number, request in enumerate(self.routing.own)
            if request.replica == kind
        ]
        if module.trains and not lookup.parts:
            ordered.append(NoRows.apply(module.anchor, module, lookup))
        return torch.cat(ordered) if ordered else torch.empty(0, dtype=torch.float32, device=self.device)


class ExchangedRows(ExchangedLookups):
    """Lookups of rows one by one."""

    def __init__(self, opened: OpenShards) -> None:
        super().__init__(opened, rows_only=True)

    def checked(self, features: Any) -> list[Bags]:
        return checked_features(self._features, features)

    def finish(self, exchange: InputExchange) -> ShardedLookup:
        return self.row_lookup(exchange)

    def rows(self, module: TieredModule, features: Any) -> list[Tensor]:
        """Return for every feature the rows of its ids, float32 (ids, dim)."""
        with self.env.peers.in_step():
            lookup = module.find_lookup(features)
            assert isinstance(lookup, ShardedLookup)
            found, inverse = self.exchanged_rows(module, lookup), lookup.exchange.inverse
            pairs = zip(found, inverse, strict=True)
            return (
                [rows.index_select(0, brought(at, self.device)) for rows, at in pairs] if inverse else found
            )


def checked_features(own: Features, features: Any) -> list[Bags]:
    """Return the ids and bags of a batch for every feature of ``own``, by numbers of tables of the
    collection."""
    return own.ids_of(as_keyed_jagged_tensor(features), [feature.table for feature in own.all])
