"""Join, cut and reorder the keys of KeyedJaggedTensors.

Each function returns the arguments of the constructor of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import TypedDict

import torch
from torch import Tensor

from tierstore.errors import InputError
from tierstore.sparse.jagged import JaggedTensor
from tierstore.sparse.per_key import FiguresPerKey, InverseIndices


class Parts(TypedDict):
    """Arguments of :class:`tierstore.sparse.KeyedJaggedTensor`, by name."""

    keys: list[str]
    values: Tensor
    weights: Tensor | None
    lengths: Tensor
    stride: int | None
    stride_per_key_per_rank: Tensor | list[list[int]] | None
    length_per_key: list[int] | None
    inverse_indices: InverseIndices | None


def join_dict(parts: Mapping[str, JaggedTensor]) -> Parts:
    """Join one JaggedTensor per key; see KeyedJaggedTensor.from_jt_dict."""
    weighted = [key for key, part in parts.items() if part.weights_or_none() is not None]
    if weighted and len(weighted) < len(parts):
        bare = next(key for key in parts if key not in weighted)
        raise InputError(f"from_jt_dict: key {weighted[0]!r} has weights but {bare!r} has none")
    strides = [part.lengths().numel() for part in parts.values()]
    uniform = len(set(strides)) == 1
    return Parts(
        keys=list(parts),
        values=torch.cat([part.values() for part in parts.values()]),
        weights=torch.cat([part.weights() for part in parts.values()]) if weighted else None,
        lengths=torch.cat([part.lengths() for part in parts.values()]),
        stride=strides[0] if uniform else None,
        stride_per_key_per_rank=None if uniform else [[stride] for stride in strides],
        length_per_key=None,
        inverse_indices=None,
    )


def concat(kjts: Sequence[FiguresPerKey]) -> Parts:
    """Join the keys of all; see KeyedJaggedTensor.concat."""
    if not kjts:
        raise InputError("concat: there is no KeyedJaggedTensor to concatenate; give at least one")
    weighted = _same("weights", [kjt.weights_or_none() is not None for kjt in kjts])
    variable = _same("strides that differ per key", [kjt.variable_stride_per_key() for kjt in kjts])
    inverse = _same("inverse indices", [kjt.inverse_indices_or_none() is not None for kjt in kjts])
    strides = [kjt.stride() for kjt in kjts]
    if not variable and len(set(strides)) > 1:
        raise InputError(f"concat: batch sizes must agree, got {strides}")
    known = [kjt.length_per_key_or_none() for kjt in kjts]
    return Parts(
        keys=list(chain.from_iterable(kjt.keys() for kjt in kjts)),
        values=torch.cat([kjt.values() for kjt in kjts]),
        weights=torch.cat([kjt.weights() for kjt in kjts]) if weighted else None,
        lengths=torch.cat([kjt.lengths() for kjt in kjts]),
        stride=None if variable else strides[0],
        stride_per_key_per_rank=[row for kjt in kjts for row in kjt.stride_per_key_per_rank()]
        if variable
        else None,
        length_per_key=None if None in known else [length for part in known if part for length in part],
        inverse_indices=_joined([kjt.inverse_indices() for kjt in kjts]) if inverse else None,
    )


def segment_bounds(
    kjt: FiguresPerKey, segments: Sequence[int], given: str = "split: segments"
) -> list[tuple[int, int]]:
    """Return the first and the last key (exclusive) of each segment, a number of keys. ``given``: what an
    InputError calls the segments."""
    count = len(kjt.keys())
    if min(segments, default=0) < 0 or sum(segments) > count:
        raise InputError(f"{given} {list(segments)} do not fit {count} keys")
    return list(pairwise(accumulate(segments, initial=0)))


def permute(kjt: FiguresPerKey, indices: Sequence[int]) -> Parts:
    """Return the keys at ``indices`` in that order; see KeyedJaggedTensor.permute."""
    count = len(kjt.keys())
    wrong = [index for index in indices if not 0 <= index < count]
    if wrong:
        raise InputError(f"permute: index {wrong[0]} is outside the {count} keys {kjt.keys()}")
    values, bags = kjt.offset_per_key(), kjt.lengths_offset_per_key()
    weights = kjt.weights_or_none()
    keys = [kjt.keys()[index] for index in indices]
    return _derived(
        kjt,
        keys,
        _gathered(kjt.values(), values, indices),
        None if weights is None else _gathered(weights, values, indices),
        _gathered(kjt.lengths(), bags, indices),
        list(indices),
        [kjt.length_per_key()[index] for index in indices],
    )


def key_range(kjt: FiguresPerKey, start: int, end: int) -> Parts:
    """Cut out the keys from ``start`` to ``end`` (exclusive), without copies."""
    values, bags = kjt.offset_per_key(), kjt.lengths_offset_per_key()
    weights = kjt.weights_or_none()
    inside = slice(values[start], values[end])
    return _derived(
        kjt,
        kjt.keys()[start:end],
        kjt.values()[inside],
        None if weights is None else weights[inside],
        kjt.lengths()[bags[start] : bags[end]],
        list(range(start, end)),
        kjt.length_per_key()[start:end],
    )


def _derived(
    kjt: FiguresPerKey,
    keys: list[str],
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor,
    indices: list[int],
    length_per_key: list[int],
) -> Parts:
    """Add the strides and the inverse indices that ``keys`` have in ``kjt``."""
    strides = kjt._stride_per_key_per_rank
    return Parts(
        keys=keys,
        values=values,
        weights=weights,
        lengths=lengths,
        stride=kjt.stride(),
        stride_per_key_per_rank=None if strides is None or strides.dim() != 2 else strides[indices],
        length_per_key=length_per_key,
        inverse_indices=_selected(kjt.inverse_indices_or_none(), keys),
    )


def _gathered(flat: Tensor, bounds: Sequence[int], indices: Sequence[int]) -> Tensor:
    parts = [flat[bounds[index] : bounds[index + 1]] for index in indices]
    return torch.cat(parts) if parts else flat[:0]


def _selected(inverse: InverseIndices | None, keys: Sequence[str]) -> InverseIndices | None:
    """Return the rows of the inverse indices for ``keys``, in the keys' order, without other keys' rows."""
    if inverse is None:
        return None
    row_of = {name: row for row, name in enumerate(inverse[0])}
    names = [key for key in keys if key in row_of]
    return names, inverse[1][[row_of[name] for name in names]]


def _joined(parts: Sequence[InverseIndices]) -> InverseIndices:
    sizes = {indices.size(-1) for _, indices in parts}
    if len(sizes) > 1:
        raise InputError(f"concat: the inverse indices are for batches of different sizes {sorted(sizes)}")
    return [name for names, _ in parts for name in names], torch.cat([indices for _, indices in parts])


def _same(what: str, have: Sequence[bool]) -> bool:
    if any(have) and not all(have):
        raise InputError(f"concat: number {have.index(True)} has {what}, number {have.index(False)} has not")
    return all(have)
