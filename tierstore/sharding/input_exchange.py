"""The ids of a batch on their way to the ranks that hold the rows.

Three steps, each done by all ranks in the same order: the constructor announces sizes, :meth:`send` sends the
ids, :meth:`receive` waits for those of the other ranks. Between the steps other work can be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore import _core
from tierstore.errors import InputError, RankError
from tierstore.modules.collection import FeatureIds
from tierstore.modules.inputs import NO_PADDING
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.routing import Routing

_ANY_ID = 1 << 48
_GOES_ON, _WRONG, _ENDED, _FAILED, _WANTS_GRADIENTS = range(5)
"""What a rank says of its batch."""
_NO_BATCH = RankError(
    "has no more batches, but another rank has; every rank must get the same number, so drop the last ones"
)


@dataclass(frozen=True)
class Sent:
    """What one request got of this rank's batch: ``ids``, bag lengths, and which positions of the batch's
    values they are."""

    ids: Tensor
    lengths: NDArray[np.int64]
    positions: NDArray[np.int64]


@dataclass(frozen=True)
class Arrived:
    """What one rank asks one request of this rank for. ``begin``: number of its first id among all."""

    ids: Tensor
    lengths: NDArray[np.int64]
    begin: int


class InputExchange:
    """One batch. ``found``: this rank's features; ``error``: why there are none (every rank then raises).

    ``rows_only``: rows are asked for one by one, and no bags are told; ``dedup``: repeated ids once.
    ``weights_learn``: the weights of this rank's batch require gradients.
    ``ended``: there is no batch any more on this rank, because of ``error`` if there is one.
    """

    def __init__(
        self,
        env: ShardingEnv,
        routing: Routing,
        dtype: torch.dtype,
        found: Sequence[FeatureIds],
        error: Exception | None,
        *,
        rows_only: bool = False,
        dedup: bool = False,
        weights_learn: bool = False,
        ended: bool = False,
    ) -> None:
        self._env, self._routing, self._dtype = env, routing, dtype
        self._error = error
        if ended:
            state = _ENDED if error is None else _FAILED
        else:
            state = _GOES_ON if error is None else _WRONG
        found = found if state == _GOES_ON else []
        self.lengths = [lengths_of(feature) for feature in found]
        """Of this rank's bags, by feature."""
        self.begins = [feature.begin for feature in found]
        """Position in the batch of every feature's first id."""
        self.inverse: list[Tensor] = []
        """By feature: which of the ids that are asked for each of the batch's is; only with ``dedup``."""
        if dedup:
            found, self.inverse = _without_repeats(found)
        elif rows_only:
            found = [replace(f, lengths=np.array([f.ids.numel()])) for f in found]
        self.asked = found
        self.sent: list[list[Sent]] = _divide(routing, found) if state == _GOES_ON else []
        """By rank, by request of that rank."""
        meta = torch.zeros(1 + len(routing.features) + env.world_size, dtype=torch.int64)
        meta[0] = _WANTS_GRADIENTS if weights_learn and state == _GOES_ON else state
        for number, feature in enumerate(found):
            meta[1 + number] = len(lengths_of(feature))
        for rank, pieces in enumerate(self.sent):
            meta[1 + len(routing.features) + rank] = sum(piece.ids.numel() for piece in pieces)
        self._pending, self._all_meta = env.gather(meta, env.inputs)
        self._started = False

    def send(self) -> None:
        """Sends the ids. Doing it again does nothing. Raises on all ranks: InputError if one of them has a
        wrong input, RankError if one has no batch and others have."""
        if self._started:
            return
        self._started = True
        self._pending.wait()
        meta = self._all_meta.numpy()
        states = set(meta[:, 0].tolist())
        if states == {_ENDED}:
            return
        if _FAILED in states or _ENDED in states:
            own = self._error or (_NO_BATCH if meta[self._env.rank, 0] == _ENDED else None)
            self._env.raise_together(own, self._env.inputs, RankError)
        if _WRONG in states:
            self._env.raise_together(self._error, self._env.inputs, InputError)
        self.weights_learn = _WANTS_GRADIENTS in states
        """Whether the weights of any rank require gradients, in whose exchange all ranks take part."""
        count = len(self._routing.features)
        self.bags = meta[:, 1 : 1 + count]
        """(ranks, features): how many bags each rank's batch has."""
        asked = [request.feature for request in self._routing.own]
        self._arriving = meta[:, 1 + count + self._env.rank]
        arriving = self.bags[:, asked].sum(axis=1) + self._arriving
        leaving = [sum(len(p.lengths) + p.ids.numel() for p in pieces) for pieces in self.sent]
        buffers = [
            part
            for pieces in self.sent
            for part in (*(_tensor(p.lengths) for p in pieces), *(p.ids for p in pieces))
        ]
        outgoing = _joined(buffers, self._dtype)
        self._incoming = torch.empty(int(arriving.sum()), dtype=self._dtype)
        self._sizes = arriving
        self._pending = self._env.all_to_all(
            self._incoming, outgoing, arriving.tolist(), leaving, self._env.inputs
        )

    def receive(self) -> list[list[Arrived]]:
        """By request of this rank, by rank that asks."""
        self.send()
        self._pending.wait()
        own = self._routing.own
        arrived: list[list[Arrived]] = [[] for _ in own]
        begin = 0
        for rank, buffer in enumerate(self._incoming.split(self._sizes.tolist())):
            at = 0
            lengths = []
            for request in own:
                bags = int(self.bags[rank, request.feature])
                lengths.append(buffer[at : at + bags].numpy().astype(np.int64))
                at += bags
            for number, own_lengths in enumerate(lengths):
                ids = int(own_lengths.sum())
                arrived[number].append(Arrived(buffer[at : at + ids], own_lengths, begin))
                at += ids
                begin += ids
        self.arrived = arrived
        return arrived

    def sent_by_answer(self) -> list[Sent]:
        """What was sent for each of the routing's answers."""
        rank = self._env.rank
        pairs = [list(zip(r, s, strict=True)) for r, s in zip(self._routing.by_rank, self.sent, strict=True)]
        others = [piece for of_rank in pairs for request, piece in of_rank if not request.replica]
        return others + [piece for request, piece in pairs[rank] if request.replica]

    def positions(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Of the ids sent, in their order: positions in the batch's values; and which are not for a replica
        on another rank."""
        positions, counted = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
        for rank, (pieces, requests) in enumerate(zip(self.sent, self._routing.by_rank, strict=True)):
            for piece, request in zip(pieces, requests, strict=True):
                here = not request.replica or rank == self._env.rank
                positions.append(piece.positions)
                counted.append(np.full(len(piece.positions), here))
        return np.concatenate(positions), np.concatenate(counted)

    def weight_sizes(self) -> tuple[list[int], list[int]]:
        """How many ids arrived from every rank, and were sent to it."""
        return self._arriving.tolist(), [sum(p.ids.numel() for p in pieces) for pieces in self.sent]


def _without_repeats(features: Sequence[FeatureIds]) -> tuple[list[FeatureIds], list[Tensor]]:
    """Every feature's ids once, in order of first occurrence, and which of them each of the batch's is."""
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


def lengths_of(feature: FeatureIds) -> NDArray[np.int64]:
    assert feature.lengths is not None
    return feature.lengths


def check_range(features: Sequence[FeatureIds], bounds: Sequence[int]) -> None:
    """InputError that names the feature, the first id out of range and its position."""
    for feature, bound in zip(features, bounds, strict=True):
        if not feature.ids.numel():
            continue
        low, high = torch.aminmax(feature.ids)
        if low < 0 or high >= bound:
            at = int(((feature.ids < 0) | (feature.ids >= bound)).to(torch.uint8).argmax())
            raise InputError(
                f"{feature.name}: id {int(feature.ids[at])} at position {at} is out of range [0, {bound})"
            )


def _divide(routing: Routing, features: Sequence[FeatureIds]) -> list[list[Sent]]:
    """By rank, by request of that rank, what it gets of this rank's batch."""
    pieces: dict[tuple[int, tuple[int, int] | None], Sent] = {}
    for number, feature in enumerate(features):
        positions = np.arange(feature.begin, feature.begin + feature.ids.numel())
        pieces[number, None] = Sent(feature.ids, lengths_of(feature), positions)
        for ranges in routing.row_ranges[number]:
            for rows, piece in zip(ranges, _by_rows(feature, ranges), strict=True):
                pieces[number, rows] = piece
    return [[pieces[r.feature, r.rows] for r in requests] for requests in routing.by_rank]


def _by_rows(feature: FeatureIds, ranges: Sequence[tuple[int, int]]) -> list[Sent]:
    """A feature's ids divided by ranges that cover all rows, in order of position within each."""
    starts = np.array([begin for begin, _ in ranges], np.int64)
    own = feature.ids.contiguous()
    bags = lengths_of(feature)
    ids, flat, positions = _core.divide_by_rows(
        own.data_ptr(), own.dtype == torch.int32, own.numel(), np.ascontiguousarray(bags), starts
    )
    lengths = flat.reshape(len(ranges), len(bags))
    positions += feature.begin
    ends = np.cumsum(lengths.sum(axis=1)).tolist()
    return [
        Sent(torch.from_numpy(ids[begin:end]), lengths[number], positions[begin:end])
        for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]


def _tensor(lengths: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(lengths)


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([part.to(dtype) for part in parts]) if parts else torch.empty(0, dtype=dtype)
