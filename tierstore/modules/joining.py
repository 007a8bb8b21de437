"""Several lookups of a module as one: what one batch of all their examples would have looked up.

Features stay in their order, and within a feature lookup follows lookup, so that sums over the positions of
a row have the order, and the bits, that they have for that one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore.cache.layout import Segment
from tierstore.keys import MAX_ID, split
from tierstore.modules.inputs import FeatureLookup
from tierstore.modules.lookup import (
    Gradients,
    Lookup,
    Part,
    PooledGradients,
    PooledPart,
    SequenceGradients,
    SequencePart,
)


@dataclass
class Pass:
    """One backward pass: what it looked up, with no rows held, and the gradients."""

    lookup: FeatureLookup
    gradients: Any

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(part.nbytes for part in self.lookup.parts) + sum(t.nbytes for t in self._tensors())

    def _tensors(self) -> list[Tensor]:
        found = self.gradients
        if isinstance(found, SequenceGradients):
            return list(found.grads)
        return [found.grad, *(t for t in (*found.weights, *found.argmaxes) if t is not None)]


def joined(passes: Sequence[Pass], padding: int) -> tuple[Lookup, Gradients]:
    """``padding``: the id that the module's lookups skip."""
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
    chain = passes[0].lookup.parts[index].chain
    return SequencePart(chain, _batch(chain, pieces, padding), []), torch.cat(grads)


def _pooled(passes: Sequence[Pass], index: int, bases: Sequence[int], padding: int) -> _Pooled:
    parts: list[Any] = [one.lookup.parts[index] for one in passes]
    weights = _weights_of(passes, index)
    bags, pieces, starts = [], [], []
    for number in range(len(parts[0].modes)):
        for part, base in zip(parts, bases, strict=False):
            first, last = part.bag_start[number], part.bag_start[number + 1]
            positions = slice(int(part.offsets[first]), int(part.offsets[last]))
            bags.append((np.diff(part.offsets[first : last + 1]), part, number, base))
            pieces.append((part, positions))
            starts.append((slice(int(first), int(last)), positions))
    chain, ends = parts[0].chain, np.cumsum([0, *(p.stop - p.start for _, p in pieces)])
    order = list(range(len(passes))) * len(parts[0].modes)
    argmax = None
    if passes[0].gradients.argmaxes[index] is not None:
        dim, shifted = chain.layout.dim, [torch.zeros(1, dtype=torch.int32)]
        for at, (which, positions), begin in zip(order, starts, ends, strict=False):
            found = passes[at].gradients.argmaxes[index][which.start * dim : which.stop * dim]
            shifted.insert(-1, torch.where(found < 0, found, found + int(begin - positions.start)).int())
        argmax = torch.cat(shifted)
    part = PooledPart(
        chain,
        _batch(chain, pieces, padding),
        [],
        offsets=_from_zero(np.concatenate([lengths for lengths, *_ in bags])),
        bag_start=_from_zero(np.array([len(lengths) for lengths, *_ in bags])),
        out_offset=np.array([part.out_offset[n] + base for _, part, n, base in bags], np.int64),
        out_stride=np.array([part.out_stride[n] for _, part, n, _ in bags], np.int64),
        modes=np.array([part.modes[n] for _, part, n, _ in bags], np.uint8),
    )
    cut = [weights[at][where] for at, (_, where) in zip(order, pieces, strict=True)] if weights else None
    return _Pooled(part, None if cut is None else torch.cat(cut), argmax)


def _weights_of(passes: Sequence[Pass], index: int) -> list[Tensor]:
    """Per pass the weights of all positions, ones where only other passes have weights; [] if none has."""
    found = [one.gradients.weights[index] for one in passes]
    if all(weights is None for weights in found):
        return []
    sizes = [len(one.lookup.parts[index].batch.inverse) for one in passes]
    return [torch.ones(n) if w is None else w for w, n in zip(found, sizes, strict=True)]


def _batch(chain: Any, pieces: Sequence[tuple[Part, slice]], padding: int) -> Any:
    """The ids at these positions, deduplicated together."""
    tables, ids = [], []
    for part, where in pieces:
        inverse = part.batch.inverse[where]
        used = inverse >= 0
        found = np.full(len(inverse), padding, np.int64)
        table, found[used] = _split(part.batch.unique[inverse[used]])
        tables.append(table)
        ids.append(found)
    return chain.batch(
        [
            Segment("", table, found.ctypes.data, len(found), False, MAX_ID + 1, padding)
            for table, found in zip(tables, ids, strict=True)
        ]
    )


def _split(keys: NDArray[np.uint64]) -> tuple[int, NDArray[np.int64]]:
    tables, ids = split(keys)
    return (int(tables[0]) if len(tables) else 0), ids


def _from_zero(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
