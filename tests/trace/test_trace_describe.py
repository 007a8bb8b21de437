"""Descriptions: counted by hand on a small trace, and recovering the parameters of generated ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tierstore.errors import InputError
from tierstore.trace import describe, open_trace
from tierstore.trace.description import REUSE_EDGES, fit_zipf


def write(path: Path, ids) -> Path:
    np.save(path, np.asarray(ids))
    return path


def test_a_small_trace_by_hand(tmp_path):
    path = write(tmp_path / "a.npy", [1, 1, 1, 2, 3, 3, 4, 1])
    seen = []
    d = describe(open_trace(path, batch_size=4), seen.append)
    assert (d.batches, d.accesses, d.footprint, d.tables) == (2, 8, 4, 1)
    assert d.unique_ratio == pytest.approx((2 / 4 + 3 / 4) / 2)
    assert d.rows_by_reuse[:3] == pytest.approx([(1 / 2 + 2 / 3) / 2, 1 / 6, 1 / 4])
    assert d.accesses_by_reuse[:3] == pytest.approx([(1 / 4 + 2 / 4) / 2, 1 / 4, 3 / 8])
    assert len(d.rows_by_reuse) == len(REUSE_EDGES) + 1
    assert d.used_once == 0.5
    assert d.coverage["0.1%"] == 0.5
    assert d.zipf is None
    assert d.drift is None
    assert seen == [1, 2]
    assert d.per_table["a"]["unique_ratio"] == pytest.approx(5 / 8)
    json.dumps(d.to_json())


@pytest.mark.parametrize(("s", "q"), [(0.8, 0.0), (1.1, 30.0)])
def test_zipf_parameters_are_recovered(s, q):
    weights = (np.arange(1, 20_001) + q) ** -s
    counts = np.sort(np.random.default_rng(0).multinomial(2_000_000, weights / weights.sum()))[::-1]
    fit = fit_zipf(counts)
    assert fit.s == pytest.approx(s, abs=0.05)
    assert fit.q == pytest.approx(q, abs=0.3 * q + 0.3)


def test_drift_is_seen_where_there_is_some():
    options = {"batch_size": 2048, "batches": 60, "tables": 1, "rows": 20_000}
    still = describe(open_trace("synthetic:zipf:1.0", **options)).drift
    moving = describe(open_trace("synthetic:zipf:1.0", drift=0.01, **options)).drift
    assert still < 0.05 < 0.2 < moving


def test_empty_batches_and_empty_traces(tmp_path):
    from tierstore.trace import TraceRecorder

    with TraceRecorder(tmp_path / "t.npz", {"a": 1}) as recorder:
        recorder.record({})
    with pytest.raises(InputError, match="no accesses"):
        describe(open_trace(tmp_path / "t.npz"))
