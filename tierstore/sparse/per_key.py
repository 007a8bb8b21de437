"""The figures of each key of a batch: its index, and where its bags and values are."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from tierstore.errors import InputError
from tierstore.sparse.jagged import JaggedBase, JaggedTensor
from tierstore.sparse.traceable import Traceable

InverseIndices = tuple[list[str], Tensor]


class Keys(metaclass=Traceable):
    """Names in an order."""

    _keys: list[str]
    _index_per_key: dict[str, int] | None

    def keys(self) -> list[str]:
        """Return the names of the features."""
        return self._keys

    def index_per_key(self) -> dict[str, int]:
        """Return the position of each key."""
        if self._index_per_key is None:
            self._index_per_key = {key: index for index, key in enumerate(self._keys)}
        return self._index_per_key

    def _key_indices(self) -> dict[str, int]:
        return self.index_per_key()


Uniform = tuple[list[str], Tensor, Tensor, Tensor | None]
"""Keys, values, lengths, and offsets if they are known."""


class FiguresPerKey(JaggedBase, Keys):
    """Bags per key (strides), values per key, and where each key begins.

    A figure is derived by the first call that asks for it, and kept, since reading lengths waits for their
    device.
    """

    _stride: int | None
    _stride_per_key_per_rank: Tensor | None
    _inverse_indices: InverseIndices | None

    def _set_known(
        self,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
    ) -> None:
        """Set derived figures that the caller knows already."""
        self._stride_per_key = stride_per_key
        self._length_per_key = length_per_key
        self._lengths_offset_per_key = lengths_offset_per_key
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        self._jt_dict = jt_dict

    def stride(self) -> int:
        """Return the bags per key; if keys differ, the batch size of the inverse indices, or the largest."""
        if self._stride is None:
            self._stride = self._derived_stride()
        return self._stride

    def _derived_stride(self) -> int:
        if not self._keys:
            return 0
        strides = self._stride_per_key_per_rank
        if strides is not None and strides.numel():
            inverse = self._inverse_indices
            if inverse is not None and inverse[1].numel():
                return inverse[1].size(-1)
            return int(strides.sum(dim=1).max())
        lengths, offsets = self._lengths, self._offsets
        bags = lengths.numel() if lengths is not None else offsets.numel() - 1  # type: ignore[union-attr]
        return bags // len(self._keys)

    def stride_per_key(self) -> list[int]:
        """Return the number of bags of each key."""
        if self._stride_per_key is None:
            strides = self._stride_per_key_per_rank
            if strides is None:
                self._stride_per_key = [self.stride()] * len(self._keys)
            else:
                self._stride_per_key = strides.sum(dim=1).tolist() if strides.dim() == 2 else []
        return self._stride_per_key

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the bags per key and rank where keys differ; otherwise []."""
        strides = self._stride_per_key_per_rank
        return [] if strides is None else strides.tolist()

    def variable_stride_per_key(self) -> bool:
        """Tell whether the keys may have different numbers of bags."""
        return self._stride_per_key_per_rank is not None

    def length_per_key(self) -> list[int]:
        """Return the number of values of each key; the first call reads the lengths.

        On the meta device, where lengths have no data, every key has as many, and the first the rest, too.
        """
        if self._length_per_key is None:
            self._length_per_key = self._summed_lengths()
        return self._length_per_key

    def _summed_lengths(self) -> list[int]:
        if self._values.is_meta and self._keys:
            return self._made_up_lengths()
        lengths = self._lengths
        if lengths is None:  # sync() needs it once
            assert self._offsets is not None
            lengths = torch.diff(self._offsets)
        if not self._keys or not lengths.numel():
            return [0] * len(self._keys)
        if self.variable_stride_per_key():
            return torch.stack([part.sum() for part in lengths.split(self.stride_per_key())]).tolist()
        return lengths.view(len(self._keys), -1).sum(dim=1).tolist()

    def _made_up_lengths(self) -> list[int]:
        """Share the values evenly among the keys, as torchrec does where lengths have no data."""
        each, rest = divmod(self._values.size(0), len(self._keys))
        return [each + rest, *[each] * (len(self._keys) - 1)]

    def length_per_key_or_none(self) -> list[int] | None:
        """Return the lengths per key if they were given or already computed."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return where each key's values start and the last key's end; the first call reads the lengths."""
        if self._offset_per_key is None:
            self._offset_per_key = [0, *accumulate(self.length_per_key())]
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return the offsets per key if they were given or already computed."""
        return self._offset_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """Return where the bags (lengths) of each key start, and where the last key's bags end."""
        if self._lengths_offset_per_key is None:
            self._lengths_offset_per_key = [0, *accumulate(self.stride_per_key())]
        return self._lengths_offset_per_key

    def inverse_indices(self) -> InverseIndices:
        """Return (keys, (len(keys), B) integers): the bag of each example by key; InputError if none."""
        if self._inverse_indices is None:
            raise InputError(
                "this KeyedJaggedTensor has no inverse indices; construct it with inverse_indices=..."
            )
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """Return the inverse indices, or None."""
        return self._inverse_indices


def uniform(keyed: FiguresPerKey) -> Uniform | None:
    """Return the parts of a batch with as many bags, all its own, for every key; None for other batches."""
    inverse = keyed._inverse_indices
    if keyed._stride_per_key_per_rank is not None or (inverse is not None and inverse[1].numel()):
        return None
    lengths = keyed._lengths
    if lengths is None:
        lengths = keyed.lengths()
    return keyed._keys, keyed._values, lengths, keyed._offsets
