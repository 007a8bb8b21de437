"""Miss-ratio curves: against direct sums, against the simulator, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import cache_policies
from cache_policies.simulator import simulate
from tierstore.errors import ConfigError
from tierstore.planner import MissCurve, Popularity
from tierstore.planner.curves import lower_hull


@pytest.mark.parametrize(
    ("rows", "s", "q"),
    [(50, 1.0, 0.0), (5_000, 0.8, 10.0), (200_000, 1.2, 100.0), (5_000, 10.0, 1e3), (50, 1.0, 1e30)],
)
def test_popularity_equals_the_sum_over_all_rows(rows, s, q):
    accesses = 20_000
    weights = (np.arange(1, rows + 1) + q) ** -s
    touched = 1 - np.exp(-accesses * weights / weights.sum())
    popularity = Popularity(s, q)
    unique, curve = popularity.demand(rows, accesses)
    assert unique == pytest.approx(touched.sum(), rel=0.01)
    for size in (rows // 50, rows // 10, rows // 2):
        expected = touched[size:].sum() / touched.sum()
        assert curve.at(size) == pytest.approx(expected, rel=0.03, abs=1e-3)
    assert curve.at(0) == 1
    assert curve.at(rows) == 0


def test_a_table_of_a_trillion_rows_is_no_trouble():
    unique, curve = Popularity(1.05, 100).demand(10**12, 1e6)
    assert 1e5 < unique < 1e6
    assert (np.diff(curve.misses) <= 0).all()
    slopes = np.diff(curve.misses) / np.diff(curve.rows)
    assert (np.diff(slopes) >= -1e-18).all()


def test_predicted_misses_are_those_of_the_most_popular_rows_within_5_percent():
    rows, batch, batches, capacity = 50_000, 4_000, 60, 5_000
    weights = (np.arange(1, rows + 1) + 20.0) ** -1.0
    random = np.random.default_rng(0)
    trace = [random.choice(rows, batch, p=weights / weights.sum()) for _ in range(batches)]
    missed = sum(int((np.unique(ids) >= capacity).sum()) for ids in trace)
    unique, curve = Popularity(1.0, 20.0).demand(rows, batch)
    predicted = unique * curve.at(capacity)
    assert predicted * batches == pytest.approx(missed, rel=0.05)


def test_a_recorded_curve_predicts_sizes_between_the_recorded_ones_within_5_percent():
    random = np.random.default_rng(0)
    trace = [random.zipf(1.2, 2_000) % 25_000 for _ in range(20)]
    sizes = [500, 1_000, 2_000, 3_000, 5_000]
    runs = [simulate(trace, cache_policies.get("lru"), size) for size in sizes]
    curve = MissCurve.through(sizes, [run.unique_miss_ratio for run in runs], 25_000)
    for size in (1_500, 2_500, 4_000):
        measured = simulate(trace, cache_policies.get("lru"), size).unique_miss_ratio
        assert curve.at(size) == pytest.approx(measured, rel=0.05)


def test_the_hull_is_below_all_points_and_keeps_only_corners():
    x = np.array([0.0, 1, 2, 3, 4, 5])
    y = np.array([1.0, 0.9, 0.3, 0.3, 0.1, 0.1])
    hull_x, hull_y = lower_hull(x, y)
    assert hull_x.tolist() == [0, 2, 4, 5]
    assert (np.interp(x, hull_x, hull_y) <= y + 1e-12).all()


@pytest.mark.parametrize(
    ("rows", "misses", "message"),
    [
        ([1, 2], [0.5], "as many"),
        ([], [], "one at least"),
        ([-1.0], [0.5], "sizes of 0 rows or more"),
        ([float("nan")], [0.5], "sizes of 0 rows or more"),
        ([1.0], [1.5], "from 0 to 1"),
    ],
)
def test_what_is_no_curve_is_refused(rows, misses, message):
    with pytest.raises(ConfigError, match=message):
        MissCurve.through(rows, misses, 100)
