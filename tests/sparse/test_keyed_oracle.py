"""KeyedTensor against torchrec's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from tests.sparse.jagged_batches import given, peer, same_tensor
from tierstore.errors import InputError
from tierstore.sparse import KeyedTensor


@st.composite
def keyed_pairs(draw: st.DrawFn, names: str = "ab", batch: int | None = None) -> tuple[KeyedTensor, object]:
    """Ours and torchrec's with the same keys, each with its own leaf of values."""
    batch = draw(st.integers(0, 4)) if batch is None else batch
    keys = list(names)
    widths = [draw(st.integers(0, 5)) for _ in keys]
    values = torch.rand(batch, sum(widths), generator=torch.Generator().manual_seed(len(keys) * 7 + batch))
    sides = [values.clone().requires_grad_() for _ in range(2)]
    return KeyedTensor(keys, widths, sides[0]), peer.KeyedTensor(list(names), list(widths), sides[1])


@given(keyed_pairs("abc"))
def test_parts(pair: tuple) -> None:
    ours, theirs = pair
    assert ours.keys() == theirs.keys()
    assert ours.key_dim() == theirs.key_dim()
    assert ours.length_per_key() == theirs.length_per_key()
    assert ours.offset_per_key() == theirs.offset_per_key()
    assert ours.index_per_key() == theirs._key_indices()
    assert ours.device() == theirs.device()
    assert ours.size_in_bytes() == theirs.size_in_bytes()
    same_tensor(ours.values(), theirs.values())
    mine, other = ours.to_dict(), theirs.to_dict()
    assert list(mine) == list(other)
    for key in mine:
        same_tensor(mine[key], other[key])
        same_tensor(ours[key], theirs[key])
    same_tensor(ours.to("cpu").values(), theirs.to("cpu").values())
    assert str(ours) == str(theirs)


@given(st.integers(1, 3), st.integers(0, 2), st.sampled_from([0, 1, -1]))
def test_from_tensor_list(batch: int, extra: int, dim: int) -> None:
    shapes = [(batch, 2 + i) if dim else (2 + i, batch) for i in range(1 + extra)]
    tensors = [torch.rand(shape) for shape in shapes]
    keys = list("xyz")[: len(tensors)]
    ours = KeyedTensor.from_tensor_list(keys, tensors, dim, dim)
    theirs = peer.KeyedTensor.from_tensor_list(keys, tensors, dim, dim)
    assert ours.length_per_key() == theirs.length_per_key()
    assert ours.key_dim() == theirs.key_dim()
    same_tensor(ours.values(), theirs.values())
    for key in keys:
        same_tensor(ours[key], theirs[key])


@given(st.data())
def test_regroup_and_its_gradient(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3))
    pairs = [data.draw(keyed_pairs(names, batch)) for names in ("ab", "cde")]
    everything = list("abcde")
    groups = data.draw(
        st.lists(st.lists(st.sampled_from(everything), min_size=1, max_size=4), min_size=1, max_size=3)
    )
    if data.draw(st.booleans()):  # every key once, for which torchrec has another path
        order = data.draw(st.permutations(everything))
        groups = [order[:2], order[2:3], order[3:]]
    mine = KeyedTensor.regroup([pair[0] for pair in pairs], groups)
    other = peer.KeyedTensor.regroup([pair[1] for pair in pairs], groups)
    for one, another in zip(mine, other, strict=True):
        same_tensor(one, another)
    scales = [torch.rand(one.shape) for one in mine]
    for side in (mine, other):
        torch.stack([(one * scale).sum() for one, scale in zip(side, scales, strict=True)]).sum().backward()
    for pair in pairs:
        grads = [
            torch.zeros_like(side.values()) if side.values().grad is None else side.values().grad
            for side in pair
        ]
        torch.testing.assert_close(*grads)


def test_regroup_as_dict() -> None:
    keyed = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
    assert KeyedTensor.regroup_as_dict([keyed], [["b"], ["a", "b"]], ["x", "y"])["y"].shape == (2, 3)
    with pytest.raises(InputError, match="2 groups need as many keys, got 1"):
        KeyedTensor.regroup_as_dict([keyed], [["b"], ["a"]], ["x"])


def test_regroup_along_another_dimension_and_of_no_keys() -> None:
    keyed = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(3, 2), key_dim=0)
    (swapped,) = KeyedTensor.regroup([keyed], [["b", "a"]])
    assert swapped.tolist() == [[2, 3], [4, 5], [0, 1]]
    assert KeyedTensor.regroup([keyed], [[]])[0].shape == (0, 2)


def test_missing_keys_are_named() -> None:
    keyed = KeyedTensor(["a", "b"], [1, 2], torch.zeros(2, 3))
    with pytest.raises(KeyError, match="no key 'c'"):
        keyed["c"]
    with pytest.raises(KeyError, match=r"no keyed tensor has \['c'\]"):
        KeyedTensor.regroup([keyed], [["a", "c"]])


def test_lengths_must_fit_the_values() -> None:
    with pytest.raises(InputError, match="2 keys need as many lengths, got 1"):
        KeyedTensor(["a", "b"], [1], torch.zeros(2, 3))
    with pytest.raises(InputError, match="add up to 4 but dimension 1 of the values has size 3"):
        KeyedTensor(["a", "b"], [2, 2], torch.zeros(2, 3))
    with pytest.raises(InputError, match=r"key_dim 1 is outside values of shape \(3,\)"):
        KeyedTensor(["a", "b"], [1, 2], torch.zeros(3))
