"""KeyedJaggedTensor: the bags of several features (keys) in one flat tensor of values."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import wrap

from tierstore.errors import InputError
from tierstore.sparse import checks, exchange, rearrange
from tierstore.sparse.jagged import Device, JaggedTensor
from tierstore.sparse.per_key import InverseIndices
from tierstore.sparse.text import key_text, summary_text


class KeyedJaggedTensor(exchange.SentByKey):
    """A batch of bags per key, with torchrec's constructor and methods.

    Values, weights, lengths and offsets run over all bags of the first key, then all bags of the second, ...

    Args:
        keys: names of the features.
        values: (N,) or (N, ...), values of all bags.
        weights: optional, one per value.
        lengths: integers, (bags,): number of values per bag. Lengths or offsets or both.
        offsets: integers, (bags + 1,): where every bag starts, beginning with 0.
        stride: batch size: bags per key. Derived from the number of bags if not given.
        stride_per_key_per_rank: batch sizes that differ between keys, as a row per key and a column per rank.
        stride_per_key, length_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict:
            results of the methods of the same names (jt_dict: ``to_dict``), where they are known already.
        inverse_indices: (keys, (len(keys), B) integers): for keys whose batch was deduplicated, which of
            its bags every one of the B examples has.

    Construction checks shapes, dtypes and devices; the ``..._sync`` constructors and ``sync()`` also that the
    lengths add up to the number of values; ``validate()`` reads all the data. All raise InputError.
    """

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> None:
        checks.check_parts("KeyedJaggedTensor", values, weights, lengths, offsets)
        lengths, offsets = checks.flat_lengths(lengths), checks.normal_offsets(offsets)
        checks.check_counts("KeyedJaggedTensor", lengths, offsets)
        strides = _strides_tensor(stride_per_key_per_rank)
        bags = lengths.numel() if lengths is not None else offsets.numel() - 1  # type: ignore[union-attr]
        checks.check_key_counts(keys, bags, stride, strides)
        checks.check_inverse_shape(inverse_indices)
        self._assign(keys, values, weights, lengths, offsets, stride, strides, inverse_indices)
        self._set_known(
            stride_per_key, length_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict
        )

    def _assign(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int | None,
        strides: Tensor | None,
        inverse_indices: InverseIndices | None,
    ) -> KeyedJaggedTensor:
        """Set the defining parts unchecked: the parts are known to fit, or are a pytree walk's stand-ins."""
        self._keys = keys
        self._values, self._weights, self._lengths, self._offsets = values, weights, lengths, offsets
        self._stride = stride
        self._stride_per_key_per_rank = strides
        self._inverse_indices = inverse_indices
        self._set_known()
        return self

    @staticmethod
    def from_lengths_sync(
        keys: list[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """Make a KeyedJaggedTensor of lengths: read them, and compute and check the lengths and offsets per
        key."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths=lengths,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_offsets_sync(
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """Make a KeyedJaggedTensor of offsets: read them, and compute and check the lengths and offsets per
        key."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Join one JaggedTensor per key; batch sizes that differ become strides that differ."""
        return _of_dict(jt_dict)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: Device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """Make a batch of no keys and no values."""
        return KeyedJaggedTensor(
            [],
            torch.empty(0, dtype=values_dtype, device=device),
            torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: Device | None = None) -> KeyedJaggedTensor:
        """Make a batch of no keys and no values with the batch size, dtypes and device of ``kjt``.

        With ``device``, make uninitialised tensors of the shapes of ``kjt`` there, as targets of ``copy_``.
        """
        return _empty_like(kjt, device)

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Join the keys of all; either all or none have weights, strides per key, or inverse indices."""
        return _concatenated(kjt_list)

    @staticmethod
    def dist_init(
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> KeyedJaggedTensor:
        """Join the ``tensors`` of :meth:`dist_tensors` that all ranks have sent of ``keys``, rank by rank.

        ``recat``: the order of the segments (integers) that makes it key by key; a segment is a key of a
        rank, or a bag where ranks differ in ``stride_per_rank``, the bags per key of each rank. ``stagger``:
        in how many groups the order takes ranks in turn. Raises InputError.
        """
        arguments = (variable_stride_per_key, num_workers, recat, stride_per_rank, stagger)
        return KeyedJaggedTensor(**exchange.received(keys, tensors, *arguments)).sync()

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Cut into the first ``segments[0]`` keys, the next ``segments[1]``, and so on. Views, no copies."""
        bounds = rearrange.segment_bounds(self, segments)
        # A segment of all keys is this object, with its computed figures.
        return [
            self if end - start == len(self._keys) else type(self)(**rearrange.key_range(self, start, end))
            for start, end in bounds
        ]

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """Return the keys at ``indices`` in that order; a key may be left out or occur more than once.

        ``indices_tensor`` (the same indices as a tensor) is accepted since torchrec has it, and is not used.
        """
        return type(self)(**rearrange.permute(self, indices))

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return the bags of one key (views); KeyError if there is no such key."""
        if key not in self.index_per_key():
            raise KeyError(f"no key {key!r} in this KeyedJaggedTensor; it has {self._keys}")
        index = self.index_per_key()[key]
        values, bags = self.offset_per_key(), self.lengths_offset_per_key()
        inside = slice(values[index], values[index + 1])
        return JaggedTensor._unchecked(
            self._values[inside],
            None if self._weights is None else self._weights[inside],
            self.lengths()[bags[index] : bags[index + 1]],
            None,
        )

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return the bags of each key (views). The dict is kept, and the next call returns it again."""
        if self._jt_dict is None:
            self._jt_dict = {key: self[key] for key in self._keys}
        if compute_offsets:
            for part in self._jt_dict.values():
                part.offsets()
        return self._jt_dict

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """Return a copy with one-dimensional lengths (all have) and without computed figures."""
        return self._mapped(lambda part: part)

    def sync(self) -> KeyedJaggedTensor:
        """Compute lengths and offsets per key; InputError if the lengths do not add up to the values."""
        lengths = self.length_per_key()
        if self._values.device.type != "meta":
            checks.check_first_offset(self._offsets)
            checks.check_sums(self._keys, lengths, self._values.size(0))
        self.offset_per_key()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Forget the lengths and offsets per key."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def validate(self) -> KeyedJaggedTensor:
        """Read and check lengths, offsets, inverse indices; InputError names key and bag. Return self."""
        repeated = {key for key in self._keys if self._keys.count(key) > 1}
        if repeated:
            raise InputError(f"KeyedJaggedTensor: keys must be unique, but {sorted(repeated)} are repeated")
        strides = self.stride_per_key()
        checks.check_bags(
            "KeyedJaggedTensor", self._lengths, self._offsets, self._values.size(0), self._keys, strides
        )
        checks.check_sums(self._keys, self._summed_lengths(), self._values.size(0))
        checks.check_inverse_indices(self._keys, strides, self._inverse_indices)
        return self

    def to(
        self, device: Device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensor:
        """Return a copy on ``device``; ``dtype`` is for the weights only."""
        moved = self._mapped(lambda part: part.to(device, non_blocking=non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        return moved

    def pin_memory(self) -> KeyedJaggedTensor:
        """Return a copy in page-locked host memory."""
        return self._mapped(lambda part: part.pin_memory())

    def _mapped(self, change) -> KeyedJaggedTensor:  # type: ignore[no-untyped-def]
        """Apply ``change`` to each tensor of the data; keep the computed figures of the keys."""
        inverse = self._inverse_indices
        result = object.__new__(KeyedJaggedTensor)._assign(
            self._keys,
            change(self._values),
            None if self._weights is None else change(self._weights),
            None if self._lengths is None else change(self._lengths),
            None if self._offsets is None else change(self._offsets),
            self._stride,
            self._stride_per_key_per_rank,
            None if inverse is None else (inverse[0], change(inverse[1])),
        )
        result._set_known(
            self._stride_per_key,
            self._length_per_key,
            self._lengths_offset_per_key,
            self._offset_per_key,
            self._index_per_key,
        )
        return result

    def copy_(self, kjt: KeyedJaggedTensor, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Copy the data of ``kjt``, which must have the same keys and shapes, into this object's tensors."""
        self._copy_tensors(kjt, non_blocking)
        if self._inverse_indices is not None and kjt._inverse_indices is not None:
            self._inverse_indices[1].copy_(kjt._inverse_indices[1], non_blocking=non_blocking)
        self._stride_per_key_per_rank = kjt._stride_per_key_per_rank
        self._stride_per_key = kjt._stride_per_key
        self._length_per_key = kjt._length_per_key
        self._lengths_offset_per_key = kjt._lengths_offset_per_key
        self._offset_per_key = kjt._offset_per_key
        self._jt_dict = None
        return self

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are present, values first."""
        return super().tensors() + ([] if self._inverse_indices is None else [self._inverse_indices[1]])

    def size_in_bytes(self) -> int:
        """Return the bytes of all tensors that are present, the tensor of strides included."""
        strides = self._stride_per_key_per_rank
        return super().size_in_bytes() + (0 if strides is None else strides.element_size() * strides.numel())

    def __str__(self) -> str:
        if not self._keys:
            return "KeyedJaggedTensor()\n"
        offsets, bounds = self.offsets().tolist(), self.lengths_offset_per_key()
        lines = [
            key_text(key, self._values, self._weights, offsets[start : end + 1])
            for key, (start, end) in zip(self._keys, pairwise(bounds), strict=True)
        ]
        return "KeyedJaggedTensor({\n" + ",\n".join(lines) + "\n})\n"

    def __repr__(self) -> str:
        if isinstance(self._values, Tensor):
            size = f"stride_per_key={self.stride_per_key()}" if self.variable_stride_per_key() else ""
            size = size or f"stride={self.stride()}"
        else:
            size = f"stride={self._stride}"
        return f"KeyedJaggedTensor(keys={self._keys}, {size}, {summary_text(self._values, self._weights)})"


# Functions of several tensors are nodes of a graph that FX traces, since proxies have no keys to read.
@wrap
def _of_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
    if not jt_dict:
        return KeyedJaggedTensor.empty()
    return KeyedJaggedTensor(**rearrange.join_dict(jt_dict)).sync()


@wrap
def _concatenated(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    parts = rearrange.concat(kjt_list)
    return type(kjt_list[0])(**parts)


@wrap
def _empty_like(kjt: KeyedJaggedTensor, device: Device | None) -> KeyedJaggedTensor:
    weights = kjt.weights_or_none()
    if device is None:
        return KeyedJaggedTensor(
            [],
            kjt.values().new_empty(0),
            None if weights is None else weights.new_empty(0),
            lengths=kjt.lengths().new_empty(0),
            stride=kjt.stride(),
        )
    return kjt._mapped(lambda part: torch.empty_like(part, device=device))


def _strides_tensor(strides: Tensor | list[list[int]] | None) -> Tensor | None:
    """Return (keys, ranks) int32 on the host."""
    if strides is None or isinstance(strides, Tensor):
        return strides
    try:
        return torch.tensor(strides, dtype=torch.int32, device="cpu")
    except (ValueError, TypeError) as error:
        raise InputError(
            f"KeyedJaggedTensor: stride_per_key_per_rank needs equally long lists of integers, got {strides}"
        ) from error
