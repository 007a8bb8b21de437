"""Batches in memory of their own, for loaders that make batches in the training process."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

LEAST_BYTES = 64 << 10
"""Smaller tensors stay where they are: they keep few pages of the heap."""

Batch = TypeVar("Batch")


def in_own_pages(batch: Batch) -> Batch:
    """Return a copy of ``batch``, a pytree, whose large CPU tensors lie in pages of their own.

    Batches of a prefetch window live as long as tens of training steps. On malloc's heap they would lie
    between the temporaries of these steps, and the heap could give no page back: the process would take
    several times the bytes of the batches. Use it where the training process makes its batches itself,
    ``prefetch(map(in_own_pages, loader), model)``. Batches of a ``DataLoader`` with workers are in shared
    memory, and pinned batches in pages of the driver, so both need no copy.
    """
    return _in_own_pages(batch, frozenset())


def _in_own_pages(batch: Batch, stay: frozenset[int]) -> Batch:
    """Copy a batch, without tensors whose memory begins at an address of ``stay``."""
    copied: Batch = pytree.tree_map_only(Tensor, lambda tensor: _copied(tensor, stay), batch)
    return copied


class OwnPagesWhileKept(Generic[Batch]):
    """Gives the batches of an iterable, and copies a batch into pages of its own only while many wait.

    ``few``: as long as the batch given so many before is gone, a batch is given as it is, since few batches
    keep little of malloc's heap and a copy takes time. Tensors that a batch shares with the batch before are
    not copied. Batches must allow weak references.
    """

    def __init__(self, batches: Iterable[Batch], few: int = 32) -> None:
        self._batches = iter(batches)
        self._recent: deque[weakref.ref[Batch]] = deque(maxlen=few)
        self._last: Batch | None = None  # as it was given: while it is here, no other tensor has its memory

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        if len(self._recent) == self._recent.maxlen and self._recent[0]() is not None:
            stay = frozenset(tensor.data_ptr() for tensor in _tensors_in(self._last))
            self._last, batch = batch, _in_own_pages(batch, stay)
        else:
            self._last = batch
        self._recent.append(weakref.ref(batch))
        return batch


def _tensors_in(batch: object) -> Iterator[Tensor]:
    """Yield the tensors of a pytree that may be copied."""
    return (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and _is_plain(leaf))


def _is_plain(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.device.type != "cpu":
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


def _copied(tensor: Tensor, stay: frozenset[int]) -> Tensor:
    if not _is_plain(tensor) or tensor.requires_grad or tensor.is_quantized or tensor.nbytes < LEAST_BYTES:
        return tensor
    if tensor.is_pinned() or tensor.is_shared() or tensor.data_ptr() in stay:
        return tensor
    # Private: what a forked process writes to its batch must not reach this process.
    memory = mmap.mmap(-1, tensor.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
