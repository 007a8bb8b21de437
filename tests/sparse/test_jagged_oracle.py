"""JaggedTensor against torchrec's, on random bags."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from tests.sparse.jagged_batches import given, peer, same_jagged, same_tensor
from tierstore.sparse import JaggedTensor

DTYPES = st.sampled_from([torch.float32, torch.int32, torch.int64])


@st.composite
def jagged_pairs(draw: st.DrawFn, min_bags: int = 0, width: int | None = None) -> tuple[JaggedTensor, object]:
    lengths = torch.tensor(
        draw(st.lists(st.integers(0, 4), min_size=min_bags, max_size=6)), dtype=torch.int32
    )
    total = int(lengths.sum())
    values = (torch.arange(total) + 1).to(draw(DTYPES))
    if width:
        values = values.float().unsqueeze(1) * torch.arange(1, width + 1)
    weights = torch.arange(total, dtype=torch.float32) / 3 if draw(st.booleans()) else None
    parts = {"values": values, "weights": weights, "lengths": lengths}
    if draw(st.booleans()):
        zero = torch.zeros(1, dtype=torch.int32)
        parts |= {"lengths": None, "offsets": torch.cat([zero, lengths.cumsum(0).to(torch.int32)])}
    return JaggedTensor(**parts), peer.JaggedTensor(**parts)


@given(jagged_pairs())
def test_parts_and_copies(pair: tuple) -> None:
    ours, theirs = pair
    assert (ours.lengths_or_none() is None) == (theirs.lengths_or_none() is None)
    assert (ours.offsets_or_none() is None) == (theirs.offsets_or_none() is None)
    assert ours.size_in_bytes() == theirs.size_in_bytes()
    same_jagged(ours.to("cpu"), theirs.to("cpu"))
    same_jagged(ours, theirs)
    assert ours.device() == theirs.device()
    assert len(ours) == theirs.lengths().numel()
    assert ours.validate() is ours


@given(jagged_pairs())
def test_text(pair: tuple) -> None:
    assert str(pair[0]) == str(pair[1])
    assert repr(pair[0]).startswith(f"JaggedTensor(bags={len(pair[0])}, values=")


@given(jagged_pairs())
def test_to_dense_and_back(pair: tuple) -> None:
    ours, theirs = pair
    mine, other = ours.to_dense(), theirs.to_dense()
    assert len(mine) == len(other)
    for one, another in zip(mine, other, strict=True):
        same_tensor(one, another)
    weights, other_weights = ours.to_dense_weights(), theirs.to_dense_weights()
    assert (weights is None) == (other_weights is None)
    for one, another in zip(weights or [], other_weights or [], strict=True):
        same_tensor(one, another)
    if mine:
        same_jagged(
            JaggedTensor.from_dense(mine, weights), peer.JaggedTensor.from_dense(other, other_weights)
        )


@given(jagged_pairs(min_bags=1), st.one_of(st.none(), st.integers(0, 5)), st.sampled_from([0.0, -1.0, 2.0]))
def test_padded(pair: tuple, length: int | None, padding: float) -> None:
    ours, theirs = pair
    same_tensor(ours.to_padded_dense(length, padding), theirs.to_padded_dense(length, padding))
    same_tensor(
        ours.to_padded_dense_weights(length, padding), theirs.to_padded_dense_weights(length, padding)
    )


@given(jagged_pairs(min_bags=1, width=3), st.one_of(st.none(), st.integers(1, 5)))
def test_padded_rows_of_vectors_and_their_gradient(pair: tuple, length: int | None) -> None:
    ours, theirs = pair
    leaves = [side.values().detach().clone().requires_grad_() for side in pair]
    mine = JaggedTensor(leaves[0], lengths=ours.lengths()).to_padded_dense(length)
    other = peer.JaggedTensor(leaves[1], lengths=theirs.lengths()).to_padded_dense(length)
    same_tensor(mine, other)
    scale = torch.rand(mine.shape)
    for padded in (mine, other):
        (padded * scale).sum().backward()
    if leaves[0].numel():
        same_tensor(leaves[0].grad, leaves[1].grad)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(4, 6), st.booleans())
def test_from_dense_lengths(lengths: list[int], width: int, weighted: bool) -> None:
    values = torch.arange(len(lengths) * width).view(len(lengths), width)
    arguments = (values, torch.tensor(lengths), values / 7 if weighted else None)
    same_jagged(JaggedTensor.from_dense_lengths(*arguments), peer.JaggedTensor.from_dense_lengths(*arguments))


@given(jagged_pairs(), st.sampled_from([None, "cpu"]))
def test_empty_like(pair: tuple, device: str | None) -> None:
    ours, theirs = pair
    mine, other = JaggedTensor.empty_like(ours, device), peer.JaggedTensor.empty_like(theirs, device)
    assert mine.values().dtype == other.values().dtype
    assert mine.lengths().dtype == other.lengths().dtype
    assert (mine.weights_or_none() is None) == (other.weights_or_none() is None)
    assert mine.values().shape == other.values().shape
    assert mine.lengths().shape == other.lengths().shape
    if device:
        assert mine.copy_(ours) is mine
        same_jagged(mine, theirs)


def test_empty_batches_where_torchrec_gives_up() -> None:
    empty = JaggedTensor.empty()
    assert empty.to_dense() == []
    assert empty.to_padded_dense().shape == (0, 0)
    assert empty.to_padded_dense(3).shape == (0, 3)
    assert empty.offsets().tolist() == [0]
    assert len(JaggedTensor.from_dense([])) == 0
    assert len(JaggedTensor(torch.empty(0), offsets=torch.empty(0, dtype=torch.int64))) == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_offsets_of_narrow_lengths_do_not_overflow(dtype: torch.dtype) -> None:
    jagged = JaggedTensor(torch.zeros(600), lengths=torch.full((6,), 100, dtype=dtype))
    assert jagged.offsets().tolist() == [0, 100, 200, 300, 400, 500, 600]
