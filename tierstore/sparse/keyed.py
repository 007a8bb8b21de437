"""KeyedTensor: dense tensors of several keys side by side in one tensor, such as pooled embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.fx import wrap

from tierstore.errors import InputError
from tierstore.sparse.jagged import Device
from tierstore.sparse.per_key import Keys
from tierstore.sparse.text import summary_text, values_text


class KeyedTensor(Keys):
    """Dense tensors of several keys, concatenated along ``key_dim``, with torchrec's constructor and methods.

    Args:
        keys: names.
        length_per_key: size of every key along ``key_dim``.
        values: the concatenation, typically (B, sum of lengths).
        key_dim: the dimension that is divided between the keys.
        offset_per_key, index_per_key: results of the methods of these names, where they are known already.
    """

    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        if len(keys) != len(length_per_key):
            raise InputError(f"KeyedTensor: {len(keys)} keys need as many lengths, got {len(length_per_key)}")
        if keys:
            if not -values.dim() <= key_dim < values.dim():
                raise InputError(
                    f"KeyedTensor: key_dim {key_dim} is outside values of shape {tuple(values.shape)}; use "
                    "one of their dimensions"
                )
            if sum(length_per_key) != values.size(key_dim):
                raise InputError(
                    f"KeyedTensor: the lengths per key add up to {sum(length_per_key)} but dimension "
                    f"{key_dim} of the values has size {values.size(key_dim)}"
                )
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = key_dim
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key

    @classmethod
    def of_parts(
        cls, keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int = 1
    ) -> KeyedTensor:
        """Make a KeyedTensor of parts that are known to fit; the constructor checks them."""
        keyed = object.__new__(cls)
        keyed._keys = keys
        keyed._length_per_key = length_per_key
        keyed._values = values
        keyed._key_dim = key_dim
        keyed._offset_per_key = keyed._index_per_key = None
        return keyed

    @staticmethod
    def from_tensor_list(
        keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        """Concatenate one tensor per key along ``cat_dim``."""
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(tensors, dim=cat_dim), key_dim)

    def values(self) -> Tensor:
        """Return the concatenation of all keys."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension that is divided between the keys."""
        return self._key_dim

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Return the size of each key along ``key_dim``."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return where each key starts along ``key_dim``, and where the last key ends."""
        if self._offset_per_key is None:
            self._offset_per_key = [0, *accumulate(self._length_per_key)]
        return self._offset_per_key

    def __getitem__(self, key: str) -> Tensor:
        """Return the tensor of one key (a view); KeyError if there is no such key."""
        if key not in self.index_per_key():
            raise KeyError(f"no key {key!r} in this KeyedTensor; it has {self._keys}")
        index = self.index_per_key()[key]
        return self._values.narrow(self._key_dim, self.offset_per_key()[index], self._length_per_key[index])

    def to_dict(self) -> dict[str, Tensor]:
        """Return the tensor of each key (views)."""
        return {key: self[key] for key in self._keys}

    @staticmethod
    def regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
        """Return one tensor per group: the group's keys, of any of the ``keyed_tensors``, side by side.

        A key that several keyed tensors have is taken from the last. The result is differentiable.
        """
        return _regrouped(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list[KeyedTensor], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """Regroup as ``regroup`` does, with a name for each group."""
        return _named(keyed_tensors, groups, keys)

    def size_in_bytes(self) -> int:
        """Return the bytes of the values."""
        return self._values.element_size() * self._values.numel()

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses the values (see torch.Tensor.record_stream)."""
        self._values.record_stream(stream)  # type: ignore[arg-type]

    def to(self, device: Device, non_blocking: bool = False) -> KeyedTensor:
        """Return a copy on ``device``."""
        return self._with_values(self._values.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> KeyedTensor:
        """Return a copy in page-locked host memory."""
        return self._with_values(self._values.pin_memory())

    def _with_values(self, values: Tensor) -> KeyedTensor:
        return KeyedTensor(
            self._keys, self._length_per_key, values, self._key_dim, self._offset_per_key, self._index_per_key
        )

    def __str__(self) -> str:
        if not self._keys:
            return "KeyedTensor()\n"
        lines = [f'    "{key}": {values_text(self[key])}' for key in self._keys]
        return "KeyedTensor({\n" + ",\n".join(lines) + "\n})\n"

    def __repr__(self) -> str:
        dim = "" if self._key_dim == 1 else f", key_dim={self._key_dim}"
        lengths = dict(zip(self._keys, self._length_per_key, strict=True))
        return f"KeyedTensor({lengths}{dim}, {summary_text(self._values)})"


# Functions of lists of tensors are nodes of a graph that FX traces, since proxies have no keys to read.
@wrap
def _regrouped(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    holder = {key: keyed for keyed in keyed_tensors for key in keyed._keys}
    missing = sorted({key for group in groups for key in group if key not in holder})
    if missing:
        raise KeyError(f"regroup: no keyed tensor has {missing}; there are {sorted(holder)}")
    return [_side_by_side(keyed_tensors, [holder[key][key] for key in group]) for group in groups]


@wrap
def _named(keyed_tensors: list[KeyedTensor], groups: list[list[str]], keys: list[str]) -> dict[str, Tensor]:
    if len(groups) != len(keys):
        raise InputError(f"regroup_as_dict: {len(groups)} groups need as many keys, got {len(keys)}")
    return dict(zip(keys, _regrouped(keyed_tensors, groups), strict=True))


def _side_by_side(keyed_tensors: Sequence[KeyedTensor], parts: list[Tensor]) -> Tensor:
    first = keyed_tensors[0]
    return torch.cat(parts, dim=first.key_dim()) if parts else first.values().narrow(first.key_dim(), 0, 0)
