"""Costs per row from small tables."""

from __future__ import annotations

import json
import time
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
    drives = {"ssd_per_host": "1GiB", "ssd_write_bw": 1e9, "ssd_read_iops": 1e5}
    figures = _runtime_costs.runtime_figures(drives, steps=10)
    assert figures.pop("step_s") >= 0
    machine = {"hbm_per_rank": "1MiB", "host_memory_per_host": 0, "device": "cpu"}
    topology = Topology.from_dict({**machine, **json.loads(json.dumps(figures))})
    assert topology.row_seconds.keys() == ROW_COSTS.keys()
    assert all(seconds >= 0 for seconds in topology.row_seconds.values())
    assert topology.one_fetcher
    assert 0 < topology.overlap_loss <= 1
    assert 0 < topology.ssd_overlap_loss <= 1


def test_a_stage_that_only_waited_took_a_little_time(monkeypatch):
    """The counters of waits may say more than the clock that is read beside them."""
    monkeypatch.setattr(_runtime_costs, "_waiting_seconds", lambda bags: 2 * time.perf_counter())
    samples = _runtime_costs._samples("uvm", (16, 96), steps=4)
    assert [sample.fetch for sample in samples] == [1e-6] * len(samples)
    assert 0 < _runtime_costs._beside(samples[0].fetch, samples[0].busy, 0.2) < 1e-6


def test_a_term_of_no_sample_costs_nothing():
    samples = [Sample("uvm", ids, 1, 1, 1, 0, 1, 1, 1e-3 * ids, 0, 1, 0, 1, 1) for ids in (1.0, 2.0)]
    assert _runtime_costs._fit(samples, "fetch", ("ids", "stored")) == pytest.approx([1e-3, 0])


def test_disturbed_samples_do_not_count():
    calm, loud = (Sample("memory", 1, 1, 0, 0, 0, 0, 1, s, s, 0, 0, s, s, LOUD * s) for s in (0.5, 9.0))
    assert Sample.median([loud, calm, loud]).fetch == 0.5
    assert Sample.median([loud]).fetch == 9.0


@pytest.mark.parametrize("loss", [0.05, 0.2, 0.5])
def test_the_loss_is_found_from_two_samples(loss):
    topology = Topology(hbm_per_rank=1, device="cpu", overlap_loss=loss)
    one, balanced = (
        Sample("uvm", 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, topology.step_seconds(stages, np.zeros(1)), busy)
        for busy, stages in ((busy, np.array([[busy, 0.01]])) for busy in (0.004, 0.011))
    )
    assert _runtime_costs._overlap_loss(one, balanced) == pytest.approx(loss, rel=1e-6)
    assert _runtime_costs._beside(one.wall, one.busy, loss) == pytest.approx(0.01, rel=1e-6)


def test_what_takes_no_longer_or_twice_as_long_has_the_least_and_the_largest_loss():
    one = Sample("uvm", 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0.010, 0.004)
    assert _runtime_costs._overlap_loss(one, replace(one, wall=0.009, busy=0.01)) == 1e-3
    assert _runtime_costs._overlap_loss(one, replace(one, wall=0.030, busy=0.01)) == 1.0


@pytest.mark.parametrize("loss", [0.05, 0.4, 0.9])
def test_the_loss_of_the_drives_is_found_from_what_is_predicted_of_them(loss):
    machine = Topology(hbm_per_rank=1, device="cpu", overlap_loss=0.2, ssd_read_iops=1e5, ssd_write_bw=1e9)
    groups = ((1000.0, 100, 50_000), (2000.0, 300, 70_000))
    sample = Sample("ssd", 1, 1, 1, 3000, 3000, 1, 1, 0.01, 0, 1, 1, 0, 0.004, groups=groups)
    drives = _runtime_costs._drive_seconds(sample, machine)
    assert drives > 1.5 * (1000 * 104 + 2000 * 320) / 1e9  # the writes alone
    own = np.array([[sample.fetch, sample.busy]])
    wall = replace(machine, ssd_overlap_loss=loss).step_seconds(own, np.array([drives]))
    assert _runtime_costs._ssd_loss(replace(sample, wall=wall), machine) == pytest.approx(loss, rel=1e-3)


def test_a_step_is_between_its_longest_stage_and_the_sum_of_stages():
    stages, ssd = np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([0.0, 2.0])
    of = {
        loss: Topology(hbm_per_rank=1, device="cpu", overlap_loss=loss, ssd_overlap_loss=loss).step_seconds(
            stages, ssd
        )
        for loss in (0, 0.19, 1)
    }
    assert of[0] == 4.0
    assert of[1] == pytest.approx(7.0)
    assert 4.0 < of[0.19] < 7.0
    equal = Topology(hbm_per_rank=1, device="cpu", overlap_loss=0.19)
    assert equal.step_seconds(np.array([[2.0, 2.0]]), np.zeros(1)) == pytest.approx(2.0 * 1.19)
    assert equal.step_seconds(np.array([[2.0, 0.0]]), np.array([2.0])) == pytest.approx(2.0)
    equal = replace(equal, overlap_loss=0.0, ssd_overlap_loss=0.5)
    assert equal.step_seconds(np.array([[2.0, 2.0]]), np.array([2.0])) == pytest.approx(2.0 * 1.5)


@pytest.mark.parametrize("name", ["overlap_loss", "ssd_overlap_loss"])
@pytest.mark.parametrize("loss", [-0.1, 1.5, float("nan"), True, "0.1"])
def test_a_loss_is_a_share(name, loss):
    with pytest.raises(ConfigError, match=name):
        Topology(hbm_per_rank=1, device="cpu", **{name: loss})
