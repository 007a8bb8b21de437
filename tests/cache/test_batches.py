"""Ids of a lookup, deduplicated: unique keys in order of first occurrence."""

from __future__ import annotations

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
