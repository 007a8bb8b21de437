"""Copies of batches to a GPU on a stream of their own, beside what the GPU computes.

The batch that is used next is copied while the one before it is in use. torch's rules for side streams hold:
the stream that computes waits for the copy, and the allocator is told that it uses the memory. The copy waits
for the stream that computes where the batch has tensors on a GPU already.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tierstore.pipeline.host_ids import HostIds
from tierstore.pipeline.learning import Path, follow, is_keyed_jagged, leaves, tensors_of

_UNKNOWN = HostIds()


class Unchanged:
    """Hands batches out as they are. ``ids``: what lookups read of a batch, as far as that is known."""

    def start(self, batch: Any, ids: HostIds = _UNKNOWN) -> None:
        """Begin with the batch that is used next."""

    def finish(self, batch: Any, ids: HostIds = _UNKNOWN) -> Any:
        """Return the batch, for the caller's current stream."""
        return batch

    def forget(self) -> None:
        """Drop what was begun."""


@dataclass(frozen=True)
class _Leaf:
    """``given``: of the loader's batch; ``made``: its copy; ``ids``: its parts that stay on the host."""

    given: Any
    made: Any
    ids: list[tuple[Path, Any]]


@dataclass(frozen=True)
class _Copy:
    """Of ``batch``; ``done`` is behind the copies."""

    batch: Any
    leaves: list[_Leaf]
    structure: pytree.TreeSpec
    done: torch.cuda.Event


def copies_to(device: torch.device | None) -> Unchanged:
    """Return the copies of batches that are used on ``device``."""
    return Unchanged() if device is None or device.type != "cuda" else GpuCopies(device)


class GpuCopies(Unchanged):
    """Copies to ``device``, without ids on the host, which plans lookups: keyed jagged tensors, and tensors
    that lookups read and nothing else.

    Tensors are copied wherever a pytree of torch has them, other objects by their own ``to(device,
    non_blocking=True)``. An object whose memory the allocator could not be told of, since it has neither
    ``record_stream`` nor tensors as attributes, is copied by the stream that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._begun: _Copy | None = None

    def start(self, batch: Any, ids: HostIds = _UNKNOWN) -> None:
        self.forget()
        with suppress(Exception):  # finish() meets it again, where a loop without copies ahead would
            self._begun = self._copied(batch, ids)

    def finish(self, batch: Any, ids: HostIds = _UNKNOWN) -> Any:
        copy = self._begun
        self.forget()
        if copy is None or copy.batch is not batch:
            copy = self._copied(batch, ids)
        now = torch.cuda.current_stream(self._device)
        now.wait_event(copy.done)
        for leaf in copy.leaves:
            _record(leaf.made, now)
        return pytree.tree_unflatten([self._finished(leaf) for leaf in copy.leaves], copy.structure)

    def forget(self) -> None:
        self._begun = None

    def _stream(self) -> torch.cuda.Stream:
        index = self._device.index
        gpu = torch.cuda.current_device() if index is None else index
        if gpu not in self._streams:
            self._streams[gpu] = torch.cuda.Stream(gpu)
        return self._streams[gpu]

    def _copied(self, batch: Any, ids: HostIds) -> _Copy:
        stream = self._stream()
        given, structure = pytree.tree_flatten(batch, is_leaf=is_keyed_jagged)
        for tensor in tensors_of(batch):
            if tensor.is_cuda:
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
                tensor.record_stream(stream)  # type: ignore[arg-type]
        with torch.cuda.stream(stream):
            made = [self._leaf(leaf, ids) for leaf in given]
            return _Copy(batch, made, structure, stream.record_event())

    def _leaf(self, given: Any, ids: HostIds) -> _Leaf:
        if not _is_followed(given) or _stays(given, ids):
            return _Leaf(given, given, [])
        kept = [(path, part) for path, part in leaves(given) if _stays(part, ids)]
        return _Leaf(given, self._to_gpu(given), kept)

    def _to_gpu(self, leaf: Any) -> Any:
        if not hasattr(leaf, "to") or is_keyed_jagged(leaf):
            return leaf
        return leaf.to(self._device, non_blocking=True)

    def _finished(self, leaf: _Leaf) -> Any:
        if not _is_followed(leaf.given):
            return self._to_gpu(leaf.given)
        for path, part in leaf.ids:
            if path:
                _put(leaf.made, path, part)
        return leaf.made


def _is_followed(leaf: Any) -> bool:
    """Return whether the allocator can be told which streams use the memory of ``leaf``."""
    return hasattr(leaf, "record_stream") or any(True for _ in leaves(leaf))


def _stays(leaf: Any, ids: HostIds) -> bool:
    """Return whether a leaf is ids on the host."""
    if isinstance(leaf, Tensor):
        return leaf.is_cpu and ids.are_all_of(leaf)
    return is_keyed_jagged(leaf) and not _on_gpu(leaf)


def _on_gpu(value: Any) -> bool:
    return any(tensor.is_cuda for tensor in tensors_of(value))


def _record(made: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that ``stream`` uses the memory of a leaf."""
    if not isinstance(made, Tensor) and not is_keyed_jagged(made) and hasattr(made, "record_stream"):
        made.record_stream(stream)
        return
    for tensor in tensors_of(made):
        if tensor.is_cuda:
            tensor.record_stream(stream)  # type: ignore[arg-type]


def _put(batch: Any, path: Path, ids: Any) -> None:
    """Let ``batch`` have ``ids`` at ``path``, where it can be changed."""
    *above, (kind, key) = path
    with suppress(TypeError):  # a tuple
        holder = follow(batch, tuple(above))
        if kind == "item":
            holder[key] = ids
        else:
            object.__setattr__(holder, key, ids)  # frozen, perhaps
