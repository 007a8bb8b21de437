"""Nested state as JSON and tensors. Unlike pickle it takes plain types only, and reading it runs no code.

Dicts (keys of any plain type), lists, tuples, sets, counters, strings, bytes, numbers, None, torch dtypes,
tensors, NumPy arrays and scalars come back equal in type and bits. Objects with ``state_dict``, and random
generators, are kept as their state (:class:`SavedState`), which :func:`load_into` puts into an object at the
same place. A tensor at several places of one value is kept once, and comes back as one tensor; different
views of one storage come back as tensors of their own.
"""

from __future__ import annotations

import base64
import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore.errors import ConfigError, StoreCorruptError, StoreMismatchError

_MARK = "$"


class SavedState(dict):
    """The state of an object, as its ``state_dict()`` returned it."""


class _Kept:
    """The tensors of a checkpoint so far. No two of them share memory, which safetensors refuses to write."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        # By memory, with the tensor, so that its memory is not used for another tensor meanwhile.
        self._names: dict[Any, tuple[str, Tensor]] = {}

    def add(self, tensor: Tensor, place: str) -> str:
        """Add a contiguous tensor, unless it was added before; return its name."""
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape)
        if tensor.numel() and memory in self._names:
            return self._names[memory][0]
        name, number = place, 1
        while name in self._tensors:
            name, number = f"{place}#{number}", number + 1
        self._names[memory] = name, tensor
        shared = tensor.untyped_storage().data_ptr() in self._storages
        self._tensors[name] = kept = tensor.clone() if shared else tensor
        self._storages.add(kept.untyped_storage().data_ptr())
        return name


def pack(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON, and add its tensors to ``tensors``, named by their place.

    ``place``: the name of ``value`` in tensor names and messages. Raises ``ConfigError`` for a value that
    cannot be kept.
    """
    return _pack(value, place, _Kept(tensors))


def _pack(value: Any, place: str, tensors: _Kept) -> Any:
    state = _state_of(value)
    if state is not None:
        return {"$state": _pack(state, place, tensors)}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return {"$tensor": tensors.add(_plain(value, place), place)}
    if isinstance(value, np.ndarray | np.generic):
        return _pack_array(value, place, tensors)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Counter):
        return {"$counter": _pack_items(value, place, tensors)}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith(_MARK) for key in value):
            return {key: _pack(item, f"{place}.{key}", tensors) for key, item in value.items()}
        return {"$dict": _pack_items(value, place, tensors)}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_pack(item, f"{place}.{at}", tensors) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {f"${_kind(value)}": items}
    raise ConfigError(
        f"{place} is a {type(value).__name__}, which cannot be kept in a checkpoint without pickle; give "
        "plain values, tensors, arrays, or an object with state_dict() and load_state_dict()"
    )


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a packed value. Raises ``StoreCorruptError`` for input that :func:`pack` never makes."""
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) != 1 or not next(iter(packed), "").startswith(_MARK):
        return {key: unpack(item, tensors) for key, item in packed.items()}
    ((kind, content),) = packed.items()
    try:
        return _UNPACK[kind](content, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreCorruptError(
            f"the checkpoint holds a {kind} that no checkpoint holds: {error!r}"
        ) from error


def load_into(target: Any, saved: Any, place: str) -> None:
    """Give the objects in ``target`` (an object, or lists, tuples and dicts of objects) their state in
    ``saved``.

    Raises ``StoreMismatchError`` where the checkpoint has nothing for an object.
    """
    load = _loader(target)
    if load is not None:
        if not isinstance(saved, SavedState):
            raise StoreMismatchError(
                f"the checkpoint has no state of {place}, a {type(target).__name__}; leave it out"
            )
        load(dict(saved))
    elif isinstance(target, Mapping):
        for key, item in target.items():
            found = saved.get(key) if isinstance(saved, Mapping) else None
            load_into(item, found, f"{place}.{key}")
    elif isinstance(target, list | tuple):
        for at, item in enumerate(target):
            found = saved[at] if isinstance(saved, list | tuple) and at < len(saved) else None
            load_into(item, found, f"{place}.{at}")


def saved_state(value: Any) -> SavedState | None:
    """Return the state of an object that has a state, else None."""
    state = _state_of(value)
    return None if state is None else SavedState(state)


def _state_of(value: Any) -> Any:
    if isinstance(value, SavedState):
        return dict(value)
    if isinstance(value, torch.Generator):
        return {"generator": value.get_state()}
    if isinstance(value, np.random.Generator):
        return {"generator": value.bit_generator.state}
    if isinstance(value, random.Random):
        return {"generator": value.getstate()}
    if isinstance(value, type) or not callable(getattr(value, "state_dict", None)):
        return None
    return value.state_dict()


def _loader(target: Any) -> Any:
    if isinstance(target, torch.Generator):
        return lambda state: target.set_state(state["generator"])
    if isinstance(target, np.random.Generator):
        return lambda state: setattr(target.bit_generator, "state", state["generator"])
    if isinstance(target, random.Random):
        return lambda state: target.setstate(state["generator"])
    if isinstance(target, type):
        return None
    load = getattr(target, "load_state_dict", None)
    return load if callable(load) else None


def _pack_items(value: Mapping[Any, Any], place: str, tensors: _Kept) -> list[list[Any]]:
    return [
        [_pack(key, f"{place}'s key", tensors), _pack(item, f"{place}.{key}", tensors)]
        for key, item in value.items()
    ]


def _plain(tensor: Tensor, place: str) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        raise ConfigError(
            f"{place} is a {type(tensor).__name__} ({tensor.layout}, on {tensor.device}); a checkpoint "
            "keeps dense tensors with data"
        )
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _pack_array(value: Any, place: str, tensors: _Kept) -> Any:
    if value.dtype.kind not in "biufc":
        raise ConfigError(
            f"{place} is an array of {value.dtype}; a checkpoint keeps numbers and booleans, so convert it "
            "or leave it out"
        )
    data = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8).copy()
    name = tensors.add(torch.from_numpy(data), place)
    shape = None if isinstance(value, np.generic) else list(value.shape)
    return {"$array": [name, value.dtype.str, shape]}


def _unpack_array(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    name, dtype, shape = content
    kind = np.dtype(str(dtype))
    if kind.kind not in "biufc":
        raise ValueError(f"arrays of {dtype}")
    values = tensors[name].numpy().view(kind)
    return values[0] if shape is None else values.reshape(shape).copy()


def _kind(value: Any) -> str:
    return next(base.__name__ for base in (tuple, set, frozenset) if isinstance(value, base))


def _items(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    return ((unpack(key, tensors), unpack(item, tensors)) for key, item in content)


_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_UNPACK: dict[str, Any] = {
    "$state": lambda content, tensors: SavedState(unpack(content, tensors)),
    "$float": lambda content, tensors: float(content),
    "$tensor": lambda content, tensors: tensors[content],
    "$array": _unpack_array,
    "$bytes": lambda content, tensors: base64.b64decode(content, validate=True),
    "$dtype": lambda content, tensors: _DTYPES[content],
    "$counter": lambda content, tensors: Counter(dict(_items(content, tensors))),
    "$dict": lambda content, tensors: dict(_items(content, tensors)),
    "$tuple": lambda content, tensors: tuple(unpack(item, tensors) for item in content),
    "$set": lambda content, tensors: {unpack(item, tensors) for item in content},
    "$frozenset": lambda content, tensors: frozenset(unpack(item, tensors) for item in content),
}
