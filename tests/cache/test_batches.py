"""Ids of a lookup, deduplicated: unique keys in order of first occurrence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tierstore import _core
from tierstore.keys import make_keys

Segment = tuple[np.ndarray, int, int, int]


def made(segments: list[Segment]) -> tuple[_core.Batch, list[int]]:
    batch, *wrong = _core.make_batch(
        [
            (ids.ctypes.data, len(ids), ids.dtype == np.int32, table, bound, padding)
            for ids, table, bound, padding in segments
        ]
    )
    return batch, wrong


def expected(segments: list[Segment]) -> tuple[list[int], list[int]]:
    unique: dict[int, int] = {}
    inverse = []
    for ids, table, _, padding in segments:
        for id_, key in zip(ids.tolist(), make_keys(table, ids.astype(np.int64)).tolist(), strict=True):
            inverse.append(-1 if id_ == padding else unique.setdefault(key, len(unique)))
    return list(unique), inverse


def first_wrong(segments: list[Segment]) -> list[int]:
    for number, (ids, _, bound, _) in enumerate(segments):
        for position, id_ in enumerate(ids.tolist()):
            if not 0 <= id_ < bound:
                return [number, position, id_]
    return [-1, 0, 0]


@pytest.mark.parametrize("seed", range(6))
def test_random_lookups(seed: int) -> None:
    """Small tables and large ones, in more than one segment, in lookups of very different sizes."""
    random = np.random.default_rng(seed)
    bounds = random.choice([1, 3, 100, 8191, 8192, 8193, 1 << 20, 1 << 47], 100)
    for _ in range(150):
        segments = []
        most = int(random.choice([3, 50, 3000]))
        for _ in range(int(random.integers(0, 6))):
            table = int(random.integers(100))
            bound = int(bounds[table])
            ids = random.integers(0, bound, int(random.integers(0, most)))
            if random.random() < 0.5:
                ids //= 7
            if random.random() < 0.05 and len(ids):
                ids[random.integers(len(ids))] = random.choice([-1, bound, -(2**31), 2**31 - 1])
            ids = ids.astype(np.int32 if bound < 2**31 and random.random() < 0.5 else np.int64)
            segments.append((ids, table, bound, int(random.choice([-1, 0, 2]))))
        batch, wrong = made(segments)
        assert wrong == first_wrong(segments)
        if wrong[0] < 0:
            unique, inverse = expected(segments)
            assert batch.unique.tolist() == unique
            assert batch.inverse.tolist() == inverse


def test_more_small_tables_than_have_arrays() -> None:
    random = np.random.default_rng(0)
    for _ in range(3):
        segments = [
            (random.integers(0, 8000, 30), table, 8000, -1)
            for table in random.permutation(6000)[:400].tolist()
            for _ in range(2)
        ]
        batch, _ = made(segments)
        unique, inverse = expected(segments)
        assert batch.unique.tolist() == unique
        assert batch.inverse.tolist() == inverse


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = _core.num_threads()
    yield _core.set_num_threads
    _core.set_num_threads(before)


def large_lookup(seed: int) -> list[Segment]:
    """Some tables in several segments, which share ids; segments without ids, and with padding."""
    random = np.random.default_rng(seed)
    segments = []
    for number in range(12):
        table = int(random.integers(5)) if seed % 2 else number
        bound = [3, 8192, 50_000, 1 << 20, 1 << 40][table % 5]
        ids = random.integers(0, min(bound, 40_000), int(random.choice([0, 1, 5000, 20_000])))
        segments.append(
            (ids.astype(np.int32 if number % 3 == 0 and bound < 2**31 else np.int64), table, bound, 2)
        )
    ids = random.integers(0, 40_000, 70_000)
    return [*segments, (ids, 3, 1 << 20, -1)]


@pytest.mark.parametrize("seed", range(8))
def test_large_lookups_are_the_same_for_any_number_of_threads(
    seed: int, threads: Callable[[int], None]
) -> None:
    segments = large_lookup(seed)
    unique, inverse = expected(segments)
    for count in (1, 2, 3, 16):
        threads(count)
        batch, wrong = made(segments)
        assert wrong == [-1, 0, 0]
        assert batch.unique.tolist() == unique
        assert batch.inverse.tolist() == inverse
        rows = np.array(inverse)
        used = np.flatnonzero(rows >= 0)
        for start, positions in (_core.build_csr(batch.inverse, len(unique)), batch.transposed()):
            assert positions.tolist() == used[np.argsort(rows[used], kind="stable")].tolist()
            assert np.diff(start).tolist() == np.bincount(rows[used], minlength=len(unique)).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_the_first_wrong_id_of_a_large_lookup_is_found(seed: int, threads: Callable[[int], None]) -> None:
    random = np.random.default_rng(seed)
    segments = large_lookup(seed)
    full = [number for number, segment in enumerate(segments) if len(segment[0])]
    for number in random.choice(full, 3, replace=False):
        ids = segments[number][0].copy()
        ids[random.integers(len(ids), size=2)] = -7
        segments[number] = (ids, *segments[number][1:])
    for count in (1, 2, 16):
        threads(count)
        assert made(segments)[1] == first_wrong(segments)


LEAST_OF_PART = 1 << 12


@pytest.mark.parametrize("past", [-1, 0, 1])
@pytest.mark.parametrize(("count", "parts_from"), [(1, 1 << 16), (2, 1 << 14), (16, 1 << 14)])
def test_lookups_around_the_sizes_of_parts(
    count: int, parts_from: int, past: int, threads: Callable[[int], None]
) -> None:
    """A lookup has parts from so many ids on, of 4,096 ids at least; some ids are padding."""
    random = np.random.default_rng(past + 1)
    sizes = [parts_from - LEAST_OF_PART - 9, 9, LEAST_OF_PART + past]
    for distinct in (1, 7, 20_000, 1 << 40):
        segments = [
            (random.integers(0, distinct, size), table, 1 << 40, 3)
            for table, size in zip((4, 2, 9), sizes, strict=True)
        ]
        unique, inverse = expected(segments)
        threads(count)
        batch, _ = made(segments)
        assert batch.unique.tolist() == unique
        assert batch.inverse.tolist() == inverse
        start, positions = batch.transposed()
        again = _core.build_csr(np.array(inverse, np.int32), len(unique))
        assert start.tolist() == again[0].tolist()
        assert positions.tolist() == again[1].tolist()


@pytest.mark.parametrize("past", [-1, 0, 1])
@pytest.mark.parametrize("ids", [1000, 70_000])
def test_tables_around_the_sizes_that_have_an_entry_per_id(ids: int, past: int) -> None:
    """Two rows per id, and all such tables of a part together; the last id of each table is asked for."""
    random = np.random.default_rng(ids)
    bound = max(1 << 13, 2 * ids) + past
    for tables in (1, 2, 70):
        segments = [
            (np.append(random.integers(0, bound, ids - 1), bound - 1), table, bound, -1)
            for table in range(tables)
            for _ in range(1 + (table == 1))
        ][: (1 << 20) // ids]
        unique, inverse = expected(segments)
        for _ in range(2):
            batch, _ = made(segments)
            assert batch.unique.tolist() == unique
            assert batch.inverse.tolist() == inverse


@pytest.mark.parametrize("size", [64, 96, 97, 191, 192, 193, 1000, 100_000])
def test_lookups_without_repeats(size: int) -> None:
    """The table of the keys grows while they are added."""
    ids = np.random.default_rng(size).choice(1 << 40, size, replace=False)
    for repeats in (1, 2, 3):
        segments = [(np.tile(ids, repeats), 5, 1 << 40, -1)]
        unique, inverse = expected(segments)
        batch, _ = made(segments)
        assert batch.unique.tolist() == unique
        assert batch.inverse.tolist() == inverse


@pytest.mark.parametrize("share", [0.01, 0.4, 0.7, 1.0])
def test_lookups_after_another_share_of_different_ids(share: float) -> None:
    """The table of the keys begins with places for the share that the last lookup had."""
    random = np.random.default_rng(0)
    for size, own in ((5000, share), (80, 1.0), (90_000, 0.02), (40_000, share), (0, 1.0), (40_000, 1.0)):
        ids = random.choice(1 << 40, size, replace=False) // 7
        segments = [(ids[random.integers(0, max(1, int(size * own)), size)], 5, 1 << 40, -1)]
        unique, inverse = expected(segments)
        batch, _ = made(segments)
        assert batch.unique.tolist() == unique
        assert batch.inverse.tolist() == inverse
