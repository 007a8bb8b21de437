"""Wrong jagged inputs are refused with a message that names what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tierstore.errors import InputError
from tierstore.sparse import JaggedTensor, KeyedJaggedTensor, as_keyed_jagged_tensor


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


AB = ["a", "b"]
WRONG_AT_CONSTRUCTION: list[tuple[str, dict[str, Any]]] = [
    ("give lengths or offsets", {}),
    ("values must be a torch.Tensor, not list", {"values": [1, 2]}),
    ("values must have at least one dimension", {"values": torch.tensor(3), "lengths": ints(1, 1)}),
    ("lengths must be a torch.Tensor, not list", {"lengths": [1, 1]}),
    ("lengths must be integers, got torch.float32; use lengths.long()", {"lengths": torch.ones(2)}),
    ("offsets must be integers, got torch.float64", {"offsets": torch.zeros(3, dtype=torch.float64)}),
    ("offsets must have one dimension", {"offsets": torch.zeros(1, 3, dtype=torch.int64)}),
    (
        "weights of shape (2,) do not fit values of shape (4,)",
        {"lengths": ints(2, 2), "weights": torch.ones(2)},
    ),
    ("values are on cpu but lengths on meta", {"lengths": ints(2, 2).to("meta")}),
    ("2 lengths need 3 offsets, got 2", {"lengths": ints(2, 2), "offsets": ints(0, 2)}),
]
WRONG_KEYED: list[tuple[str, dict[str, Any]]] = [
    ("of 3 bags cannot be shared evenly by 2 keys ['a', 'b']", {"lengths": ints(2, 1, 1)}),
    (
        "2 keys with stride 2 need 4 bags, but there are lengths (or offsets) of 2",
        {"lengths": ints(2, 2), "stride": 2},
    ),
    ("of 2 bags but no keys", {"keys": [], "lengths": ints(2, 2)}),
    (
        "strides of the keys add up to 4 bags, but there are lengths (or offsets) of 2",
        {"lengths": ints(2, 2), "stride_per_key_per_rank": [[2], [2]]},
    ),
    (
        "needs a row for each of the 2 keys",
        {"lengths": ints(2, 2), "stride_per_key_per_rank": [[2]]},
    ),
    ("equally long lists", {"lengths": ints(2, 2), "stride_per_key_per_rank": [[2], [1, 1]]}),
    (
        "inverse_indices of shape (1, 2) need a row for each of their 2 keys",
        {"lengths": ints(2, 2), "inverse_indices": (AB, ints(0, 0).view(1, 2))},
    ),
    (
        "inverse_indices must be integers",
        {"lengths": ints(2, 2), "inverse_indices": (AB, torch.zeros(2, 2))},
    ),
]


@pytest.mark.parametrize(
    ("message", "parts"), WRONG_AT_CONSTRUCTION, ids=lambda x: x if isinstance(x, str) else ""
)
def test_construction(message: str, parts: dict[str, Any]) -> None:
    for what, make in (
        (JaggedTensor, JaggedTensor),
        (KeyedJaggedTensor, lambda **kw: KeyedJaggedTensor(AB, **kw)),
    ):
        with pytest.raises(InputError) as caught:
            make(**({"values": ints(0, 1, 2, 3)} | parts))
        assert message in str(caught.value)
        assert str(caught.value).startswith(what.__name__)


@pytest.mark.parametrize(("message", "parts"), WRONG_KEYED, ids=str)
def test_keyed_construction(message: str, parts: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        KeyedJaggedTensor(**({"keys": AB, "values": ints(0, 1, 2, 3)} | parts))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            (1, 2, 1, 2),
            "6 but there are 5 values: key 'b' has lengths of 3 in all, but only 2 values",
        ),
        ((3, 3, 0, 0), "key 'a' has lengths of 6 in all, but only 5 values"),
        (
            (1, 1, 1, 1),
            "4 but there are 5 values: 1 are left over; lengths per key: {'a': 2, 'b': 2}",
        ),
        ((4, 4, -3, 0), "key 'a' has lengths of 8"),
        ((1, 1, -3, 0), "key 'b' has negative lengths: they add up to -3"),
    ],
)
def test_lengths_that_disagree_with_the_values(lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        KeyedJaggedTensor.from_lengths_sync(AB, ints(0, 1, 2, 3, 4), ints(*lengths))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"lengths": ints(2, -1, 4, 0)}, "bag 1 of key 'a' has the negative length -1"),
        ({"lengths": ints(1, 1, 2, 2)}, "key 'b' has lengths of 4 in all, but only 3 values are left for it"),
        ({"offsets": ints(1, 1, 2, 3, 5)}, "offsets must begin with 0, got 1"),
        (
            {"offsets": ints(0, 2, 1, 3, 5)},
            "offsets must not decrease, but bag 1 of key 'a' runs from 2 to 1",
        ),
        ({"offsets": ints(0, 2, 3, 3, 2)}, "bag 1 of key 'b' runs from 3 to 2"),
        ({"offsets": ints(0, 2, 3, 3, 7)}, "the last offset is 7 but there are 5 values"),
        (
            {"offsets": ints(0, 2, 3, 3, 5), "lengths": ints(2, 1, 1, 1)},
            "bag 0 of key 'b' has length 1 but offsets 0 apart",
        ),
        ({"keys": ["a", "a"], "lengths": ints(1, 1, 1, 2)}, "keys must be unique, but ['a'] are repeated"),
        (
            {
                "lengths": ints(1, 1, 3),
                "stride_per_key_per_rank": [[2], [1]],
                "inverse_indices": (AB, ints(0, 1, 0, 1).view(2, 2)),
            },
            "inverse index 1 of key 'b' is outside its 1 bags",
        ),
    ],
)
def test_validate_reads_the_data(parts: dict[str, Any], message: str) -> None:
    keyed = KeyedJaggedTensor(**({"keys": AB, "values": ints(0, 1, 2, 3, 4)} | parts))
    with pytest.raises(InputError) as caught:
        keyed.validate()
    assert message in str(caught.value)


def test_validate_of_a_jagged_tensor() -> None:
    with pytest.raises(InputError, match="the lengths add up to 3 but there are 2 values"):
        JaggedTensor(ints(0, 1), lengths=ints(1, 2)).validate()
    with pytest.raises(InputError, match="bag 1 runs from 2 to 1"):
        JaggedTensor(ints(0, 1), offsets=ints(0, 2, 1)).validate()


def test_what_is_absent_says_so() -> None:
    keyed = KeyedJaggedTensor(AB, ints(0, 1), lengths=ints(1, 1))
    with pytest.raises(InputError, match="has no weights"):
        keyed.weights()
    with pytest.raises(InputError, match="has no inverse indices"):
        keyed.inverse_indices()
    with pytest.raises(KeyError, match="no key 'c'"):
        keyed["c"]


def test_rearranging_checks_its_arguments() -> None:
    plain = KeyedJaggedTensor.from_lengths_sync(AB, ints(0, 1), ints(1, 1))
    weighted = KeyedJaggedTensor.from_lengths_sync(AB, ints(0, 1), ints(1, 1), torch.ones(2))
    wider = KeyedJaggedTensor.from_lengths_sync(["c"], ints(0, 1), ints(1, 1))
    for segments in ([3], [-1, 2]):
        with pytest.raises(InputError, match="do not fit 2 keys"):
            plain.split(segments)
    with pytest.raises(InputError, match="index 2 is outside the 2 keys"):
        plain.permute([0, 2])
    with pytest.raises(InputError, match="there is no KeyedJaggedTensor"):
        KeyedJaggedTensor.concat([])
    with pytest.raises(InputError, match="number 1 has weights, number 0 has not"):
        KeyedJaggedTensor.concat([plain, weighted])
    with pytest.raises(InputError, match=r"batch sizes must agree, got \[1, 2\]"):
        KeyedJaggedTensor.concat([plain, wider])
    with pytest.raises(InputError, match="key 'x' has weights but 'y' has none"):
        KeyedJaggedTensor.from_jt_dict({"x": weighted["a"], "y": plain["a"]})


def test_exchanges_check_their_arguments() -> None:
    plain = KeyedJaggedTensor.from_lengths_sync(AB, ints(0, 1), ints(1, 1))
    for splits in ([3], [-1, 2]):
        with pytest.raises(InputError, match=r"dist_splits: splits .* do not fit 2 keys"):
            plain.dist_splits(splits)
    init, sent = KeyedJaggedTensor.dist_init, plain.dist_tensors()
    order = ints(0, 1)
    with pytest.raises(InputError, match="1 tensors; give the tensors of dist_labels, 2 or 3"):
        init(AB, sent[:1], False, 1, order, [1])
    with pytest.raises(InputError, match="2 tensors; give the tensors of dist_labels, 3 or 4"):
        init(AB, sent, True, 1, order, None)
    with pytest.raises(InputError, match="stride_per_rank is None"):
        init(AB, sent, False, 1, order, None)
    with pytest.raises(InputError, match="3 strides; there must be one for each of 2 keys of 1 ranks"):
        init(AB, [*sent, ints(1, 1, 1)], True, 1, order, None)
    for strides in ([[2, 1]], [[1, 2]]):
        with pytest.raises(InputError, match="2 lengths do not fit the batch sizes"):
            init(AB, [*sent, ints(*strides[0])], True, 1, order, None)
    with pytest.raises(InputError, match="do not fit the batch sizes"):
        init(["a"], [ints(1, 1, 0), ints(0, 1)], False, 1, ints(0), [2])
    for wrong in (ints(0, 2), ints(-1, 0)):
        with pytest.raises(InputError, match="recat names segments that are not among the 2 given"):
            init(AB, sent, False, 1, wrong, [1])


def test_other_objects_are_not_taken_for_a_batch() -> None:
    with pytest.raises(InputError, match="got Tensor, which has no keys"):
        as_keyed_jagged_tensor(torch.zeros(3))
    with pytest.raises(InputError, match="got dict, which has no weights_or_none"):
        as_keyed_jagged_tensor({"a": 1})
