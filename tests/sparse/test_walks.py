"""Pytree walks, collation, pickling, and the points where torchrec loses something."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from tests.sparse.jagged_batches import Batch, batches, given, same_keyed_jagged, same_tensor
from tierstore.errors import InputError
from tierstore.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def variable_batch() -> KeyedJaggedTensor:
    """Key a has 2 bags, key b 1; 3 examples."""
    return KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"],
        torch.tensor([5, 6, 7]),
        torch.tensor([1, 0, 2]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 1, 0], [0, 0, 0]])),
    )


@given(batches(min_keys=0))
def test_flatten_and_unflatten(batch: Batch) -> None:
    ours, _ = batch.both()
    leaves, spec = pytree.tree_flatten({"x": [ours]})
    assert any(leaf is ours.values() for leaf in leaves)
    again = pytree.tree_unflatten(leaves, spec)["x"][0]
    same_keyed_jagged(again, ours)
    if batch.inverse is not None:
        assert again.inverse_indices()[0] == batch.inverse[0]
        same_tensor(again.inverse_indices()[1], batch.inverse[1])


def test_the_structure_does_not_depend_on_what_was_computed() -> None:
    one, other = variable_batch(), variable_batch()
    other.offsets()
    other.to_dict()
    assert pytree.tree_structure(one) == pytree.tree_structure(other)


def test_leaves_can_become_anything() -> None:
    keyed = KeyedTensor(["a"], [2], torch.zeros(1, 2), key_dim=1)
    nest = (variable_batch(), JaggedTensor(torch.zeros(2), lengths=torch.tensor([2])), keyed)
    shapes = pytree.tree_map(lambda leaf: None if leaf is None else tuple(leaf.shape), nest)
    assert shapes[0].values() == (3,)
    assert shapes[2].values() == (1, 2)
    assert "values=(3,)" in repr(shapes[0])
    doubled = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf * 2, nest[2])
    assert doubled.keys() == ["a"]
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(nest[0])[0]]
    assert paths[:2] == ["._values", "._weights"]


def test_key_dim_survives_a_walk() -> None:
    keyed = KeyedTensor(["a", "b"], [1, 2], torch.arange(6).view(3, 2), key_dim=0)
    assert pytree.tree_map(lambda leaf: leaf, keyed)["b"].shape == (2, 2)


@given(batches(min_keys=0))
def test_pickle(batch: Batch) -> None:
    ours, _ = batch.both()
    same_keyed_jagged(pickle.loads(pickle.dumps(ours)), ours)


def samples() -> list[dict[str, object]]:
    keyed = [
        KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.arange(i + 2), torch.tensor([i, 2]))
        for i in range(4)
    ]
    return [{"ids": one, "label": torch.tensor(i)} for i, one in enumerate(keyed)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_joins_samples_into_batches(workers: int) -> None:
    batch = next(iter(DataLoader(samples(), batch_size=3, num_workers=workers)))
    assert batch["label"].tolist() == [0, 1, 2]
    assert batch["ids"].stride() == 3
    assert [part.tolist() for part in batch["ids"]["a"].to_dense()] == [[], [0], [0, 1]]
    assert [part.tolist() for part in batch["ids"]["b"].to_dense()] == [[0, 1], [1, 2], [2, 3]]


def test_a_data_loader_passes_whole_batches_on() -> None:
    loader = DataLoader(samples(), batch_size=None)
    assert [batch["ids"].length_per_key() for batch in loader] == [[i, 2] for i in range(4)]


def test_collation_needs_samples_that_fit() -> None:
    from torch.utils.data import default_collate

    one = samples()[1]["ids"]
    assert isinstance(one, KeyedJaggedTensor)
    with pytest.raises(InputError, match=r"sample 1 has keys \['b', 'a'\]"):
        default_collate([one, one.permute([1, 0])])
    with pytest.raises(InputError, match="sample 0 has weights but sample 1 has none"):
        default_collate([JaggedTensor(one["b"].values(), torch.ones(2), torch.tensor([2])), one["b"]])
    with pytest.raises(InputError, match="sample 0 has inverse indices"):
        default_collate([variable_batch()])


def test_weights_are_differentiable_through_views() -> None:
    weights = torch.ones(4, requires_grad=True)
    keyed = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"], torch.arange(4), torch.tensor([1, 1, 2, 0]), weights
    )
    pieces = [keyed["b"], keyed.permute([1])["b"], keyed.split([1, 1])[1]["b"], keyed.to_dict()["b"]]
    for times, piece in enumerate(pieces, start=1):
        (piece.weights() * 2).sum().backward()
        assert weights.grad is not None
        assert weights.grad.tolist() == [0, 0, 2 * times, 2 * times]


class TestWhereTorchrecLosesSomething:
    """Each of these fails with torchrec 1.8.0."""

    def test_an_empty_batch_becomes_a_dict_of_empty_bags(self) -> None:
        keyed = KeyedJaggedTensor.from_lengths_sync(
            ["a", "b"], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
        )
        parts = keyed.to_dict()
        assert [len(parts[key]) for key in ("a", "b")] == [0, 0]
        assert parts["a"].offsets().tolist() == [0]
        assert KeyedJaggedTensor.from_jt_dict(parts).stride() == 0
        assert keyed.permute([1, 0]).keys() == ["b", "a"]
        offsets = torch.zeros(1, dtype=torch.int64)
        assert KeyedJaggedTensor.from_offsets_sync(["a"], keyed.values(), offsets).length_per_key() == [0]

    def test_a_moved_batch_has_no_parts_of_the_old_device(self) -> None:
        keyed = variable_batch()
        keyed.to_dict()
        moved = keyed.to("meta")
        assert moved.inverse_indices()[1].device.type == "meta"
        assert moved.to_dict()["a"].values().device.type == "meta"

    def test_inverse_indices_follow_their_keys(self) -> None:
        keyed = variable_batch()
        swapped = keyed.permute([1, 0])
        assert swapped.inverse_indices()[0] == ["b", "a"]
        assert swapped.inverse_indices()[1].tolist() == [[0, 0, 0], [0, 1, 0]]
        first, second = keyed.split([1, 1])
        assert first.inverse_indices()[0] == ["a"]
        assert second.inverse_indices()[1].tolist() == [[0, 0, 0]]
        joined = KeyedJaggedTensor.concat([second, first]).validate()
        assert joined.inverse_indices()[1].tolist() == swapped.inverse_indices()[1].tolist()
        assert joined.stride() == 3

    def test_inverse_keys_in_another_order_survive_a_walk(self) -> None:
        keyed = KeyedJaggedTensor(
            ["a", "b"],
            torch.tensor([5, 6, 7]),
            lengths=torch.tensor([1, 0, 2]),
            stride_per_key_per_rank=[[2], [1]],
            inverse_indices=(["b", "a"], torch.tensor([[0, 0], [1, 0]])),
        )
        assert pytree.tree_map(lambda leaf: leaf, keyed).inverse_indices()[0] == ["b", "a"]

    def test_a_batch_without_keys_keeps_its_size_in_a_walk(self) -> None:
        plain = KeyedJaggedTensor.from_lengths_sync(["a"], torch.arange(3), torch.tensor([1, 2]))
        none = KeyedJaggedTensor.empty_like(plain)
        assert none.stride() == 2
        assert pytree.tree_map(lambda leaf: leaf, none).stride() == 2

    def test_an_empty_piece_of_a_split_is_valid(self) -> None:
        plain = KeyedJaggedTensor.from_lengths_sync(["a"], torch.arange(3), torch.tensor([1, 2]))
        piece = plain.split([0, 1])[0].validate()
        assert piece.offsets().tolist() == [0]
        assert piece.stride() == 2

    def test_long_tensors_are_cut_when_printed(self) -> None:
        lengths = torch.full((20_000,), 500)
        keyed = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.zeros(10_000_000), lengths)
        text = str(keyed)  # 100 bags of 100 values for each key
        assert "... 400 more" in text
        assert "... 9,900 more bags" in text
        assert len(text) < 200_000
