"""One call makes a batch of keys into features of a row layout: as the separate calls for each feature."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import ANY

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _core as core

BOUND = 50


@dataclass
class Keyed:
    """Lengths and ids of the bags of every key."""

    bags_per_key: list[int]
    lengths: np.ndarray
    ids: np.ndarray

    def bags(self, offsets: np.ndarray | None = None) -> core.KeyedBags:
        first = None if offsets is None else integers(offsets)
        return core.KeyedBags(integers(self.lengths), self.bags_per_key, len(self.ids), first)

    def of_key(self, key: int) -> tuple[np.ndarray, np.ndarray]:
        begin = sum(self.bags_per_key[:key])
        end = begin + self.bags_per_key[key]
        first = int(self.lengths[:begin].sum())
        lengths = self.lengths[begin:end]
        return lengths.astype(np.int64), self.ids[first : first + int(lengths.sum())]


def integers(array: np.ndarray) -> tuple[int, int, bool]:
    return array.ctypes.data, len(array), array.dtype == np.int32


def one_feature(key: int, padding: int = -1) -> core.KeyedFeatures:
    return core.KeyedFeatures(
        keys=np.array([key]), tables=np.array([2]), bounds=np.array([BOUND]), modes=np.zeros(1, np.uint8),
        padding=padding,
    )  # fmt: skip


DTYPES = st.sampled_from([np.int32, np.int64])


@st.composite
def keyed_batches(draw: st.DrawFn) -> Keyed:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bags_per_key = rng.integers(0, 5, draw(st.integers(1, 4))).tolist()
    least, most = draw(st.sampled_from([(0, 1), (0, 2), (0, 6), (1, 2)]))  # in the last case, one id each
    lengths = rng.integers(least, most, sum(bags_per_key)).astype(draw(DTYPES))
    return Keyed(bags_per_key, lengths, rng.integers(0, BOUND, int(lengths.sum())).astype(draw(DTYPES)))


@given(keyed_batches(), st.data())
def test_features_are_those_of_separate_calls(keyed: Keyed, data: st.DataObject) -> None:
    """Features in any order; some keys have no feature and others several."""
    count = len(keyed.bags_per_key)
    in_order = list(range(count))
    keys = data.draw(st.just(in_order) | st.lists(st.sampled_from(in_order), min_size=1, max_size=6))
    rng = np.random.default_rng(0)
    tables, modes = rng.integers(0, 3, len(keys)), rng.integers(0, 3, len(keys)).astype(np.uint8)
    first, stride = np.arange(len(keys), dtype=np.int64), np.full(len(keys), 7, np.int64)
    features = core.KeyedFeatures(
        keys=np.array(keys, np.int64), tables=tables, bounds=np.full(len(keys), BOUND), modes=modes
    )
    bags = keyed.bags()
    batch, made, bad, _, _ = features.lookup(bags, integers(keyed.ids), core.Places(first, stride))
    own = [keyed.of_key(key) for key in keys]
    offsets, bag_start = core.bag_offsets([lengths for lengths, _ in own])
    segments = [(*integers(ids), int(t), BOUND, -1) for (_, ids), t in zip(own, tables, strict=True)]
    expected, *_ = core.make_batch([(a, n, is32, t, b, p) for a, n, is32, t, b, p in segments])
    assert bad == -1
    assert np.array_equal(batch.unique, expected.unique)
    assert np.array_equal(batch.inverse, expected.inverse)
    for ours, theirs in (
        (made.offsets, offsets),
        (made.bag_start, bag_start),
        (made.out_offset, first),
        (made.out_stride, stride),
        (made.modes, modes),
    ):
        assert np.array_equal(ours, theirs)
    assert made.takes_max == (2 in modes)
    for ours, theirs in zip(features.bags(bags, core.Places(first, stride)).arrays, made.arrays, strict=True):
        assert np.array_equal(ours, theirs)
    assert features.segments(bags, integers(keyed.ids)) == [
        (address if count else ANY, count, *rest) for address, count, *rest in segments
    ]
    sizes = [len(keyed.of_key(key)[1]) for key in in_order]
    assert bags.id_begin == [0, *np.cumsum(sizes).tolist()]
    assert bags.counts(np.array(keys, np.int64)) == [sizes[key] for key in keys]
    rows, *found = features.lookup_rows(bags, integers(keyed.ids))
    assert found == [-1, 0, 0]
    assert np.array_equal(rows.unique, expected.unique)
    assert np.array_equal(rows.inverse, expected.inverse)


def test_bags_of_one_id_share_their_offsets() -> None:
    """A window of many batches has them once. Batches of any size, also larger than those before."""
    features, at, made = one_feature(0), np.zeros(1, np.int64), []
    for count in (3, 5_000, 0, 70_000, 3):
        keyed = Keyed([count], np.ones(count, np.int64), np.zeros(count, np.int64))
        for bags in (keyed.bags(), core.KeyedBags.equal(count, 1)):
            made.append((count, features.lookup(bags, integers(keyed.ids), core.Places(at, at))[1]))
    for count, bags in made:
        assert np.array_equal(bags.offsets, np.arange(count + 1))
        assert bags.own_bytes == 0
        assert not bags.offsets.flags.writeable
    first, *_, last = (bags.offsets for count, bags in made if count >= 70_000)
    assert np.shares_memory(first, last)
    many = 1 << 22  # the shared array stays for ever, so a very large batch has its own
    keyed = Keyed([many], np.ones(many, np.int32), np.zeros(many, np.int64))
    for bags in (keyed.bags(), core.KeyedBags.equal(many, 1)):
        own = features.lookup(bags, integers(keyed.ids), core.Places(at, at))[1]
        assert own.own_bytes == 8 * (many + 1)
        assert np.array_equal(own.offsets, np.arange(many + 1))
    others = Keyed([2], np.array([2, 0]), np.zeros(2, np.int64))
    assert features.lookup(others.bags(), integers(others.ids), core.Places(at, at))[1].own_bytes == 3 * 8


@pytest.mark.parametrize("count", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1])
def test_many_lengths_are_read_without_the_interpreters_lock(count: int) -> None:
    lengths = np.arange(count, dtype=np.int32) % 3
    keyed = Keyed([count], lengths, np.zeros(int(lengths.sum()), np.int64))
    features, at = one_feature(0), np.zeros(1, np.int64)
    _, made, *_ = features.lookup(keyed.bags(), integers(keyed.ids), core.Places(at, at))
    assert np.array_equal(made.offsets, np.concatenate([[0], np.cumsum(lengths)]))
    lengths[-1] += 1
    with pytest.raises(ValueError, match="do not add up to the number of ids"):
        keyed.bags()


@pytest.mark.parametrize(
    ("bags_per_key", "lengths", "ids", "message"),
    [
        ([2, 1], [1, 1], 2, "do not add up to the number of lengths"),
        ([1], [1, 1], 2, "do not add up to the number of lengths"),
        ([3, -1], [1, 1], 2, "do not add up to the number of lengths"),
        ([2**62, 2**62, 2**62, 2**62], [], 0, "do not add up to the number of lengths"),
        ([2], [1, 2], 2, "do not add up to the number of ids"),
        ([2], [1, 0], 2, "do not add up to the number of ids"),
        ([2], [3, -1], 2, "the lengths are negative"),
        ([2], [2**63 - 1, 2**63 - 1], 2, "the lengths are negative"),
    ],
)
def test_parts_that_do_not_fit(bags_per_key: list[int], lengths: list[int], ids: int, message: str) -> None:
    keyed = Keyed(bags_per_key, np.array(lengths, np.int64), np.zeros(ids, np.int64))
    with pytest.raises(ValueError, match=message):
        keyed.bags()


def test_features_that_do_not_fit() -> None:
    keyed = Keyed([1, 1], np.ones(2, np.int64), np.array([3, BOUND], np.int32))
    with pytest.raises(ValueError, match="offsets must begin with 0"):
        keyed.bags(np.array([1, 2, 3], np.int32))
    with pytest.raises(ValueError, match="at least one entry"):
        keyed.bags(np.empty(0, np.int64))
    bags, at = keyed.bags(np.array([0, 1, 2], np.int64)), np.zeros(1, np.int64)
    for key in (-1, 2):
        with pytest.raises(ValueError, match="not so many keys"):
            one_feature(key).lookup(bags, integers(keyed.ids), core.Places(at, at))
        with pytest.raises(ValueError, match="not so many keys"):
            one_feature(key).lookup_rows(bags, integers(keyed.ids))
        with pytest.raises(ValueError, match="not so many keys"):
            bags.counts(np.array([0, key], np.int64))
    with pytest.raises(ValueError, match="another number of ids"):
        one_feature(0).lookup_rows(bags, integers(keyed.ids[:1]))
    with pytest.raises(ValueError, match="another number of ids"):
        one_feature(0).lookup(bags, integers(keyed.ids[:1]), core.Places(at, at))
    with pytest.raises(ValueError, match="differ in length"):
        one_feature(0).lookup(bags, integers(keyed.ids), core.Places(np.zeros(2, np.int64), at))
    with pytest.raises(ValueError, match="differ in length"):
        core.KeyedFeatures(keys=np.zeros(2, np.int64), tables=at, bounds=at, modes=np.zeros(1, np.uint8))
    assert one_feature(0).lookup(bags, integers(keyed.ids), core.Places(at, at))[2:] == (-1, 0, 0)
    assert one_feature(1).lookup(bags, integers(keyed.ids), core.Places(at, at))[2:] == (0, 0, BOUND)
    assert one_feature(1).lookup_rows(bags, integers(keyed.ids))[1:] == (0, 0, BOUND)


def test_padding_is_left_out() -> None:
    ids, at = np.array([3, 4, 3, 5]), np.zeros(1, np.int64)
    batch, made, *_ = one_feature(0, padding=3).lookup(
        core.KeyedBags.equal(2, 2), integers(ids), core.Places(at, at)
    )
    assert batch.inverse.tolist() == [-1, 0, -1, 1]
    assert batch.unique.tolist() == [2 << 48 | 4, 2 << 48 | 5]
    assert made.offsets.tolist() == [0, 2, 4]


@pytest.mark.parametrize(("count", "length"), [(0, 3), (3, 0), (2, 4)])
def test_equal_bags(count: int, length: int) -> None:
    bags = core.KeyedBags.equal(count, length)
    assert bags.num_bags == count
    assert bags.id_begin == [0, count * length]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("offsets", "ids", "has_end", "expected"),
    [
        ([0, 2], 3, False, [0, 2, 3]),
        ([0, 2], 2, False, [0, 2, 2]),
        ([0, 2, 3], 3, True, [0, 2, 3]),
        ([0], 0, True, [0]),
        ([], 0, False, [0]),
        ([0, 0], 0, False, [0, 0, 0]),
    ],
)
def test_bags_from_offsets(
    offsets: list[int], ids: int, has_end: bool, expected: list[int], dtype: type
) -> None:
    bags = core.KeyedBags.from_offsets(integers(np.array(offsets, dtype)), ids, has_end)
    at = np.zeros(1, np.int64)
    _, made, *_ = one_feature(0).lookup(bags, integers(np.zeros(ids, np.int64)), core.Places(at, at))
    assert made.offsets.tolist() == expected
    assert bags.num_bags == len(expected) - 1


@pytest.mark.parametrize(
    ("offsets", "ids", "has_end"),
    [
        *[([1, 2], 3, False), ([0, 4], 3, False), ([0, 2, 1], 3, False), ([0, -1], 3, False), ([], 1, False)],
        *[([], 0, True), ([0, 2], 3, True), ([0, 4], 3, True), ([0], 1, True)],
    ],
)
def test_offsets_that_do_not_fit(offsets: list[int], ids: int, has_end: bool) -> None:
    with pytest.raises(ValueError, match=r"the offsets (must|do not)"):
        core.KeyedBags.from_offsets(integers(np.array(offsets, np.int64)), ids, has_end)
    for count, length in ((-1, 2), (2, -1)):
        with pytest.raises(ValueError, match="must be at least 0"):
            core.KeyedBags.equal(count, length)
