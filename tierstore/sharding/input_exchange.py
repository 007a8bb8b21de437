"""The ids of a batch on their way to the ranks that hold the rows.

Three steps, each done by all ranks in the same order: the constructor announces sizes, :meth:`send` sends the
ids, :meth:`receive` waits for the other ranks' ids. Other work can be done between the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore import _core
from tierstore.errors import InputError, RankError
from tierstore.modules.inputs import NO_PADDING, Bags
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.peers import GRADIENTS, IDS, VECTORS
from tierstore.sharding.routing import Routing

_ANY_ID = 1 << 48
_GOES_ON, _WRONG, _ENDED, _FAILED, _WANTS_GRADIENTS = range(5)
"""What a rank announces of its batch."""
_HEAD = 3  # numbers of an announcement before those of features
_NO_BATCH = RankError(
    "has no more batches, but another rank has; every rank must get the same number, so drop the last ones"
)


Wire: TypeAlias = NDArray[np.int32] | NDArray[np.int64]
"""Ids and bag lengths as they are sent."""


@dataclass(frozen=True)
class Sent:
    """What this rank sent to one request: ids, bag lengths, and the ids' positions in the batch's values; a
    slice if the ids are all of a feature."""

    ids: Wire
    lengths: Wire
    places: NDArray[np.int64] | slice

    @property
    def positions(self) -> NDArray[np.int64]:
        if isinstance(self.places, slice):
            return np.arange(self.places.start, self.places.stop)
        return self.places


@dataclass(frozen=True)
class Arrived:
    """What one rank asks one request of this rank for. ``begin``: the number of its first id among all
    arrived ids."""

    ids: Tensor
    lengths: NDArray[np.int64]
    begin: int


@dataclass(frozen=True)
class ExchangeRules:
    """Rules for all batches of a collection.

    ``dtype``: of ids on the wire. ``rows_only``: rows are asked for one by one, and no bags are sent.
    ``dedup``: repeated ids are asked for once.
    """

    routing: Routing
    dtype: torch.dtype
    rows_only: bool
    dedup: bool


@dataclass(frozen=True)
class OwnBatch:
    """This rank's batch. ``error``: why it has no features, so that every rank raises.

    ``weights_learn``: its weights require gradients. ``ended``: this rank has no batch any more, because of
    ``error`` if there is one. ``ahead``: the lookup is made before its forward call.
    """

    features: Sequence[Bags]
    error: Exception | None = None
    weights_learn: bool = False
    ended: bool = False
    ahead: bool = True

    @property
    def state(self) -> int:
        """What this rank announces of the batch."""
        if self.ended:
            return _ENDED if self.error is None else _FAILED
        if self.error is not None:
            return _WRONG
        return _WANTS_GRADIENTS if self.weights_learn else _GOES_ON


class InputExchange:
    """The exchange of one batch."""

    def __init__(self, env: ShardingEnv, rules: ExchangeRules, batch: OwnBatch) -> None:
        self._env, self._routing, self._dtype = env, rules.routing, rules.dtype
        self._error = batch.error
        goes_on = batch.state in (_GOES_ON, _WANTS_GRADIENTS)
        found = batch.features if goes_on else []
        self.lengths = [feature.lengths for feature in found]
        """Lengths of this rank's bags, by feature."""
        self.begins = [feature.begin for feature in found]
        """Position in the batch of every feature's first id."""
        self.inverse: list[Tensor] = []
        """By feature, for each id of the batch its position among the ids asked for; only with ``dedup``."""
        if rules.dedup:
            found, self.inverse = _without_repeats(found)
        elif rules.rows_only:
            found = [replace(f, lengths=np.array([f.ids.numel()])) for f in found]
        self.asked = found
        as_int32 = self._dtype == torch.int32
        self.sent: list[list[Sent]] = _divide(self._routing, found, as_int32) if goes_on else []
        """What this rank sends to each rank, by request of that rank."""
        self._leaving = [sum(len(piece.ids) for piece in pieces) for pieces in self.sent]
        self._pending, self._all_meta = env.gather(self._announcement(batch), env.inputs)
        self._started = False

    def _announcement(self, batch: OwnBatch) -> Tensor:
        """Return the state of this rank's batch, whether it is looked up ahead, how often this rank has
        exchanged rows or gradients, its bags by feature, and its ids by rank."""
        features = len(self._routing.features)
        meta = torch.zeros(_HEAD + features + self._env.world_size, dtype=torch.int64, device="cpu")
        begun = self._env.peers.progress.begun
        passes = begun.get(VECTORS, 0) + begun.get(GRADIENTS, 0)
        meta[0], meta[1], meta[2] = batch.state, batch.ahead, passes
        for number, feature in enumerate(self.asked):
            meta[_HEAD + number] = len(feature.lengths)
        for rank, ids in enumerate(self._leaving):
            meta[_HEAD + features + rank] = ids
        return meta

    def send(self) -> None:
        """Send the ids; a second call does nothing. Raises on all ranks: InputError if a rank has a wrong
        input, RankError if some ranks have a batch and some have none."""
        if self._started:
            return
        self._started = True
        self._pending.wait()
        meta = self._all_meta.numpy()
        self._check_forms(meta[:, 1])
        self._check_passes(meta[:, 2])
        states = set(meta[:, 0].tolist())
        if states == {_ENDED}:
            return
        if _FAILED in states or _ENDED in states:
            own = self._error or (_NO_BATCH if meta[self._env.rank, 0] == _ENDED else None)
            self._env.raise_shared(own, self._env.inputs, RankError)
        if _WRONG in states:
            self._env.raise_shared(self._error, self._env.inputs, InputError)
        self.weights_learn = _WANTS_GRADIENTS in states
        """Whether the weights of any rank require gradients; all ranks then exchange these gradients."""
        count = len(self._routing.features)
        self.bags = meta[:, _HEAD : _HEAD + count]
        """(ranks, features): how many bags each rank's batch has."""
        self._arriving = meta[:, _HEAD + count + self._env.rank]
        self._send_ids()

    def _check_forms(self, ahead: NDArray[np.int64]) -> None:
        """Raise RankError if ranks announce lookups of different batches: some ahead, some on demand."""
        if (ahead == ahead[0]).all():
            return
        of = [", ".join(map(str, np.flatnonzero(ahead == form))) for form in (1, 0)]
        error = RankError(
            f"ranks {of[0]} look a batch up ahead, and ranks {of[1]} in a forward call: all ranks must give "
            "forward calls what prefetch yields, or all something else"
        )
        self._env.peers.stop(error)
        raise error

    def _check_passes(self, exchanges: NDArray[np.int64]) -> None:
        """Raise RankError if some ranks have exchanged rows or gradients more often than others: what one
        rank sends for a collection, or a pass, another rank would take for that of another."""
        if (exchanges == exchanges[0]).all():
            return
        few = ", ".join(map(str, np.flatnonzero(exchanges < exchanges.max())))
        error = RankError(
            f"rank {few} made fewer forward or backward passes of sharded tables than other ranks: all ranks "
            "must call backward in the same steps, and their losses must use the same collections; where a "
            "rank skips either, multiply by 0 instead. Start the job again from its last commit"
        )
        self._env.peers.stop(error)
        raise error

    def _send_ids(self) -> None:
        """Send lengths of bags and ids, of which all ranks know how many come."""
        asked = [request.feature for request in self._routing.own]
        self._sizes = self.bags[:, asked].sum(axis=1) + self._arriving
        parts = [
            part for pieces in self.sent for part in (*(p.lengths for p in pieces), *(p.ids for p in pieces))
        ]
        leaving = [
            ids + sum(len(p.lengths) for p in pieces)
            for ids, pieces in zip(self._leaving, self.sent, strict=True)
        ]
        nothing = torch.empty(0, dtype=self._dtype, device="cpu")
        outgoing = torch.from_numpy(np.concatenate(parts)) if parts else nothing
        self._incoming = nothing.new_empty(int(self._sizes.sum()))
        self._pending = self._env.all_to_all(self._incoming, outgoing, self._sizes.tolist(), leaving, IDS)

    def receive(self) -> list[list[Arrived]]:
        """Return what arrived, by request of this rank and by rank that asks."""
        self.send()
        self._pending.wait()
        requests = [request.feature for request in self._routing.own]
        arrived: list[list[Arrived]] = [[] for _ in requests]
        begin = 0
        for buffer, bags in zip(self._incoming.split(self._sizes.tolist()), self.bags, strict=True):
            last = np.cumsum(bags[requests])
            lengths = buffer[: int(last[-1]) if requests else 0].numpy().astype(np.int64)
            ends = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths, out=ends[1:])
            bag, at = 0, 0
            for number, (last_bag, end) in enumerate(zip(last.tolist(), ends[last].tolist(), strict=True)):
                ids = buffer[len(lengths) + at : len(lengths) + end]
                arrived[number].append(Arrived(ids, lengths[bag:last_bag], begin + at))
                bag, at = last_bag, end
            begin += at
        self.arrived = arrived
        return arrived

    def sent_by_answer(self) -> list[Sent]:
        """Return what was sent for each of the routing's answers."""
        rank = self._env.rank
        pairs = [list(zip(r, s, strict=True)) for r, s in zip(self._routing.by_rank, self.sent, strict=True)]
        others = [piece for of_rank in pairs for request, piece in of_rank if not request.replica]
        return others + [piece for request, piece in pairs[rank] if request.replica]

    def positions(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the sent ids' positions in the batch's values, in order, and which ids do not go to a
        replica on another rank."""
        positions, counted = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
        for rank, (pieces, requests) in enumerate(zip(self.sent, self._routing.by_rank, strict=True)):
            for piece, request in zip(pieces, requests, strict=True):
                here = not request.replica or rank == self._env.rank
                positions.append(piece.positions)
                counted.append(np.full(len(piece.positions), here))
        return np.concatenate(positions), np.concatenate(counted)

    def weight_sizes(self) -> tuple[list[int], list[int]]:
        """Return how many ids arrived from every rank, and how many were sent to it."""
        return self._arriving.tolist(), self._leaving


def _without_repeats(features: Sequence[Bags]) -> tuple[list[Bags], list[Tensor]]:
    """Return every feature's ids once, in order of first occurrence, and for each id of the batch its index
    in them."""
    found, inverse = [], []
    begin = 0
    for feature in features:
        ids = feature.ids
        batch, *_ = _core.make_batch(
            [(ids.data_ptr(), ids.numel(), ids.dtype == torch.int32, 0, _ANY_ID, NO_PADDING)]
        )
        unique = torch.from_numpy(batch.unique.view(np.int64))
        found.append(replace(feature, ids=unique, begin=begin, lengths=np.array([len(unique)])))
        inverse.append(torch.from_numpy(batch.inverse))
        begin += len(unique)
    return found, inverse


def check_range(features: Sequence[Bags], bounds: Sequence[int]) -> None:
    """Raise InputError that names the feature, the first id out of range and its position."""
    described = [
        (f.ids.data_ptr(), f.ids.dtype == torch.int32, f.ids.numel(), bound)
        for f, bound in zip(features, bounds, strict=True)
    ]
    number, at = _core.first_outside(described)
    if number >= 0:
        feature, bound = features[number], bounds[number]
        raise InputError(
            f"{feature.name}: id {int(feature.ids[at])} at position {at} is out of range [0, {bound})"
        )


def _divide(routing: Routing, features: Sequence[Bags], as_int32: bool) -> list[list[Sent]]:
    """Return the part of this rank's batch that each rank gets, by request of that rank."""
    pieces: dict[tuple[int, tuple[int, int] | None], Sent] = {}
    wire = np.int32 if as_int32 else np.int64
    for number, feature in enumerate(features):
        if routing.has_whole[number]:
            places = slice(feature.begin, feature.begin + feature.ids.numel())
            ids, lengths = (a.astype(wire, copy=False) for a in (feature.ids.numpy(), feature.lengths))
            pieces[number, None] = Sent(ids, lengths, places)
        for ranges in routing.row_ranges[number]:
            for rows, piece in zip(ranges, _by_rows(feature, ranges, as_int32), strict=True):
                pieces[number, rows] = piece
    return [[pieces[r.feature, r.rows] for r in requests] for requests in routing.by_rank]


def _by_rows(feature: Bags, ranges: Sequence[tuple[int, int]], as_int32: bool) -> list[Sent]:
    """Return a feature's ids divided by ranges that cover all rows, in order of position within each."""
    starts = np.array([begin for begin, _ in ranges], np.int64)
    own = feature.ids.contiguous()
    bags = feature.lengths
    ids, flat, positions, ends = _core.divide_by_rows(
        own.data_ptr(), own.dtype == torch.int32, own.numel(), np.ascontiguousarray(bags), starts, as_int32
    )
    lengths = flat.reshape(len(ranges), len(bags))
    positions += feature.begin
    return [
        Sent(ids[begin:end], lengths[number], positions[begin:end])
        for number, (begin, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False))
    ]
