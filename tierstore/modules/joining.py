"""Joins lookups of a module to the lookup that one batch of all their examples would have made.

Features stay in their order, and within a feature lookup follows lookup. Sums over the positions of a row
then have the order, and the bits, of the one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore import _core
from tierstore.cache.group import TierGroup
from tierstore.cache.layout import IdSegment
from tierstore.keys import MAX_ID, split
from tierstore.modules.gpu import made_here
from tierstore.modules.inputs import FeatureLookup
from tierstore.modules.lookup import PooledGradients, SequenceGradients
from tierstore.modules.parts import Lookup, Part, PooledPart, SequencePart
from tierstore.modules.row_updates import Gradients


@dataclass
class Pass:
    """One backward pass: its lookup, without pinned rows, and the gradients."""

    lookup: FeatureLookup
    gradients: Any

    def __post_init__(self) -> None:
        # Autograd computes on the stream of the forward call. The caller's stream waits for leaves alone.
        self.follow = made_here(self._tensors())
        """Let the current stream use the gradients."""

    @property
    def nbytes(self) -> int:
        """Bytes of the kept lookup and gradients."""
        return sum(part.nbytes for part in self.lookup.parts) + sum(t.nbytes for t in self._tensors())

    def _tensors(self) -> list[Tensor]:
        found = self.gradients
        if isinstance(found, SequenceGradients):
            return list(found.grads)
        return [found.grad, *(t for t in (*found.weights, *found.argmaxes) if t is not None)]


def joined(passes: Sequence[Pass], padding: int) -> tuple[Lookup, Gradients]:
    """Return one lookup of all passes, and its gradients. ``padding``: the id that lookups skip."""
    for one in passes:
        one.follow()
    indices = range(len(passes[0].lookup.parts))
    if isinstance(passes[0].gradients, SequenceGradients):
        found = [_sequence(passes, index, padding) for index in indices]
        return Lookup([part for part, _ in found]), SequenceGradients([grad for _, grad in found])
    grads = [one.gradients.grad.view(-1) for one in passes]
    bases = [0, *accumulate(len(grad) for grad in grads)]
    pooled = [_pooled(passes, index, bases, padding) for index in indices]
    weights, argmaxes = [p.weights for p in pooled], [p.argmax for p in pooled]
    return Lookup([p.part for p in pooled]), PooledGradients(torch.cat(grads), weights, argmaxes)


@dataclass
class _Piece:
    """The bags and positions of one feature of one pass, within its part."""

    number: int
    part: PooledPart
    feature: int
    bags: slice
    positions: slice


@dataclass
class _Pooled:
    part: PooledPart
    weights: Tensor | None
    argmax: Tensor | None


def _sequence(passes: Sequence[Pass], index: int, padding: int) -> tuple[SequencePart, Tensor]:
    pieces: list[tuple[Part, slice]] = []
    grads = []
    for number in range(len(passes[0].lookup.features[index])):
        for one in passes:
            counts = [one.lookup.counts[member] for member in one.lookup.features[index]]
            begin = sum(counts[:number])
            where = slice(begin, begin + counts[number])
            pieces.append((one.lookup.parts[index], where))
            grads.append(one.gradients.grads[index][where])
    group = passes[0].lookup.parts[index].group
    return SequencePart(group, _batch(group, pieces, padding), []), torch.cat(grads)


def _pieces(passes: Sequence[Pass], index: int) -> list[_Piece]:
    found = []
    parts: list[Any] = [one.lookup.parts[index] for one in passes]
    for feature in range(len(parts[0].bags.modes)):
        for number, part in enumerate(parts):
            starts, offsets = part.bags.bag_start, part.bags.offsets
            bags = slice(int(starts[feature]), int(starts[feature + 1]))
            positions = slice(int(offsets[bags.start]), int(offsets[bags.stop]))
            found.append(_Piece(number, part, feature, bags, positions))
    return found


def _pooled(passes: Sequence[Pass], index: int, bases: Sequence[int], padding: int) -> _Pooled:
    pieces = _pieces(passes, index)
    group = pieces[0].part.group
    lengths = [np.diff(p.part.bags.offsets[p.bags.start : p.bags.stop + 1]) for p in pieces]
    offsets, bag_start = _core.bag_offsets(lengths)
    bags = _core.Bags(
        offsets=offsets,
        bag_start=bag_start,
        out_offset=np.array([p.part.bags.out_offset[p.feature] + bases[p.number] for p in pieces], np.int64),
        out_stride=np.array([p.part.bags.out_stride[p.feature] for p in pieces], np.int64),
        modes=np.array([p.part.bags.modes[p.feature] for p in pieces], np.uint8),
    )
    part = PooledPart(group, _batch(group, [(p.part, p.positions) for p in pieces], padding), [], bags=bags)
    return _Pooled(part, _weights(passes, index, pieces), _argmax(passes, index, pieces))


def _weights(passes: Sequence[Pass], index: int, pieces: Sequence[_Piece]) -> Tensor | None:
    """Return weights of all positions, ones where only other passes have weights; None if no pass has."""
    found = [one.gradients.weights[index] for one in passes]
    if all(weights is None for weights in found):
        return None
    sizes = [len(one.lookup.parts[index].batch.device_inverse) for one in passes]
    ones = partial(torch.ones, dtype=torch.float32, device=passes[0].lookup.parts[index].device)
    whole = [ones(n) if w is None else w for w, n in zip(found, sizes, strict=True)]
    return torch.cat([whole[p.number][p.positions] for p in pieces])


def _argmax(passes: Sequence[Pass], index: int, pieces: Sequence[_Piece]) -> Tensor | None:
    """Return positions that max pooling took, as positions among all; None if there is no such feature."""
    if passes[0].gradients.argmaxes[index] is None:
        return None
    dim, begin, shifted = pieces[0].part.group.layout.dim, 0, []
    for p in pieces:
        found = passes[p.number].gradients.argmaxes[index][p.bags.start * dim : p.bags.stop * dim]
        shifted.append(torch.where(found < 0, found, found + (begin - p.positions.start)))
        begin += p.positions.stop - p.positions.start
    # one more, since an empty tensor has no address
    return torch.cat([*shifted, shifted[0].new_zeros(1)])


def _batch(group: TierGroup, pieces: Sequence[tuple[Part, slice]], padding: int) -> _core.Batch:
    """Return the ids at these positions, deduplicated together; none of tables that a pass did not train."""
    tables, ids, skipped = [], [], []
    for part, where in pieces:
        inverse = part.batch.inverse[where]
        used = inverse >= 0
        found = np.full(len(inverse), padding, np.int64)
        table, found[used] = _split(part.batch.unique[inverse[used]])
        skips = padding
        if table in part.frozen:
            found[:] = skips = 0  # a padding that all these ids have; there may be no other
        tables.append(table)
        ids.append(found)
        skipped.append(skips)
    return group.batch(
        [
            IdSegment("", found.ctypes.data, len(found), False, table, MAX_ID + 1, skips)
            for table, found, skips in zip(tables, ids, skipped, strict=True)
        ]
    )


def _split(keys: NDArray[np.uint64]) -> tuple[int, NDArray[np.int64]]:
    tables, ids = split(keys)
    return (int(tables[0]) if len(tables) else 0), ids
