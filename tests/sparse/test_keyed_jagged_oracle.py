"""KeyedJaggedTensor against torchrec's, on random batches."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.sparse.jagged_batches import (
    Batch,
    batches,
    given,
    peer,
    same_jagged,
    same_keyed_jagged,
    same_tensor,
)
from tierstore.sparse import JaggedTensor, KeyedJaggedTensor, as_keyed_jagged_tensor


@given(batches(), st.booleans())
def test_everything_derived_agrees(batch: Batch, offsets: bool) -> None:
    ours, theirs = batch.both(offsets)
    assert (ours.lengths_or_none() is None) == (theirs.lengths_or_none() is None)
    assert ours.length_per_key_or_none() == theirs.length_per_key_or_none()
    assert ours.offset_per_key_or_none() == theirs.offset_per_key_or_none()
    same_keyed_jagged(ours, theirs)
    assert ours.device() == theirs.device()
    if batch.inverse is not None:
        assert ours.inverse_indices()[0] == theirs.inverse_indices()[0]
        same_tensor(ours.inverse_indices()[1], theirs.inverse_indices()[1])
    assert ours.inverse_indices_or_none() is None or batch.inverse is not None


@given(batches(), st.booleans())
def test_plain_constructor_and_unsync(batch: Batch, keep_stride: bool) -> None:
    arguments = batch.arguments() | {"lengths": batch.lengths}
    if keep_stride and batch.strides is None:
        arguments["stride"] = batch.lengths.numel() // len(batch.keys)
    ours, theirs = KeyedJaggedTensor(**arguments), peer.KeyedJaggedTensor(**arguments)
    assert ours.length_per_key_or_none() is None
    same_keyed_jagged(ours, theirs)
    assert ours.unsync() is ours
    assert ours.length_per_key_or_none() is None
    assert ours.offset_per_key_or_none() is None
    same_keyed_jagged(ours.sync(), theirs.unsync().sync())


@given(batches(min_batch=1), st.booleans())
def test_to_dict_and_getitem(batch: Batch, compute_offsets: bool) -> None:
    ours, theirs = batch.both()
    mine, other = ours.to_dict(compute_offsets), theirs.to_dict(compute_offsets)
    assert list(mine) == list(other)
    for key in mine:
        assert (mine[key].offsets_or_none() is None) == (other[key].offsets_or_none() is None)
        same_jagged(mine[key], other[key])
        same_jagged(ours[key], theirs[key])
    assert ours.to_dict() is mine


@given(batches(min_batch=1), st.data())
def test_split(batch: Batch, data: st.DataObject) -> None:
    ours, theirs = batch.both()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch.keys)), max_size=3)))
    segments = [end - start for start, end in zip([0, *cuts], [*cuts, len(batch.keys)], strict=True)]
    for mine, other in zip(ours.split(segments), theirs.split(segments), strict=True):
        assert mine.keys() == other.keys()
        assert mine.stride() == other.stride()
        assert mine.stride_per_key() == other.stride_per_key()
        same_tensor(mine.values(), other.values())
        same_tensor(mine.weights_or_none(), other.weights_or_none())
        if mine.keys():
            same_keyed_jagged(mine, other)


@given(batches(min_batch=1), st.data())
def test_permute_with_keys_left_out_and_repeated(batch: Batch, data: st.DataObject) -> None:
    ours, theirs = batch.both()
    indices = data.draw(st.lists(st.integers(0, len(batch.keys) - 1), min_size=1, max_size=6))
    same_keyed_jagged(ours.permute(indices), theirs.permute(indices))
    same_keyed_jagged(
        ours.permute(indices, torch.tensor(indices, dtype=torch.int32)), theirs.permute(indices)
    )


@given(st.lists(st.integers(0, 3), min_size=3, max_size=3), st.data())
def test_concat(sizes: list[int], data: st.DataObject) -> None:
    batch = data.draw(batches(min_keys=3))
    ours, theirs = batch.both()
    order = data.draw(st.permutations([0, 1, 2]))
    mine, other = ours.split([1, 1, len(batch.keys) - 2]), theirs.split([1, 1, len(batch.keys) - 2])
    for one in (*mine, *other):
        one._inverse_indices = None  # torchrec's pieces have lost them
    result = KeyedJaggedTensor.concat([mine[i] for i in order])
    same_keyed_jagged(result, peer.KeyedJaggedTensor.concat([other[i] for i in order]))


@given(batches(variable=True))
def test_concat_joins_inverse_indices(batch: Batch) -> None:
    ours, theirs = batch.both()
    result, expected = KeyedJaggedTensor.concat([ours, ours]), peer.KeyedJaggedTensor.concat([theirs, theirs])
    same_keyed_jagged(result, expected)
    if batch.inverse is not None:
        assert result.inverse_indices()[0] == expected.inverse_indices()[0]
        same_tensor(result.inverse_indices()[1], expected.inverse_indices()[1])


@given(batches(min_batch=1))
def test_from_jt_dict(batch: Batch) -> None:
    ours, theirs = batch.both()
    expected = peer.KeyedJaggedTensor.from_jt_dict(theirs.to_dict())
    same_keyed_jagged(KeyedJaggedTensor.from_jt_dict(ours.to_dict()), expected)
    same_keyed_jagged(KeyedJaggedTensor.from_jt_dict(theirs.to_dict()), expected)


@given(batches(), st.sampled_from([None, "cpu"]))
def test_empty_like(batch: Batch, device: str | None) -> None:
    ours, theirs = batch.both()
    mine, other = (
        KeyedJaggedTensor.empty_like(ours, device),
        peer.KeyedJaggedTensor.empty_like(theirs, device),
    )
    assert mine.keys() == other.keys()
    assert mine.values().shape == other.values().shape
    assert mine.lengths().shape == other.lengths().shape
    assert mine.lengths().dtype == other.lengths().dtype
    assert (mine.weights_or_none() is None) == (other.weights_or_none() is None)
    assert (
        mine.stride() == (ours if batch.strides else other).stride()
    )  # torchrec's forgets differing strides
    if device:
        assert mine.copy_(ours) is mine
        same_keyed_jagged(mine, theirs)


@given(st.booleans(), st.sampled_from([None, torch.int64]), st.sampled_from([None, torch.float64]))
def test_empty(weighted: bool, values: torch.dtype | None, weights: torch.dtype | None) -> None:
    arguments = {"is_weighted": weighted, "values_dtype": values, "weights_dtype": weights}
    same_keyed_jagged(KeyedJaggedTensor.empty(**arguments), peer.KeyedJaggedTensor.empty(**arguments))
    same_tensor(JaggedTensor.empty(**arguments).values(), peer.JaggedTensor.empty(**arguments).values())
    same_tensor(
        JaggedTensor.empty(**arguments).weights_or_none(),
        peer.JaggedTensor.empty(**arguments).weights_or_none(),
    )


@given(batches(), st.booleans())
def test_text(batch: Batch, offsets: bool) -> None:
    ours, theirs = batch.both(offsets)
    assert str(ours) == str(theirs)
    assert repr(ours).startswith("KeyedJaggedTensor(keys=['f0'")


@given(batches(), st.booleans())
def test_copies_and_sizes(batch: Batch, offsets: bool) -> None:
    ours, theirs = batch.both(offsets)
    same_keyed_jagged(ours.to("cpu"), theirs.to("cpu"))
    same_keyed_jagged(
        ours.to(torch.device("cpu"), True, torch.float64), theirs.to("cpu", True, torch.float64)
    )
    same_keyed_jagged(ours.flatten_lengths(), theirs.flatten_lengths())
    inverse = 0 if batch.inverse is None else batch.inverse[1].numel() * 8
    ours, theirs = batch.both(offsets)
    assert ours.size_in_bytes() - inverse == theirs.size_in_bytes()


@given(batches(min_keys=0), st.booleans())
def test_a_torchrec_batch_is_taken_as_ours(batch: Batch, offsets: bool) -> None:
    ours, theirs = batch.both(offsets)
    taken = as_keyed_jagged_tensor(theirs)
    assert isinstance(taken, KeyedJaggedTensor)
    assert taken.values() is theirs.values()
    same_keyed_jagged(taken.validate(), theirs)
    assert as_keyed_jagged_tensor(ours) is ours
    if batch.keys:
        for piece in theirs.split([0, len(batch.keys)]):
            assert as_keyed_jagged_tensor(piece).keys() == piece.keys()
