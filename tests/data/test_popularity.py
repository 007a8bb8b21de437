from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.data import popularity as pop


def draw(n: int, ranks: int, s: float, q: float, rows: int | None = None, phase: float = 0.0, seed: int = 1):
    out = np.empty(n, dtype=np.int64)
    rows = ranks if rows is None else rows
    pop.draw_ids(out, ranks, s, q, rows, ranks, phase, pop.stream_seed(seed), pop.stream_seed(seed, 2))
    return out


def places(rows: int, seed: int = 1) -> np.ndarray:
    """id -> rank, undoing the scattering of draw()."""
    key = pop.mix(pop.stream_seed(seed))
    ids = np.array([int(pop.scatter(np.uint64(k), np.uint64(rows), key)) for k in range(rows)])
    rank = np.empty(rows, dtype=np.int64)
    rank[ids] = np.arange(rows)
    return rank


@pytest.mark.parametrize(
    ("s", "q"),
    [(0.0, 0.0), (0.6, 0.0), (0.95, 0.0), (1.0, 0.0), (1.0, 2.7), (1.14, 100.0), (2.5, 0.0), (5.0, 1.0)],
)
def test_ranks_have_the_exact_distribution(s, q):
    n, ranks = 400_000, 50
    counts = np.bincount(places(ranks)[draw(n, ranks, s, q)], minlength=ranks)
    p = (np.arange(1, ranks + 1) + q) ** -s
    expected = n * p / p.sum()
    sure = expected >= 5
    chi2 = ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[sure].sum()
    freedom = sure.sum() - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_head_of_a_huge_table():
    ranks, s, n = 10**12, 1.05, 500_000
    ids, counts = np.unique(draw(n, ranks, s, 0.0), return_counts=True)
    assert ids.min() >= 0
    assert ids.max() < ranks
    # the zeta function at 1.05, less the tail beyond 10^12
    total = 20.5808443 - ranks**-0.05 / 0.05
    top = np.sort(counts)[::-1][:5]
    expected = n * np.arange(1, 6) ** -s / total
    assert np.abs(top - expected).max() < 5 * np.sqrt(expected.max())


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=30, deadline=None)
def test_scatter_is_a_bijection(rows, seed):
    ids = [int(pop.scatter(np.uint64(k), np.uint64(rows), np.uint64(seed))) for k in range(rows)]
    assert sorted(ids) == list(range(rows))


def test_scatter_spreads_neighbours():
    rows = np.uint64(10**6)
    ids = np.array([int(pop.scatter(np.uint64(k), rows, np.uint64(3))) for k in range(2000)])
    gaps = np.diff(np.sort(ids))
    assert gaps.mean() == pytest.approx(500, rel=0.1)
    assert abs(np.corrcoef(np.arange(2000), ids)[0, 1]) < 0.1


@given(st.integers(1, 400), st.integers(1, 400), st.floats(0, 50), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_drift_is_a_permutation_at_any_time(rows, lanes, phase, seed):
    lanes = min(lanes, rows)
    ranks = np.arange(rows)
    moved = [
        pop.drifted(np.uint64(k), np.uint64(rows), np.uint64(lanes), phase, np.uint64(seed)) for k in ranks
    ]
    assert sorted(int(k) for k in moved) == list(range(rows))


def test_drift_replaces_its_share_of_the_ids_in_play():
    size, in_play, seed = np.uint64(10**6), np.uint64(10**4), np.uint64(5)

    def ids(phase: float) -> np.ndarray:
        return np.array([int(pop.drifted(np.uint64(k), size, in_play, phase, seed)) for k in range(10**4)])

    start, next_batch, much_later = ids(0.0), ids(0.02), ids(3.0)
    assert (start != next_batch).mean() == pytest.approx(0.02, abs=0.005)
    assert not set(start) & set(much_later)


@pytest.mark.parametrize("mean", [1.0, 1.3, 8.3, 100.0])
def test_bag_sizes(mean):
    lengths = np.empty(200_000, dtype=np.int64)
    pop.draw_lengths(lengths, mean, pop.stream_seed(4))
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert lengths.min() == 1
    assert lengths.max() <= 2 * mean


def test_ids_of_a_trillion_rows_are_fast():
    draw(10, 10**12, 0.95, 0.0)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        draw(1_000_000, 10**12, 0.95, 0.0)
        best = max(best, 1e6 / (time.perf_counter() - start))
    assert best > 2e6  # 10-20 M/s on an idle core; the machine may be busy
