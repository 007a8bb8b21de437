"""Random batches of several ranks, and the one batch that the ranks have together."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from tests.modules.machine_shapes import Batch, Shape, batch_of
from tests.modules.module_sides import Call, calls_of

_EVEN = ("parts", "renamed", "rebuilt")
"""Styles that need as many bags of every key."""


@dataclass
class RankBatches:
    """The batch of each rank; every rank has all of them, and looks up its own."""

    parts: list[Batch]
    wrong: bool = False
    """Whether it has an id that is an error."""

    def __repr__(self) -> str:
        return "\n        ".join(map(repr, self.parts))

    def style(self, wanted: str) -> str:
        """The style itself, or "plain" if a rank's batch does not have it: ranks look up together."""
        usual = all(part.even and "unused" not in part.keys for part in self.parts)
        return wanted if usual or wanted not in _EVEN else "plain"

    @property
    def all_have_ids(self) -> bool:
        """Whether each rank has some ids, so that other ids in their place are a change on each."""
        return all(sum(len(part.flat(key)) for key in part.keys) > 2 for part in self.parts)

    def calls(self, seed: int, shape: Shape, style: str, rank: int) -> list[RankCall]:
        """The calls of ``rank``, with what the other ranks look up at the same time."""
        # by the same draws, since ranks must agree on whether a batch is looked up as it was prefetched
        each = [calls_of(Random(seed), part, shape, style) for part in self.parts]
        found = []
        for of_ranks in zip(*each, strict=True):
            own = of_ranks[rank]
            every = [call.batch for call in of_ranks]
            found.append(RankCall(own.batch, own.subject, own.twin, every, rank))
        return found


def rank_batches(random: Random, shape: Shape, world: int, wrong: int | None = None) -> RankBatches:
    """Batches for each rank; ``wrong``: the rank that has an id out of range, if it has any."""
    parts, rows = [batch_of(random, shape, rank == wrong) for rank in range(world)], shape.rows_of
    form = parts[0].form if all(part.even for part in parts) else "flat"
    for part in parts:  # one program makes the batches of all ranks
        part.form = form
    outside = any(not 0 <= id < rows[key] for part in parts for key in rows for id in part.flat(key))
    return RankBatches(parts, outside and shape.bounds == "fatal")


@dataclass
class RankCall(Call):
    """One call of one rank. ``every``: the batches that the ranks look up in it."""

    every: list[Batch]
    rank: int

    def mine(self, name: str, shape: Shape) -> slice:
        """The vectors of this rank among those of all, of one feature."""
        counts = [_vectors(batch, name, shape) for batch in self.every]
        begin = sum(counts[: self.rank])
        return slice(begin, begin + counts[self.rank])

    def own_weights(self, whole: Batch, gradient: Tensor) -> Tensor:
        """The gradients of this rank's weights among those of all ranks' weights."""
        pieces, at = {}, 0
        for key in whole.keys:
            counts = [len(batch.flat(key)) for batch in self.every]
            begin = at + sum(counts[: self.rank])
            pieces[key] = gradient[begin : begin + counts[self.rank]]
            at += sum(counts)
        unused = gradient.new_zeros(len(self.batch.flat("unused")) if "unused" in self.batch.keys else 0)
        return torch.cat([pieces.get(key, unused) for key in self.batch.keys])


def _vectors(batch: Batch, name: str, shape: Shape) -> int:
    if shape.kind == "rows":
        return len(batch.flat(name))
    return len(batch.bags[name] if batch.inverse is None else batch.inverse[name])


def joined(batches: list[Batch], shape: Shape) -> Batch:
    """The ranks' batches one after another."""
    keys = list(shape.rows_of)
    bags = {key: [bag for batch in batches for bag in batch.bags[key]] for key in keys}
    weights = None
    if shape.weighted:
        weights = {key: [own for batch in batches for own in (batch.weights or {})[key]] for key in keys}
    inverse = None
    if any(batch.inverse is not None for batch in batches):
        inverse = {key: _joined_inverse(batches, key) for key in keys}
    return Batch(keys, bags, weights, batches[0].form, batches[0].dtype, inverse)


def _joined_inverse(batches: list[Batch], key: str) -> list[int]:
    found: list[int] = []
    begin = 0
    for batch in batches:
        own = range(len(batch.bags[key])) if batch.inverse is None else batch.inverse[key]
        found += [begin + number for number in own]
        begin += len(batch.bags[key])
    return found
