"""Checks of jagged inputs. Checks on construction read shapes only; ``validate()`` reads the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tierstore.errors import InputError

KJT = "KeyedJaggedTensor"
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_parts(
    what: str, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
) -> None:
    """Check types, dtypes, devices and sizes of the tensors of a jagged tensor, one by one."""
    if not isinstance(values, Tensor):
        raise InputError(f"{what}: values must be a torch.Tensor, not {type(values).__name__}")
    if values.dim() == 0:
        raise InputError(f"{what}: values must have at least one dimension, got a scalar")
    if lengths is None and offsets is None:
        raise InputError(f"{what}: give lengths or offsets, to say where the bags of values begin and end")
    for name, part in (("weights", weights), ("lengths", lengths), ("offsets", offsets)):
        if part is None:
            continue
        if not isinstance(part, Tensor):
            raise InputError(f"{what}: {name} must be a torch.Tensor, not {type(part).__name__}")
        if part.device != values.device:
            raise InputError(
                f"{what}: values are on {values.device} but {name} on {part.device}; move one of them"
            )
        if name != "weights" and part.numel() and part.dtype not in INTEGERS:
            raise InputError(f"{what}: {name} must be integers, got {part.dtype}; use {name}.long()")
    if weights is not None and (weights.dim() == 0 or weights.size(0) != values.size(0)):
        raise InputError(
            f"{what}: weights of shape {tuple(weights.shape)} do not fit values of shape "
            f"{tuple(values.shape)}; every value needs one weight"
        )
    if offsets is not None and offsets.dim() != 1:
        raise InputError(f"{what}: offsets must have one dimension, got shape {tuple(offsets.shape)}")


def flat_lengths(lengths: Tensor | None) -> Tensor | None:
    """Return lengths in one dimension; torchrec's users also give lengths as (keys, batch)."""
    return lengths if lengths is None or lengths.dim() == 1 else lengths.reshape(-1)


def normal_offsets(offsets: Tensor | None) -> Tensor | None:
    """Return offsets with their leading 0, which some producers leave out where there are no bags."""
    if offsets is None or offsets.numel():
        return offsets
    return offsets.new_zeros(1, dtype=offsets.dtype if offsets.dtype in INTEGERS else torch.int64)


def check_counts(what: str, lengths: Tensor | None, offsets: Tensor | None) -> None:
    """Check that there is one offset more than lengths, where both are given."""
    if lengths is not None and offsets is not None and offsets.numel() != lengths.numel() + 1:
        raise InputError(
            f"{what}: {lengths.numel()} lengths need {lengths.numel() + 1} offsets, got {offsets.numel()}"
        )


def check_key_counts(keys: Sequence[str], bags: int, stride: int | None, strides: Tensor | None) -> None:
    """Check that the number of bags fits the keys and their batch sizes; ``strides`` is (keys, ranks)."""
    if strides is not None:
        if (keys or strides.numel()) and (strides.dim() != 2 or strides.size(0) != len(keys)):
            raise InputError(
                f"{KJT}: stride_per_key_per_rank has shape {tuple(strides.shape)}; it needs a row for each "
                f"of the {len(keys)} keys and a column per rank"
            )
        if int(strides.sum()) != bags:
            raise InputError(
                f"{KJT}: the strides of the keys add up to {int(strides.sum())} bags, but "
                f"there are lengths (or offsets) of {bags}"
            )
    elif not keys:
        if bags:
            raise InputError(f"{KJT}: there are lengths or offsets of {bags} bags but no keys")
    elif stride is not None and stride * len(keys) != bags:
        raise InputError(
            f"{KJT}: {len(keys)} keys with stride {stride} need {stride * len(keys)} bags, but "
            f"there are lengths (or offsets) of {bags}"
        )
    elif bags % len(keys):
        raise InputError(
            f"{KJT}: lengths (or offsets) of {bags} bags cannot be shared evenly by {len(keys)} "
            f"keys {list(keys)[:8]}; give stride_per_key_per_rank if their batch sizes differ"
        )


def check_inverse_shape(inverse: tuple[list[str], Tensor] | None) -> None:
    """Check that inverse indices are (names, tensor of a row per name and a column per example)."""
    if inverse is None:
        return
    names, indices = inverse
    if indices.numel() and (indices.dim() != 2 or indices.size(0) != len(names)):
        raise InputError(
            f"{KJT}: inverse_indices of shape {tuple(indices.shape)} need a row for each of their "
            f"{len(names)} keys and a column per example"
        )
    if indices.numel() and indices.dtype not in INTEGERS:
        raise InputError(f"{KJT}: inverse_indices must be integers, got {indices.dtype}")


def check_sums(keys: Sequence[str], length_per_key: Sequence[int], size: int) -> None:
    """Check that the lengths of all keys add up to the number of values; an error names the key at fault."""
    total = sum(length_per_key)
    if total == size and min(length_per_key, default=0) >= 0:
        return
    end = 0
    for key, length in zip(keys, length_per_key, strict=True):
        if length < 0:
            raise InputError(f"{KJT}: key {key!r} has negative lengths: they add up to {length}")
        end += length
        if end > size:
            raise InputError(
                f"{KJT}: the lengths add up to {total} but there are {size} values: key {key!r} "
                f"has lengths of {length} in all, but only {size - end + length} values are left for it"
            )
    raise InputError(
        f"{KJT}: the lengths add up to {total} but there are {size} values: {size - total} are left over; "
        f"lengths per key: {dict(list(zip(keys, length_per_key, strict=True))[:8])}"
    )


def check_first_offset(offsets: Tensor | None, what: str = KJT) -> None:
    """Check that offsets, if there are any, begin with 0."""
    if offsets is not None and int(offsets[0]) != 0:
        raise InputError(f"{what}: offsets must begin with 0, got {int(offsets[0])}")


def check_bags(
    what: str,
    lengths: Tensor | None,
    offsets: Tensor | None,
    size: int,
    keys: Sequence[str] = (),
    strides: Sequence[int] = (),
) -> None:
    """Read lengths and offsets and check that they are not negative, fit ``size`` values, and agree."""

    def bag(position: int) -> str:
        for key, stride in zip(keys, strides, strict=True):
            if position < stride:
                return f"bag {position} of key {key!r}"
            position -= stride
        return f"bag {position}"

    if lengths is not None:
        if lengths.numel() and int(lengths.min()) < 0:
            worst = int(lengths.argmin())
            raise InputError(f"{what}: {bag(worst)} has the negative length {int(lengths[worst])}")
        total = int(lengths.sum())
        if not keys and total != size:
            raise InputError(f"{what}: the lengths add up to {total} but there are {size} values")
    if offsets is None:
        return
    check_first_offset(offsets, what)
    steps = torch.diff(offsets.long())
    if steps.numel() and int(steps.min()) < 0:
        worst = int((steps < 0).to(torch.uint8).argmax())
        raise InputError(
            f"{what}: offsets must not decrease, but {bag(worst)} runs from {int(offsets[worst])} to "
            f"{int(offsets[worst + 1])}"
        )
    if int(offsets[-1]) != size:
        raise InputError(f"{what}: the last offset is {int(offsets[-1])} but there are {size} values")
    if lengths is not None and not torch.equal(steps, lengths.long()):
        worst = int((steps != lengths.long()).to(torch.uint8).argmax())
        raise InputError(
            f"{what}: {bag(worst)} has length {int(lengths[worst])} but offsets {int(steps[worst])} apart"
        )


def check_inverse_indices(
    keys: Sequence[str], strides: Sequence[int], inverse: tuple[list[str], Tensor] | None
) -> None:
    """Check that each inverse index of a key points at one of the bags of that key."""
    if inverse is None or not inverse[1].numel():
        return
    names, indices = inverse
    low, high = indices.amin(dim=-1).tolist(), indices.amax(dim=-1).tolist()
    stride_of = dict(zip(keys, strides, strict=True))
    for name, lowest, highest in zip(names, low, high, strict=True):
        if name in stride_of and not 0 <= lowest <= highest < stride_of[name]:
            bad = lowest if lowest < 0 else highest
            raise InputError(
                f"{KJT}: inverse index {bad} of key {name!r} is outside its {stride_of[name]} bags"
            )
