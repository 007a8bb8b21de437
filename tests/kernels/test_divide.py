"""Ids divided among the shards of a table cut by rows, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore import _core


@pytest.mark.parametrize("wire", [np.int64, np.int32])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("starts", [[0], [0, 7], [0, 5, 5, 11, 40]])
def test_ids_by_shard(dtype: type, wire: type, starts: list[int]) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 4, 30)
    ids = rng.integers(0, 50, lengths.sum()).astype(dtype)
    found, per_bag, positions, ends = _core.divide_by_rows(
        ids.ctypes.data, dtype is np.int32, len(ids), lengths, np.array(starts), wire is np.int32
    )
    assert found.dtype == per_bag.dtype == wire
    shard = np.searchsorted(np.array(starts), ids, side="right") - 1
    order = np.argsort(shard, kind="stable")
    bag = np.repeat(np.arange(30), lengths)
    np.testing.assert_array_equal(positions, order)
    np.testing.assert_array_equal(found, ids[order])
    np.testing.assert_array_equal(ends, np.cumsum(np.bincount(shard, minlength=len(starts))))
    for number in range(len(starts)):
        expected = np.bincount(bag[shard == number], minlength=30)
        np.testing.assert_array_equal(per_bag.reshape(len(starts), 30)[number], expected)


def test_what_does_not_fit_is_refused() -> None:
    ids = np.array([3, 1, 2])
    for lengths, starts in (([1, 1], [0]), ([2, 2], [0]), ([4, -1], [0]), ([3], [2])):
        with pytest.raises(ValueError, match=r"lengths do not fit|below all shards"):
            _core.divide_by_rows(ids.ctypes.data, False, 3, np.array(lengths), np.array(starts), False)


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("wrong", [-1, 10, 2**31 - 1])
def test_the_first_id_that_is_outside(dtype: type, wrong: int) -> None:
    right, ids = np.arange(10, dtype=dtype), np.array([3, 9, wrong, 0, wrong], dtype)
    features = [(a.ctypes.data, dtype is np.int32, len(a), 10) for a in (right, right[:0], ids, ids)]
    assert _core.first_outside(features) == (2, 2)
    assert _core.first_outside(features[:2]) == _core.first_outside([]) == (-1, -1)
