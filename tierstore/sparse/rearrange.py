"""Keys of KeyedJaggedTensors put together, taken apart and into another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tierstore.errors import InputError

if TYPE_CHECKING:
    from tierstore.sparse.jagged import JaggedTensor
    from tierstore.sparse.keyed_jagged import InverseIndices, KeyedJaggedTensor


def from_parts(kind: type[KeyedJaggedTensor], parts: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    """See KeyedJaggedTensor.from_jt_dict."""
    weighted = [key for key, part in parts.items() if part.weights_or_none() is not None]
    if weighted and len(weighted) < len(parts):
        bare = next(key for key in parts if key not in weighted)
        raise InputError(f"from_jt_dict: key {weighted[0]!r} has weights but {bare!r} has none")
    strides = [part.lengths().numel() for part in parts.values()]
    uniform = len(set(strides)) == 1
    return kind(
        list(parts),
        torch.cat([part.values() for part in parts.values()]),
        torch.cat([part.weights() for part in parts.values()]) if weighted else None,
        lengths=torch.cat([part.lengths() for part in parts.values()]),
        stride=strides[0] if uniform else None,
        stride_per_key_per_rank=None if uniform else [[stride] for stride in strides],
    )


def concat(kjts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """See KeyedJaggedTensor.concat."""
    if not kjts:
        raise InputError("concat: there is no KeyedJaggedTensor to concatenate")
    weighted = _same("weights", [kjt.weights_or_none() is not None for kjt in kjts])
    variable = _same("strides that differ per key", [kjt.variable_stride_per_key() for kjt in kjts])
    inverse = _same("inverse indices", [kjt.inverse_indices_or_none() is not None for kjt in kjts])
    strides = [kjt.stride() for kjt in kjts]
    if not variable and len(set(strides)) > 1:
        raise InputError(f"concat: batch sizes must agree, got {strides}")
    known = [kjt.length_per_key_or_none() for kjt in kjts]
    return type(kjts[0])(
        list(chain.from_iterable(kjt.keys() for kjt in kjts)),
        torch.cat([kjt.values() for kjt in kjts]),
        torch.cat([kjt.weights() for kjt in kjts]) if weighted else None,
        lengths=torch.cat([kjt.lengths() for kjt in kjts]),
        stride=None if variable else strides[0],
        stride_per_key_per_rank=[row for kjt in kjts for row in kjt.stride_per_key_per_rank()]
        if variable
        else None,
        length_per_key=None if None in known else [length for part in known if part for length in part],
        inverse_indices=_joined([kjt.inverse_indices() for kjt in kjts]) if inverse else None,
    )


def split(kjt: KeyedJaggedTensor, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
    """See KeyedJaggedTensor.split."""
    keys = kjt.keys()
    if min(segments, default=0) < 0 or sum(segments) > len(keys):
        raise InputError(f"split: segments {list(segments)} do not fit {len(keys)} keys")
    pieces, start = [], 0
    for segment in segments:
        # the whole is returned as it is, with everything that it has computed
        pieces.append(kjt if segment == len(keys) else _key_range(kjt, start, start + segment))
        start += segment
    return pieces


def permute(kjt: KeyedJaggedTensor, indices: Sequence[int]) -> KeyedJaggedTensor:
    """See KeyedJaggedTensor.permute."""
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


def _key_range(kjt: KeyedJaggedTensor, start: int, end: int) -> KeyedJaggedTensor:
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
    kjt: KeyedJaggedTensor,
    keys: list[str],
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor,
    indices: list[int],
    length_per_key: list[int],
) -> KeyedJaggedTensor:
    """Some keys of ``kjt``: it keeps their strides, and their inverse indices."""
    strides = kjt._stride_per_key_per_rank
    return type(kjt)(
        keys,
        values,
        weights,
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
    """The rows of the inverse indices for ``keys``, in their order; rows of other keys are left out."""
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
