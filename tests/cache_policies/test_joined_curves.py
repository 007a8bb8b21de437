"""Curves of a table's shards, joined: the curve of the whole table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cache_policies import lru_curve, prepare
from cache_policies.joined_curves import joined_curve
from cache_policies.table_curve import TableCurve

ROWS, BATCHES, PER_BATCH = 200_000, 200, 2000
SHUFFLED = np.random.default_rng(1).permutation(ROWS)


def batches() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.minimum(rng.pareto(0.6, PER_BATCH).astype(np.uint64), ROWS - 1) for _ in range(BATCHES)]


def curve_of(parts: list[np.ndarray], rate: float = 1.0) -> TableCurve:
    trace = prepare(iter(parts))
    per_batch = trace.uniques / BATCHES, trace.accesses / BATCHES
    return TableCurve("part", ROWS, trace.footprint, *per_batch, lru_curve(trace, rate))


def cut(into: Callable[[np.ndarray], np.ndarray], count: int, **more: Any) -> list[TableCurve]:
    whole = batches()
    return [curve_of([one[into(one) == shard] for one in whole], **more) for shard in range(count)]


@pytest.mark.parametrize(
    ("shards", "limit"),
    [
        (lambda: cut(lambda ids: SHUFFLED[ids.astype(np.int64)] % 3, 3), 0.01),
        (lambda: cut(lambda ids: (ids >= 300).astype(np.int64), 2), 0.03),
        (lambda: cut(lambda ids: SHUFFLED[ids.astype(np.int64)] % 2, 2, rate=0.3), 0.06),
    ],
    ids=["alike", "hot and cold", "sampled"],
)
def test_the_joined_curve_is_that_of_the_whole_table(
    shards: Callable[[], list[TableCurve]], limit: float
) -> None:
    whole, joined = curve_of(batches()), joined_curve("t", ROWS, shards())
    assert (joined.name, joined.num_embeddings) == ("t", ROWS)
    assert joined.footprint == whole.footprint
    assert joined.uniques == pytest.approx(whole.uniques)
    assert joined.accesses == pytest.approx(whole.accesses)
    sizes = np.unique(np.geomspace(400, whole.footprint, 40).astype(np.int64))  # of two batches
    for kind in ("unique_miss_ratio", "capacity_miss_ratio", "miss_ratio"):
        expected = getattr(whole.curve, kind)(sizes)
        assert getattr(joined.curve, kind)(sizes) == pytest.approx(expected, abs=limit), kind
    assert expected[0] > 2 * expected[-1]


def test_shards_that_nobody_uses_change_nothing() -> None:
    whole = curve_of(batches()[:3])
    unused = TableCurve("part", ROWS, 0, 0.0, 0.0, whole.curve)
    joined = joined_curve("t", ROWS, [unused, whole, unused])
    assert joined.points() == whole.points()
    assert joined_curve("t", ROWS, [unused]).accesses == 0
