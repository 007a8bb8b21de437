"""Costs per row from small tables."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from bench import _runtime_costs
from bench._neighbours import LOUD
from bench._runtime_costs import Sample
from tierstore.errors import ConfigError
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
    assert 0 < topology.overlap_loss <= 1


def test_disturbed_samples_do_not_count():
    calm, loud = (Sample("memory", 1, 1, 0, 0, 0, 0, 1, s, s, 0, 0, s, s, LOUD * s) for s in (0.5, 9.0))
    assert Sample.median([loud, calm, loud]).fetch == 0.5
    assert Sample.median([loud]).fetch == 9.0


@pytest.mark.parametrize("loss", [0.05, 0.2, 0.5])
def test_the_loss_is_found_from_two_samples(loss):
    topology = Topology(hbm_per_rank=1, device="cpu", overlap_loss=loss)
    one, balanced = (
        Sample("uvm", 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, topology.together(np.array([[busy, 0.01]])), busy)
        for busy in (0.004, 0.011)
    )
    assert _runtime_costs._overlap_loss(one, balanced) == pytest.approx(loss, rel=1e-6)
    assert _runtime_costs._beside(one.wall, one.busy, loss) == pytest.approx(0.01, rel=1e-6)


def test_what_takes_no_longer_or_twice_as_long_has_the_least_and_the_largest_loss():
    one = Sample("uvm", 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0.010, 0.004)
    assert _runtime_costs._overlap_loss(one, replace(one, wall=0.009, busy=0.01)) == 1e-3
    assert _runtime_costs._overlap_loss(one, replace(one, wall=0.030, busy=0.01)) == 1.0


def test_a_step_is_between_its_longest_stage_and_the_sum_of_stages():
    stages = np.array([[3.0, 4.0, 0.0], [0.0, 2.0, 2.0]])
    of = {
        loss: Topology(hbm_per_rank=1, device="cpu", overlap_loss=loss).together(stages)
        for loss in (0, 0.19, 1)
    }
    assert of[0] == 4.0
    assert of[1] == pytest.approx(7.0)
    assert 4.0 < of[0.19] < 7.0
    equal = Topology(hbm_per_rank=1, device="cpu", overlap_loss=0.19).together(np.array([[2.0, 2.0]]))
    assert equal == pytest.approx(2.0 * 1.19)


@pytest.mark.parametrize("loss", [-0.1, 1.5, float("nan"), True, "0.1"])
def test_a_loss_is_a_share(loss):
    with pytest.raises(ConfigError, match="overlap_loss"):
        Topology(hbm_per_rank=1, device="cpu", overlap_loss=loss)
