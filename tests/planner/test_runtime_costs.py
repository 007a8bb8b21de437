"""Costs per row from small tables."""

from __future__ import annotations

import json

import pytest

from bench import _runtime_costs
from bench._neighbours import LOUD
from bench._runtime_costs import Sample
from tierstore.planner import Topology
from tierstore.planner.topology import ROW_COSTS


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(_runtime_costs, "_ROWS", 1500)
    monkeypatch.setattr(_runtime_costs, "_WARM", 2)
    monkeypatch.setattr(_runtime_costs, "_TRIES", 1)  # a test is not alone
    monkeypatch.setattr(_runtime_costs, "_SHORT", 1)
    plain, skewed = (0.0, 10.0, 104), (1.2, 10.0, 104)
    kinds = {"memory": [plain, skewed], "uvm": [plain, skewed], "ssd": [plain, skewed]}
    for mode, values in kinds.items():
        monkeypatch.setitem(_runtime_costs.KINDS, mode, values)


def test_runtime_figures_are_fields_of_a_topology():
    figures = _runtime_costs.runtime_figures(steps=10)
    assert figures.pop("step_s") >= 0
    machine = {"hbm_per_rank": "1MiB", "host_memory_per_host": 0, "device": "cpu"}
    topology = Topology.from_dict({**machine, **json.loads(json.dumps(figures))})
    assert topology.row_seconds.keys() == ROW_COSTS.keys()
    assert all(seconds >= 0 for seconds in topology.row_seconds.values())
    assert topology.one_fetcher


def test_disturbed_samples_do_not_count():
    calm, loud = (Sample("memory", 1, 1, 0, 0, 0, 0, 1, s, s, 0, 0, LOUD * s) for s in (0.5, 9.0))
    assert Sample.median([loud, calm, loud]).fetch == 0.5
    assert Sample.median([loud]).fetch == 9.0
