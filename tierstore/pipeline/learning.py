"""Learns from one forward pass which module gets which part of a batch; the model is never traced.

A batch is any nesting of dicts, lists, tuples and objects with attributes; its leaves are tensors and keyed
jagged tensors. A plain module's inputs are recognised by identity (the same memory, shape and strides as a
leaf); a collection's by identity of the jagged tensor's values, or by its feature names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierstore.modules.base import TieredModule
from tierstore.pipeline.host_ids import HostIds

Step = tuple[str, Any]  # ("item", key) or ("attr", name)
Path = tuple[Step, ...]
_MAX_DEPTH = 8
_COMPRESSED_ROWS = "crow_indices", "col_indices", "values"
_COMPRESSED_COLUMNS = "ccol_indices", "row_indices", "values"
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}
"""By layout, the methods that return the tensors of a sparse one."""


def is_keyed_jagged(value: Any) -> bool:
    """Return whether ``value`` is a keyed jagged tensor, ours or torchrec's."""
    return hasattr(value, "keys") and hasattr(value, "lengths_or_none") and hasattr(value, "stride_per_key")


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield tensors and keyed jagged tensors in a batch, each with its path."""
    if isinstance(value, Tensor) or is_keyed_jagged(value):
        yield path, value
        return
    if len(path) >= _MAX_DEPTH:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, ("item", key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, ("item", index)))
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            yield from leaves(item, (*path, ("attr", name)))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that have the memory of a batch, also those in its keyed jagged tensors, and in
    tensors that are sparse or wrap others."""
    for _, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            yield from _with_memory(leaf)
            continue
        parts = leaf.values(), leaf.weights_or_none(), leaf.lengths_or_none(), leaf.offsets_or_none()
        for part in parts:
            if part is not None:
                yield from _with_memory(part)


def _with_memory(tensor: Any) -> Iterator[Tensor]:
    """Yield the tensors whose memory has the elements of ``tensor``; none where torch does not show it."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _with_memory(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
    else:
        for name in _PARTS.get(tensor.layout, ()):
            yield getattr(tensor, name)()


def tensors_read(module: TieredModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a lookup with these arguments reads, with all parts of keyed jagged tensors: a
    model that makes one of them needs its parts on one device."""
    keyed = [value for value in (*args, *kwargs.values()) if is_keyed_jagged(value)]
    return [*module.lookup_inputs(*args, **kwargs), *tensors_of(keyed)]


def follow(batch: Any, path: Path) -> Any:
    """Return the leaf at ``path``. Raises LookupError, AttributeError or TypeError if the batch has another
    structure."""
    for kind, key in path:
        batch = batch[key] if kind == "item" else getattr(batch, key)
    return batch


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.device == b.device
        and a.dtype == b.dtype
        and a.layout is b.layout is torch.strided  # other tensors have no address
        and a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.numel() > 0
    )


@dataclass(frozen=True)
class Call:
    """One coming forward call of a module: ``arguments(batch)`` returns its (args, kwargs)."""

    module: TieredModule
    arguments: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
    is_given: bool = False  # whether the user has given ``arguments``


class Recorder:
    """Collects the forward calls of ``modules`` between :meth:`start` and :meth:`learn`."""

    def __init__(self, modules: list[TieredModule]) -> None:
        self.modules = modules
        self.calls: list[Call] = []
        self.unknown: list[TieredModule] = []
        self._seen: list[tuple[TieredModule, tuple[Any, ...], dict[str, Any], bool]] = []
        self._read: list[Path] = []

    def start(self) -> None:
        self._seen.clear()
        for module in self.modules:
            module.observer = self._observe

    def _observe(self, module: TieredModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen.append((module, args, kwargs, module.trains))

    def stop(self) -> None:
        for module in self.modules:
            module.observer = None

    def learn(self, batch: Any) -> bool:
        """Fill ``calls`` (calls that a batch determines) and ``unknown`` (modules with another call).

        Returns False if no module was called in training, so that there was nothing to learn from.
        """
        self.stop()
        found = list(leaves(batch))
        self._learn_reads(found)
        trained = [(module, args, kwargs) for module, args, kwargs, trains in self._seen if trains]
        calls: list[Call] = []
        unknown: dict[int, TieredModule] = {}
        for module, args, kwargs in trained:
            arguments = _recipe(module, args, kwargs, found)
            if arguments is None:
                unknown[id(module)] = module
            else:
                calls.append(Call(module, arguments))
        # A module runs on demand altogether if a batch does not determine one of its calls.
        self.calls = [call for call in calls if id(call.module) not in unknown]
        self.unknown = list(unknown.values())
        self._seen.clear()
        return bool(trained)

    def _learn_reads(self, found: list[tuple[Path, Any]]) -> None:
        """Learn which tensors of a batch are read by lookups, also by those that train no rows."""
        read: list[Tensor] = []
        for module, args, kwargs, _ in self._seen:
            with suppress(Exception):  # the forward call has raised it
                read += tensors_read(module, args, kwargs)
        if read:
            ids = HostIds(read)
            self._read = [path for path, leaf in found if isinstance(leaf, Tensor) and ids.are_all_of(leaf)]

    def read_of(self, batch: Any) -> Iterator[Tensor]:
        """Yield the tensors of another batch that lookups read, as far as that is known."""
        for path in self._read:
            with suppress(LookupError, AttributeError, TypeError):  # the batch has another structure
                if isinstance(leaf := follow(batch, path), Tensor):
                    yield leaf


def _recipe(
    module: TieredModule, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[tuple[Path, Any]]
) -> Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """Return a function that takes this call's arguments out of another batch, or None."""
    sources: dict[Any, Path] = {}
    for place, value in [*enumerate(args), *kwargs.items()]:
        if not (isinstance(value, Tensor) or is_keyed_jagged(value)):
            continue
        path = _path_of(module, value, found)
        if path is not None:
            sources[place] = path
        elif place in module.lookup_arguments(args, kwargs):
            return None
    if not sources:
        return None

    def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def value_of(place: Any, value: Any) -> Any:
            if place in sources:
                return follow(batch, sources[place])
            return None if isinstance(value, Tensor) else value

        return (
            tuple(value_of(index, value) for index, value in enumerate(constants[0])),
            {name: value_of(name, value) for name, value in constants[1].items()},
        )

    # Keep no tensor of the first batch alive.
    hollow = torch.empty(0, dtype=torch.float32, device="cpu")
    constants = (
        tuple(hollow if _holds_memory(value) else value for value in args),
        {name: hollow if _holds_memory(value) else value for name, value in kwargs.items()},
    )
    return arguments


def _holds_memory(value: Any) -> bool:
    return isinstance(value, Tensor) or is_keyed_jagged(value)


def _path_of(module: TieredModule, value: Any, found: list[tuple[Path, Any]]) -> Path | None:
    if isinstance(value, Tensor):
        return next((path for path, leaf in found if isinstance(leaf, Tensor) and _same(leaf, value)), None)
    jagged = [(path, leaf) for path, leaf in found if is_keyed_jagged(leaf)]
    for path, leaf in jagged:
        if leaf is value:
            return path
    same = [(path, leaf) for path, leaf in jagged if _same(leaf.values(), value.values())]
    if same:
        # Under other keys the same ids are looked up in other tables.
        return next((path for path, leaf in same if list(leaf.keys()) == list(value.keys())), None)
    wanted = set(module.feature_names())
    return next((path for path, leaf in jagged if wanted and wanted <= set(leaf.keys())), None)
