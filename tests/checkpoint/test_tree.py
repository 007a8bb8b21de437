"""State as JSON and tensors comes back as it was, in type and bits; what cannot be kept is named."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.checkpoint.tree import SavedState, load_into, pack, unpack
from tierstore.errors import ConfigError, StoreCorruptError, StoreMismatchError


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return unpack(json.loads(json.dumps(pack(value, "x", tensors), allow_nan=False)), tensors)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor | np.ndarray | np.generic):
        left, right = (
            torch.as_tensor(np.asarray(v)) if not isinstance(v, torch.Tensor) else v for v in (left, right)
        )
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=9)
keys = st.integers() | st.text(max_size=5) | st.tuples(st.integers(), st.booleans())


@given(
    st.recursive(
        plain, lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner)
    )
)
def test_plain_values(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {"a": torch.arange(6).reshape(2, 3), "b": {"a": torch.tensor(2.5)}, "b.a": torch.zeros(0, 3)},
        [torch.tensor([1.5, -0.0], dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)],
        [
            np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::2],
            np.zeros((0, 2)),
            np.float32(2.5),
            np.bool_(True),
        ],
        {"step": torch.tensor(3.0), 7: {"exp_avg": torch.ones(2)}, "$odd": 1, "params": [0, 1]},
        {1, 2},
        frozenset("ab"),
        Counter({3: 1, 5: 2}),
        torch.bfloat16,
        random.getstate(),
        np.random.default_rng(3).bit_generator.state,
    ],
)
def test_other_values(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_what_comes_back_as_a_plainer_type() -> None:
    assert there_and_back(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert there_and_back(torch.Size([2, 3])) == (2, 3)
    strided = torch.arange(8).reshape(2, 4).t().requires_grad_(False)
    assert torch.equal(there_and_back(strided), strided)
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not there_and_back(parameter).requires_grad


def test_objects_with_a_state() -> None:
    def objects() -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
        return {
            "schedules": [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)],
            "torch": torch.Generator().manual_seed(1),
            "numpy": np.random.default_rng(1),
            "python": random.Random(1),
            "epoch": 3,
        }

    def draw(found: dict[str, Any]) -> list[Any]:
        found["schedules"][0].optimizer.step()
        found["schedules"][0].step()
        numbers = [
            torch.rand(1, generator=found["torch"]).item(),
            found["numpy"].random(),
            found["python"].random(),
        ]
        return [*numbers, found["schedules"][0].get_last_lr()]

    first, second = objects(), objects()
    draw(first)
    saved = there_and_back(first)
    assert isinstance(saved["schedules"][0], SavedState)
    assert saved["epoch"] == 3
    load_into(second, saved, "extra")
    assert draw(first) == draw(second)
    with pytest.raises(StoreMismatchError, match=r"no state of extra\.other, a Generator"):
        load_into({"other": torch.Generator()}, saved, "extra")
    with pytest.raises(StoreMismatchError, match=r"no state of extra\.schedules\.1, a Random"):
        load_into({"schedules": [first["schedules"][0], random.Random()]}, saved, "extra")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (object(), r"x is a object, which cannot be kept in a checkpoint without pickle"),
        ({"a": [1, lambda: 0]}, r"x\.a\.1 is a function"),
        (np.array(["a"], object), r"array of object"),
        (torch.ones(2).to_sparse(), r"dense tensors"),
        (torch.empty(2, device="meta"), r"on meta"),
    ],
)
def test_what_cannot_be_kept(value: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        pack(value, "x", {})


@pytest.mark.parametrize(
    "packed",
    [
        {"$tensor": "missing"},
        {"$array": ["a", "O", [1]]},
        {"$array": ["a", "<f8", [9]]},
        {"$code": "print()"},
        {"$float": []},
        {"$bytes": "?"},
        {"$dtype": "Tensor"},
        {"$dict": [[[], 1]]},
    ],
)
def test_what_no_checkpoint_holds_is_damage(packed: Any) -> None:
    with pytest.raises(StoreCorruptError, match="that no checkpoint holds"):
        unpack(packed, {"a": torch.zeros(8, dtype=torch.uint8)})
