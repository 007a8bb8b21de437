"""Curves per table, and what planners are told of them."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch

from cache_policies import prepare, simulate
from tierstore.trace import open_trace, planner_input, table_curves


@pytest.fixture(scope="module")
def curves():
    trace = open_trace("synthetic:zipf:1.0", batch_size=256, batches=40, tables=2, rows=3000)
    return trace, table_curves(trace, prepare(trace.key_batches()))


def test_tables_are_alone(curves):
    trace, (first, second) = curves
    alone = list(trace.key_batches(tables=[1]))
    assert second.footprint == np.unique(np.concatenate(alone)).size
    assert second.accesses == 256
    assert second.uniques == pytest.approx(np.mean([np.unique(batch).size for batch in alone]))
    live = simulate(alone, "lru", 1500).unique_miss_ratio
    assert second.curve.unique_miss_ratio([1500])[0] == pytest.approx(live, abs=0.01)
    assert first.name == "t0"
    assert first.num_embeddings == 3000


def test_histograms_add_up_to_all_reuse(curves):
    _, (table, _) = curves
    histogram = table.reuse_histogram(50)
    assert histogram.sum() == table.curve.misses([0])[0] - table.footprint
    assert 0 < table.cacheability() < 1


def test_planner_input_is_plain_json(curves):
    trace, tables = curves
    document = json.loads(json.dumps(planner_input(trace, tables, bins=20)))
    assert document["format"] == "tierstore.table_curves"
    assert list(document["tables"]) == ["t0", "t1"]
    assert len(document["tables"]["t0"]["mrc_hist_counts"]) == 20


if importlib.util.find_spec("torchrec"):

    def test_torchrec_reads_the_miss_rates_back(curves):
        from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats

        _, (table, _) = curves
        known = table.offload_stats()
        stats = EmbeddingOffloadStats(**known | {"mrc_hist_counts": torch.tensor(known["mrc_hist_counts"])})
        reuse = table.curve.misses([0])[0] - table.footprint
        for share in (0.05, 0.2, 0.5):
            missed = table.curve.misses([share * table.num_embeddings])[0] - table.footprint
            assert stats.expected_miss_rate(share) == pytest.approx(missed / reuse, abs=0.03)
        assert stats.expected_lookups == round(table.uniques)
