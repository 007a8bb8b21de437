"""Accepts the jagged tensors of other libraries, by their methods and without importing them."""

from __future__ import annotations

from typing import Any

from tierstore.errors import InputError
from tierstore.sparse.keyed_jagged import KeyedJaggedTensor

_NEEDED = (
    "keys",
    "values",
    "weights_or_none",
    "lengths",
    "offsets_or_none",
    "stride_per_key_per_rank",
)


def as_keyed_jagged_tensor(x: Any) -> KeyedJaggedTensor:
    """Return ``x``, or a view of a torchrec KeyedJaggedTensor that shares its tensors; else InputError."""
    if isinstance(x, KeyedJaggedTensor):
        return x
    missing = [name for name in _NEEDED if not callable(getattr(x, name, None))]
    if missing:
        raise InputError(
            f"expected a KeyedJaggedTensor (tierstore's or torchrec's), got {type(x).__name__}, which has no "
            f"{', '.join(missing)}"
        )
    # lengths() keeps what it computes, so x gives the same tensor every time, by which prefetching knows it
    lengths, offsets = x.lengths(), x.offsets_or_none()
    if offsets is not None and offsets.numel() != lengths.numel() + 1:
        offsets = None  # torchrec's split() leaves empty tensors behind
    variable = x.variable_stride_per_key()
    return KeyedJaggedTensor(
        list(x.keys()),
        x.values(),
        x.weights_or_none(),
        lengths,
        offsets,
        stride=None if variable else x.stride(),
        stride_per_key_per_rank=x.stride_per_key_per_rank() if variable else None,
        length_per_key=x.length_per_key_or_none(),
        inverse_indices=x.inverse_indices_or_none(),
    )
