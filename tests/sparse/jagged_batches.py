"""Random batches for the tests of jagged tensors, and torchrec's counterparts of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torchrec.sparse import jagged_tensor as peer

from tierstore.sparse import JaggedTensor, KeyedJaggedTensor


def given(*strategies: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """hypothesis.given with enough examples to matter, few enough for a quick suite."""
    settings = hypothesis.settings(max_examples=60, deadline=None)
    return lambda test: settings(hypothesis.given(*strategies)(test))


@dataclass
class Batch:
    """The arguments of a KeyedJaggedTensor."""

    keys: list[str]
    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None
    strides: list[list[int]] | None
    inverse: tuple[list[str], torch.Tensor] | None

    def arguments(self) -> dict[str, Any]:
        return {
            "keys": list(self.keys),
            "values": self.values,
            "weights": self.weights,
            "stride_per_key_per_rank": self.strides,
            "inverse_indices": self.inverse,
        }

    def both(self, offsets: bool = False) -> tuple[KeyedJaggedTensor, Any]:
        """Ours and torchrec's, from lengths or from offsets; torchrec cannot take offsets of no bags."""
        if offsets and self.lengths.numel():
            ends = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0).to(self.lengths.dtype)])
            return (
                KeyedJaggedTensor.from_offsets_sync(offsets=ends, **self.arguments()),
                peer.KeyedJaggedTensor.from_offsets_sync(offsets=ends, **self.arguments()),
            )
        return (
            KeyedJaggedTensor.from_lengths_sync(lengths=self.lengths, **self.arguments()),
            peer.KeyedJaggedTensor.from_lengths_sync(lengths=self.lengths, **self.arguments()),
        )


@st.composite
def batches(draw: st.DrawFn, min_keys: int = 1, min_batch: int = 0, variable: bool | None = None) -> Batch:
    """Batches with empty bags, of 0 to 5 examples, with and without weights and differing strides."""
    keys = [f"f{i}" for i in range(draw(st.integers(min_keys, 4)))]
    if variable is None:
        variable = bool(keys) and draw(st.booleans())
    strides, inverse = None, None
    if variable:
        ranks = draw(st.integers(1, 2))
        row = st.lists(st.integers(min_batch, 3), min_size=ranks, max_size=ranks)
        strides = draw(st.lists(row, min_size=len(keys), max_size=len(keys)))
        bags = sum(map(sum, strides))
        if all(sum(row) for row in strides) and draw(st.booleans()):
            size = draw(st.integers(1, 5))
            rows = [
                draw(st.lists(st.integers(0, sum(row) - 1), min_size=size, max_size=size)) for row in strides
            ]
            inverse = (list(keys), torch.tensor(rows))
    else:
        bags = draw(st.integers(min_batch, 5)) * len(keys)
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    lengths = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=bags, max_size=bags)), dtype=dtype)
    total = int(lengths.sum())
    values = torch.arange(total) * 7 % 11
    weights = torch.arange(total, dtype=torch.float32) / 4 if draw(st.booleans()) else None
    return Batch(keys, values, lengths, weights, strides, inverse)


def same_tensor(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> None:
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)


def same_jagged(ours: JaggedTensor, theirs: Any) -> None:
    same_tensor(ours.values(), theirs.values())
    same_tensor(ours.weights_or_none(), theirs.weights_or_none())
    same_tensor(ours.lengths(), theirs.lengths())
    same_tensor(ours.offsets(), theirs.offsets())


def same_keyed_jagged(ours: KeyedJaggedTensor, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    same_tensor(ours.values(), theirs.values())
    same_tensor(ours.weights_or_none(), theirs.weights_or_none())
    same_tensor(ours.lengths(), theirs.lengths())
    same_tensor(ours.offsets(), theirs.offsets())
    assert ours.stride() == theirs.stride()
    assert ours.stride_per_key() == theirs.stride_per_key()
    assert ours.stride_per_key_per_rank() == theirs.stride_per_key_per_rank()
    assert ours.variable_stride_per_key() == theirs.variable_stride_per_key()
    assert ours.length_per_key() == theirs.length_per_key()
    assert ours.offset_per_key() == theirs.offset_per_key()
    assert ours.lengths_offset_per_key() == theirs.lengths_offset_per_key()
    assert ours.index_per_key() == theirs.index_per_key()
