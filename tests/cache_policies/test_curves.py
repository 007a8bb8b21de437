"""Curves: reuse distances against simulation, samples against the whole."""

from __future__ import annotations

import numpy as np
import pytest

from cache_policies import (
    PolicyError,
    miss_curves,
    prepare,
    prepare_flat,
    reuse,
    simulate,
    steady_curve,
    window_for,
)
from cache_policies.curves import auto_rate
from cache_policies.prepared import first_batches, select, split
from cache_policies.reuse import lru_curve, sample, sampled
from tests.cache_policies.libcachesim_traces import drifting, looping, skewed, uniform

SIZES = [1, 2, 3, 10, 50, 400, 2000, 5000, 10_000]


@pytest.mark.parametrize("keys", [skewed, drifting, looping])
def test_reuse_distances_give_exact_lru_at_every_size(keys):
    trace = prepare_flat(keys(), 1)
    curve = lru_curve(trace)
    assert curve.misses(SIZES).tolist() == [simulate(trace, "lru", size).misses for size in SIZES]
    assert curve.first == trace.footprint
    np.testing.assert_array_equal(curve.miss_ratio(SIZES), curve.unique_miss_ratio(SIZES))


def test_renumbered_positions_keep_the_distances():
    keys = np.tile(np.arange(700), 30)  # many more uses than positions
    assert lru_curve(prepare_flat(keys, 1)).misses([699, 700]).tolist() == [21_000, 700]


def test_batches_differ_from_the_live_order_by_little():
    trace = prepare_flat(skewed(), 256)
    curve = lru_curve(trace)
    sizes = [400, 1000, 3000]
    live = [simulate(trace, "lru", size) for size in sizes]
    np.testing.assert_allclose(curve.unique_miss_ratio(sizes), [s.unique_miss_ratio for s in live], atol=0.01)
    np.testing.assert_allclose(curve.miss_ratio(sizes), [s.miss_ratio for s in live], atol=0.01)
    assert curve.misses([trace.footprint])[0] == trace.footprint
    assert curve.capacity_miss_ratio([trace.footprint])[0] == 0


def test_caches_smaller_than_a_batch_are_simulated():
    trace = prepare_flat(skewed(), 8192)
    sizes = [1, 20, 300, trace.largest_batch - 1]
    live = [simulate(trace, "lru", size) for size in sizes]
    curve = lru_curve(trace)
    assert curve.misses(sizes).tolist() == [s.misses for s in live]
    assert curve.access_misses(sizes).tolist() == [s.access_misses for s in live]
    sampled_curve = lru_curve(trace, 0.1)
    assert sampled_curve.misses(sizes).tolist() == curve.misses(sizes).tolist()
    assert sampled_curve.access_misses(sizes).tolist() == curve.access_misses(sizes).tolist()


def test_where_simulating_all_takes_long_caches_smaller_than_a_batch_are_estimated(monkeypatch):
    """Also where a few rows have many of the uses, some in one batch only."""
    rows = np.concatenate([skewed(), np.repeat(np.arange(10**6, 10**6 + 40), 500)])
    trace = prepare_flat(rows[np.argsort(np.arange(rows.size) * 7919 % rows.size, kind="stable")], 8192)
    sizes = [300, 1500, trace.largest_batch - 1]
    live = [simulate(trace, "lru", size) for size in sizes]
    monkeypatch.setattr(reuse, "_QUICK_USES", 0)
    curve = lru_curve(trace, 0.3)
    assert (curve.misses(sizes) <= trace.uniques).all()
    np.testing.assert_allclose(curve.unique_miss_ratio(sizes), [s.unique_miss_ratio for s in live], atol=0.03)
    np.testing.assert_allclose(curve.miss_ratio(sizes), [s.miss_ratio for s in live], atol=0.05)


def test_first_uses_of_a_sampled_curve_are_those_of_the_whole_trace():
    """A few rows, each in one batch only, have most of the accesses."""
    rows = np.concatenate([np.repeat(np.arange(200), 1000), np.arange(200, 5200)])
    trace = prepare_flat(rows, 5000)
    everything = trace.footprint
    assert lru_curve(trace, 0.1).access_misses([everything])[0] == pytest.approx(trace.accesses)


@pytest.fixture(scope="module")
def wide():
    """400 000 uses of 200 000 rows in batches."""
    u = uniform(1_200_000)
    return prepare_flat((200_000 * u * u * u * u).astype(np.int64), 4096)


def test_samples_are_close_to_the_whole(wide):
    sizes = (np.array([0.01, 0.03, 0.1, 0.3]) * wide.footprint).astype(int)
    part = lru_curve(wide, 0.1)
    assert part.counts.sum() + part.first < 0.2 * wide.uniques
    error = part.unique_miss_ratio(sizes) - lru_curve(wide).unique_miss_ratio(sizes)
    assert np.abs(error).mean() < 0.01


@pytest.mark.parametrize("policy", ["lru", "lookahead", "s3_fifo", "belady"])
def test_small_simulations_are_close_to_the_whole(wide, policy):
    sizes = [wide.footprint // 30, wide.footprint // 10]
    options = {"window": 16, "depth": 1}
    exact = miss_curves(wide, [policy], sizes, rate=1, **options)
    small = miss_curves(wide, [policy], sizes, rate=0.1, **options)
    for whole, part in zip(exact, small, strict=True):
        assert part.unique_miss_ratio == pytest.approx(whole.unique_miss_ratio, abs=0.02)
        assert part.size_rows == whole.size_rows


def test_exact_points_are_simulations():
    batches = [np.arange(i, i + 50) for i in range(40)]
    steps = []
    points = miss_curves(
        batches, ["lru", "fifo"], [10, 60], rate=1, progress=lambda *step: steps.append(step), threads=1
    )
    assert [(p.policy, p.size_rows) for p in points] == [("lru", 10), ("lru", 60), ("fifo", 10), ("fifo", 60)]
    for point in points:
        result = simulate(batches, point.policy, point.size_rows)
        assert (point.misses, point.overflowed) == (result.misses, result.overflowed)
        assert point.capacity_miss_ratio == result.capacity_miss_ratio
    assert steps[-1] == (4, 4)


def test_selecting_rows_keeps_their_uses_and_batches():
    batches = [np.array([5, 6, 5, 7]), np.array([7]), np.array([6, 5])]
    trace = prepare(batches)
    part = select(trace, np.isin(trace.keys, [5, 7]))
    again = prepare([batch[np.isin(batch, [5, 7])] for batch in batches])
    for one, other in zip(part.__dict__.values(), again.__dict__.values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_groups_of_rows_are_selections():
    trace = prepare_flat((uniform(3000) * 40).astype(np.int64), 50)
    group = trace.keys.astype(np.int64) % 4
    parts = list(split(trace, group, 5))
    for g, part in enumerate(parts):
        alone = select(trace, group == g)
        for one, other in zip(part.__dict__.values(), alone.__dict__.values(), strict=True):
            np.testing.assert_array_equal(one, other)
    assert parts[4].footprint == 0


def test_samples_are_spatial_and_nested():
    keys = np.arange(100_000, dtype=np.uint64)
    few, many = sampled(keys, 0.01), sampled(keys, 0.1)
    assert 800 < few.sum() < 1200
    assert not (few & ~many).any()
    assert sampled(keys, 1).all()
    trace = prepare_flat(keys, 64)
    assert sample(trace, 1) is trace


def test_long_traces_are_sampled(wide):
    assert auto_rate(wide, 1) == 1
    assert auto_rate(wide, 100_000) == pytest.approx(20_000 / wide.footprint)


@pytest.mark.parametrize("arguments", [(["lru"], []), ([], [5]), (["lru"], [0]), (["mru"], [5])])
def test_bad_requests(arguments):
    with pytest.raises(PolicyError):
        miss_curves([np.arange(5)], *arguments)


@pytest.mark.parametrize("rate", [0, -0.1, 1.5])
def test_bad_rates(rate):
    with pytest.raises(PolicyError, match="rate"):
        lru_curve(prepare([np.arange(5)]), rate)


def test_the_window_covers_five_times_the_cache():
    trace = prepare([np.arange(10 * i, 10 * i + 15) for i in range(40)])  # 15, 25, 35 ... distinct rows
    assert [window_for(trace, slots) for slots in (1, 3, 5, 12)] == [0, 0, 1, 5]
    assert window_for(trace, 10**6) == 39
    assert window_for(trace, 10**6, max_window=20) == 20
    assert window_for(prepare_flat(np.arange(50), 1), 5) == 24
    assert window_for(prepare([]), 5) == 0
    (point,) = miss_curves(trace, ["lookahead"], [8], window="auto", rate=1)
    assert point.window == 3


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_a_steady_curve_has_the_misses_of_the_second_half(policy):
    batches = np.split(skewed()[:50_000], 100)
    trace = prepare(batches)
    found = steady_curve(trace, policy, depth=2, window=4)
    assert found["sizes_rows"][0] == 3 * trace.largest_batch
    assert found["sizes_rows"][-1] == trace.footprint
    new = trace.footprint - prepare(batches[:50]).footprint
    uniques = sum(np.unique(batch).size for batch in batches[50:])
    for size, misses, capacity in zip(*found.values(), strict=True):
        runs = [simulate(batches[:count], policy, size, depth=2, window=4) for count in (50, 100)]
        counted = runs[1].misses - runs[0].misses
        assert misses == pytest.approx(counted / uniques, abs=0.003), "the first half knows what follows"
        assert capacity == pytest.approx(misses - new / uniques)
    assert found["capacity_miss_ratio"][-1] == 0


@pytest.mark.parametrize("keys", [[], [[5]], [[5], []], [[5], [5, 7]]])
def test_steady_curves_of_few_batches(keys):
    found = steady_curve(prepare(np.array(batch, np.int64) for batch in keys), "lookahead")
    assert found["sizes_rows"][0] == 1
    assert found["capacity_miss_ratio"][-1] == 0
    assert len(found["unique_miss_ratio"]) == len(found["sizes_rows"])


def test_the_first_batches_of_a_trace_are_a_trace():
    single = prepare_flat(skewed()[:3000], 1)
    in_batches = prepare_flat(skewed()[:3000], 100)
    for trace, batches in ((single, 1500), (in_batches, 15)):
        begin = first_batches(trace, batches)
        assert begin.batches == batches
        assert begin.uniques < trace.uniques
        assert begin.footprint == begin.rows.max() + 1 == begin.keys.size
        np.testing.assert_array_equal(begin.next_batch, trace.next_batch[: begin.uniques])
