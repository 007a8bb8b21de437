"""Curves that are estimated while batches pass by, against exact ones."""

from __future__ import annotations

import numpy as np
import pytest

from cache_policies import PreparedTrace, live, lru_curve, prepare
from cache_policies.live import LiveCurves, starts_of
from cache_policies.prepared import split
from tierstore.trace import open_trace


def observe(trace: PreparedTrace, curves: LiveCurves) -> None:
    for i in range(trace.batches):
        part = slice(trace.offsets[i], trace.offsets[i + 1])
        curves.observe(trace.keys[trace.rows[part]], starts_of(trace.uses[part]))


def test_a_table_that_fits_the_sample_is_exact():
    rng = np.random.default_rng(0)
    batches = [(3 << 48) + (4000 * rng.random(300) ** 3).astype(np.int64) for _ in range(200)]
    trace, curves = prepare(batches), LiveCurves([3])
    observe(trace, curves)
    sizes = [300, 400, 500, 1000, 2000]  # smaller ones than a batch are simulated by lru_curve
    exact = lru_curve(trace)
    assert curves.rate(3) == 1
    assert curves.footprint(3) == trace.footprint
    assert curves.curve(3).misses(sizes).tolist() == exact.misses(sizes).tolist()
    assert curves.curve(3).access_misses(sizes).tolist() == exact.access_misses(sizes).tolist()
    assert curves.per_batch(3) == (trace.uniques / 200, 300)


@pytest.mark.parametrize("tables", [1, 6])
def test_a_sample_of_each_table_is_close(tables):
    source = open_trace("synthetic:zipf:1.0", batch_size=2048, batches=60, tables=tables, rows=200_000)
    trace, curves = prepare(source.key_batches()), LiveCurves(range(tables))
    observe(trace, curves)
    for table, part in enumerate(split(trace, (trace.keys >> np.uint64(48)).astype(np.int64), tables)):
        sizes = np.array([0.02, 0.05, 0.1, 0.2, 0.5]) * part.footprint
        errors = curves.curve(table).unique_miss_ratio(sizes) - lru_curve(part).unique_miss_ratio(sizes)
        assert curves.rate(table) < 1
        assert np.abs(errors).mean() < 0.03
        assert curves.footprint(table) == pytest.approx(part.footprint, rel=0.1)


def test_tables_do_not_depend_on_each_other():
    rng = np.random.default_rng(2)
    together, alone = LiveCurves([5, 2, 9]), [LiveCurves([t]) for t in (5, 2, 9)]
    numbers = np.array([5, 2, 9], np.uint64)
    for _ in range(60):
        ids = rng.permutation(np.unique((10**6 * rng.random(9000) ** 4).astype(np.uint64)))
        which = rng.integers(0, 3, ids.size)
        keys, uses = numbers[which] << np.uint64(48) | ids, rng.integers(1, 9, ids.size)
        together.observe(keys, starts_of(uses))
        for i, curves in enumerate(alone):
            curves.observe(keys[which == i], starts_of(uses[which == i]))
    for table, curves in zip((5, 2, 9), alone, strict=True):
        assert curves.rate(table) == together.rate(table) < 1
        sizes = np.geomspace(10, curves.footprint(table), 20).astype(int)
        assert (
            curves.curve(table).miss_ratio(sizes).tolist() == together.curve(table).miss_ratio(sizes).tolist()
        )


@pytest.mark.parametrize(
    "runs",
    [[n] for n in (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129)]
    + [[64, 64], [63, 1, 64], [1] * 70, [65, 63, 8], [128, 3]],
)
def test_keys_are_chosen_by_their_hashes_and_tables(runs):
    rng = np.random.default_rng(sum(runs))
    numbers = np.repeat(np.arange(len(runs)) % 3, runs)
    keys = rng.permutation(10**6)[: sum(runs)].astype(np.uint64) | numbers.astype(np.uint64) << np.uint64(48)
    uses, threshold = rng.integers(1, 9, keys.size), np.array([2**64 // n - 1 for n in (1, 4, 90)], np.uint64)
    chosen, cuts = np.empty(keys.size, np.int32), np.empty((keys.size + 1, 2), np.int32)
    totals, number = np.zeros((3, 2), np.int64), np.arange(3, dtype=np.int32)
    count = live._choose(keys, starts_of(uses), number, totals, threshold, chosen, cuts)
    sampled = [i for i, key in enumerate(keys) if live._hash(key) <= threshold[numbers[i]]]
    assert chosen[: cuts[count, 1]].tolist() == sampled
    begins = np.cumsum([0, *runs])[:-1][np.array(runs) > 0]
    assert cuts[:count, 0].tolist() == numbers[begins].tolist()
    assert cuts[:count, 1].tolist() == np.searchsorted(sampled, begins).tolist()
    for table in range(3):
        assert totals[table].tolist() == [(numbers == table).sum(), uses[numbers == table].sum()]


def test_one_call_takes_the_batches_of_many():
    rng = np.random.default_rng(4)
    keys = [rng.permutation(10**6)[:count].astype(np.uint64) for count in (3000, 0, 1, 5000)]
    starts = [starts_of(rng.integers(1, 9, one.size)) for one in keys]
    one_by_one, together = LiveCurves([0]), LiveCurves([0])
    for one, begins in zip(keys, starts, strict=True):
        one_by_one.observe(one, begins.astype(np.int64))
    together.observe_at(
        np.array([[k.ctypes.data, k.size, s.ctypes.data] for k, s in zip(keys, starts, strict=True)])
    )
    assert one_by_one.rate(0) == together.rate(0) < 1
    assert one_by_one.per_batch(0) == together.per_batch(0)
    for ours, expected in zip(vars(together).values(), vars(one_by_one).values(), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_rows_need_not_lie_side_by_side():
    keys = np.arange(200, dtype=np.uint64)
    apart, beside = LiveCurves([0]), LiveCurves([0])
    for curves, given in ((apart, keys[::2]), (beside, keys[::2].copy())):
        for _ in range(2):
            curves.observe(given, starts_of(np.ones(given.size)))
    assert apart.curve(0).misses([100]).tolist() == beside.curve(0).misses([100]).tolist()
    assert apart.footprint(0) == 100


def test_memory_does_not_grow():
    curves = LiveCurves(range(26))
    before = curves.nbytes
    rng = np.random.default_rng(1)
    for _ in range(30):
        keys = np.unique(
            rng.integers(0, 10**9, 20_000).astype(np.uint64)
            | (rng.integers(0, 26, 20_000).astype(np.uint64) << np.uint64(48))
        )
        curves.observe(keys, starts_of(np.ones(keys.size)))
    assert curves.nbytes == before < 3 << 20
    assert curves.footprint(7) == pytest.approx(30 * 20_000 / 26, rel=0.3)
