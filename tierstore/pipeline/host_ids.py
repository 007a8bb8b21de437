"""Which tensors of a batch lookups read and nothing else does, so that they stay on the host."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

_View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides, and the first element's place, in elements from a tensor's first one."""


class HostIds:
    """``inputs``: what the lookups of a batch read, such as ids and offsets."""

    def __init__(self, inputs: Iterable[Tensor] = ()) -> None:
        self._inputs = list(inputs)

    def are_all_of(self, leaf: Tensor) -> bool:
        """Return whether lookups read each element of ``leaf``, as one tensor or as several parts of it."""
        if any(one is leaf for one in self._inputs):
            return True
        same = [one for one in self._inputs if (one.dtype, one.device) == (leaf.dtype, leaf.device)]
        if not same or not _is_plain(leaf) or not leaf.numel():
            return False
        begin, size = leaf.data_ptr(), leaf.element_size()
        whole = tuple(leaf.shape), leaf.stride(), 0
        views = [
            (tuple(one.shape), one.stride(), (one.data_ptr() - begin) // size)
            for one in same
            if _is_plain(one) and one.numel()
        ]
        # Tensors whose memory overlaps are views of one tensor.
        parts = frozenset(view for view in views if view[2] <= _last(whole) and _last(view) >= 0)
        return _cover(whole, parts)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type in ("cpu", "cuda") and tensor.layout is torch.strided and not tensor.is_nested


@functools.lru_cache(maxsize=256)
def _cover(whole: _View, parts: frozenset[_View]) -> bool:
    """Return whether each element of ``whole`` is in one of ``parts``."""
    if whole in parts:
        return True
    first = min(place for _, _, place in (whole, *parts))
    size = max(_last(view) for view in (whole, *parts)) - first + 1
    marks = torch.zeros(size, dtype=torch.bool, device="cpu")
    for shape, strides, place in parts:
        marks.as_strided(shape, strides, place - first).fill_(True)
    shape, strides, place = whole
    return bool(marks.as_strided(shape, strides, place - first).all())


def _last(view: _View) -> int:
    """Return the place of the last element."""
    shape, strides, place = view
    return place + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
