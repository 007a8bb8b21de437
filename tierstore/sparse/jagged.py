"""Jagged tensors: a flat tensor of values cut into bags of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import wrap

from tierstore.errors import InputError
from tierstore.sparse import checks
from tierstore.sparse.text import bags_text, summary_text
from tierstore.sparse.traceable import Traceable

INT32_MAX = 2**31 - 1
Device = torch.device | str | int


class JaggedBase(metaclass=Traceable):
    """Base of JaggedTensor and KeyedJaggedTensor: values, weights, lengths and offsets."""

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None = None

    def values(self) -> Tensor:
        """Return the values of all bags, one after another: shape (N,) or (N, ...)."""
        return self._values

    def weights(self) -> Tensor:
        """Return the weights of the values, shape (N,) or (N, ...); InputError if there are none."""
        if self._weights is None:
            raise InputError(f"this {type(self).__name__} has no weights; construct it with weights=...")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weights of the values, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the number of values in each bag, shape (bags,); the first call derives it from offsets."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = torch.diff(self._offsets)
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they were given or already computed."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return where each bag starts and the last ends, shape (bags + 1,); the first call computes it.

        The offsets have the dtype of the lengths, or int64 if their sum might not fit.
        """
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = lengths_to_offsets(self._lengths, self._values.size(0))
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they were given or already computed."""
        return self._offsets

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are present, values first."""
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return [part for part in parts if part is not None]

    def size_in_bytes(self) -> int:
        """Return the bytes of all tensors that are present."""
        return sum(part.element_size() * part.numel() for part in self.tensors())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses these tensors (see torch.Tensor.record_stream)."""
        for part in self.tensors():
            part.record_stream(stream)  # type: ignore[arg-type]

    def clear_storage(self) -> int:
        """Free the memory of all tensors, which nobody may read any more, and return its bytes."""
        freed = self.size_in_bytes()
        for part in self.tensors():
            part.untyped_storage().resize_(0)
        return freed

    def _copy_tensors(self, other: JaggedBase, non_blocking: bool) -> None:
        """Copy into every tensor of this object, so that no tensor keeps the old bags."""
        if (self._weights is None) != (other._weights is None):
            raise InputError(
                f"{type(self).__name__}.copy_: one of the two tensors has weights and the other has none; "
                "give both weights, or neither"
            )
        self._values.copy_(other._values, non_blocking=non_blocking)
        if self._weights is not None:
            self._weights.copy_(other.weights(), non_blocking=non_blocking)
        if self._lengths is not None:
            self._lengths.copy_(other.lengths(), non_blocking=non_blocking)
        if self._offsets is not None:
            self._offsets.copy_(other.offsets(), non_blocking=non_blocking)

    def _max_length(self) -> int:
        lengths = self.lengths()
        return int(lengths.max()) if lengths.numel() else 0


class JaggedSource(Protocol):
    """Has the parts of JaggedTensors, each of which asks for its own by its number, once it is asked."""

    def values(self, number: int) -> Tensor: ...

    def lengths(self, number: int) -> Tensor: ...

    def weights(self, number: int) -> Tensor | None: ...


class JaggedTensor(JaggedBase):
    """A batch of bags of values, optionally weighted, with torchrec's constructor and methods.

    Args:
        values: values of all bags, one after another, shape (N,) or (N, ...).
        weights: optional, one per value: shape (N,) or (N, ...).
        lengths: integers, shape (B,): how many values every bag has.
        offsets: integers, shape (B + 1,): where every bag starts, from 0. Lengths or offsets or both.

    Construction checks shapes, dtypes and devices; ``validate()`` also reads the data. Both raise InputError.
    """

    _source: JaggedSource
    _number: int

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        checks.check_parts("JaggedTensor", values, weights, lengths, offsets)
        self._values = values
        self._weights = weights
        self._lengths = checks.flat_lengths(lengths)
        self._offsets = checks.normal_offsets(offsets)
        checks.check_counts("JaggedTensor", self._lengths, self._offsets)

    @classmethod
    def _unchecked(
        cls, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
    ) -> JaggedTensor:
        """Make a JaggedTensor of parts that are known to fit, or that a pytree walk has replaced."""
        jagged = cls.__new__(cls)
        jagged._values, jagged._weights, jagged._lengths, jagged._offsets = values, weights, lengths, offsets
        return jagged

    def __getattr__(self, name: str) -> Tensor | None:
        """Ask the source for a part that this object does not have yet."""
        source = self.__dict__.get("_source")
        if source is None or name not in _FROM_SOURCE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        part: Tensor | None = getattr(source, name[1:])(self._number)
        self.__dict__[name] = part
        return part

    def __getstate__(self) -> dict[str, Tensor | None]:
        """Return the parts, for copies and pickles."""
        return {name: getattr(self, name) for name in (*_FROM_SOURCE, "_offsets")}

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: Device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """Make a batch of no bags."""
        return JaggedTensor(
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            offsets=torch.zeros(1, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def empty_like(jt: JaggedTensor, device: Device | None = None) -> JaggedTensor:
        """Make a batch of no bags with the dtypes and device of ``jt``.

        With ``device``, make uninitialised tensors of the shapes of ``jt`` there, as targets of ``copy_``.
        """
        return _empty_like(jt, device)

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> JaggedTensor:
        """Make one bag per tensor of the list."""
        if not values:
            return JaggedTensor.empty(is_weighted=weights is not None)
        flat = torch.cat(values, dim=0)
        return JaggedTensor(
            values=flat,
            weights=None if weights is None else torch.cat(weights, dim=0),
            lengths=torch.tensor([v.size(0) for v in values], dtype=torch.int32, device=flat.device),
        )

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """Take the first ``lengths[b]`` columns of each row b of ``values`` (B, L), and so undo padding."""
        columns = torch.arange(values.size(1), device=values.device)
        mask = columns.expand(values.size(0), -1) < lengths.unsqueeze(-1)
        return JaggedTensor(
            values=values[mask], weights=None if weights is None else weights[mask], lengths=lengths
        )

    def to_dense(self) -> list[Tensor]:
        """Return the bags as a list of B tensors (views of the values)."""
        return _bags(self._values, self.offsets())

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return the weights of the bags as a list of B tensors, or None without weights."""
        return None if self._weights is None else _bags(self._weights, self.offsets())

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return the bags as rows of a dense tensor (B, L, ...); L is the longest bag or ``desired_length``.

        Shorter bags are filled up with ``padding_value``, longer bags lose their tail. The result is
        differentiable.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Return the weights as ``to_padded_dense`` returns the values; None without weights."""
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, flat: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        length = self._max_length() if desired_length is None else desired_length
        columns = torch.arange(length, device=flat.device)
        present = columns < self.lengths().unsqueeze(-1)
        positions = (self.offsets()[:-1].unsqueeze(-1) + columns)[present]
        padded = flat.new_full((*present.shape, *flat.shape[1:]), padding_value)
        return padded.index_put((present,), flat[positions])

    def to(self, device: Device, non_blocking: bool = False) -> JaggedTensor:
        """Return a copy on ``device``."""
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return JaggedTensor._unchecked(
            *(None if part is None else part.to(device, non_blocking=non_blocking) for part in parts)  # type: ignore[arg-type]
        )

    def pin_memory(self) -> JaggedTensor:
        """Return a copy in page-locked host memory."""
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return JaggedTensor._unchecked(*(None if part is None else part.pin_memory() for part in parts))  # type: ignore[arg-type]

    def copy_(self, jt: JaggedTensor, non_blocking: bool = False) -> JaggedTensor:
        """Copy the tensors of ``jt``, which must have the same shapes, into this object's."""
        self._copy_tensors(jt, non_blocking)
        return self

    def validate(self) -> JaggedTensor:
        """Read all lengths and offsets and raise InputError if they do not fit the values; return self."""
        checks.check_bags("JaggedTensor", self._lengths, self._offsets, self._values.size(0))
        return self

    def __len__(self) -> int:
        lengths, offsets = self._lengths, self._offsets
        return lengths.numel() if lengths is not None else offsets.numel() - 1  # type: ignore[union-attr]

    def __str__(self) -> str:
        offsets = self.offsets().tolist()
        values = bags_text(self._values, offsets)
        if self._weights is None:
            return f"JaggedTensor({{\n    {values}\n}})\n"
        weights = bags_text(self._weights, offsets)
        return f'JaggedTensor({{\n    "values": {values},\n    "weights": {weights}\n}})\n'

    def __repr__(self) -> str:
        return f"JaggedTensor(bags={len(self)}, {summary_text(self._values, self._weights)})"


_FROM_SOURCE = ("_values", "_weights", "_lengths")


def jagged_by_name(numbers: dict[str, int], source: JaggedSource) -> dict[str, JaggedTensor]:
    """Return a JaggedTensor for each name, which gets the parts of its number from ``source`` when they are
    asked for."""
    make = object.__new__
    found: dict[str, Any] = numbers.copy()  # type: ignore[assignment]  # fewer steps than an empty one
    for name, number in numbers.items():
        found[name] = jagged = make(JaggedTensor)
        jagged._source = source
        jagged._number = number
    return found


# A node of a graph that FX traces, since proxies do not tell whether there are weights.
@wrap
def _empty_like(jt: JaggedTensor, device: Device | None) -> JaggedTensor:
    weights = jt.weights_or_none()
    if device is None:
        return JaggedTensor(
            values=jt.values().new_empty(0),
            weights=None if weights is None else weights.new_empty(0),
            lengths=jt.lengths().new_empty(0),
        )
    parts = (jt.values(), weights, jt.lengths_or_none(), jt.offsets_or_none())
    return JaggedTensor(
        *(None if part is None else torch.empty_like(part, device=device) for part in parts)  # type: ignore[arg-type]
    )


def lengths_to_offsets(lengths: Tensor, total: int) -> Tensor:
    """Return the exclusive cumulative sum and the total: (B,) → (B + 1,). ``total`` is the expected sum."""
    fits = lengths.dtype == torch.int64 or (lengths.dtype == torch.int32 and total <= INT32_MAX)
    offsets = torch.zeros(
        lengths.numel() + 1, dtype=lengths.dtype if fits else torch.int64, device=lengths.device
    )
    torch.cumsum(lengths, dim=0, dtype=offsets.dtype, out=offsets[1:])
    return offsets


def _bags(flat: Tensor, offsets: Tensor) -> list[Tensor]:
    bounds: Sequence[int] = offsets.tolist()
    return [flat[start:end] for start, end in pairwise(bounds)]
