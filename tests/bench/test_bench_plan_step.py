"""``tierstore bench plan-step``: costs per row from small tables, and plans that are trained with."""

from __future__ import annotations

import argparse
import json

import pytest

from bench import _runtime_costs, plan_step
from tierstore.planner import Topology
from tierstore.planner.topology import ROW_COSTS


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(_runtime_costs, "_ROWS", 3000)
    monkeypatch.setattr(_runtime_costs, "_WARM", 2)
    plain, skewed = (0.0, 10.0, 200), (1.2, 10.0, 200)
    kinds = {"memory": [plain, skewed], "uvm": [plain, skewed], "ssd": [(0.4, 10.0, 200)]}
    for mode, values in kinds.items():
        monkeypatch.setitem(_runtime_costs.KINDS, mode, values)
    monkeypatch.setattr(plan_step, "TABLES", [(6000, 8, 1.0), (4000, 16, 0.8)])


def test_runtime_figures_are_fields_of_a_topology(tmp_path):
    figures = _runtime_costs.runtime_figures(steps=10, folder=str(tmp_path))
    assert figures.pop("step_s") >= 0
    machine = {"hbm_per_rank": "1MiB", "host_memory_per_host": 0, "device": "cpu"}
    topology = Topology.from_dict({**machine, **json.loads(json.dumps(figures))})
    assert topology.row_seconds.keys() == ROW_COSTS.keys()
    assert all(seconds >= 0 for seconds in topology.row_seconds.values())
    assert topology.one_fetcher


def test_plans_are_trained_with_and_compared(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    plan_step.add_arguments(parser)
    topology, out = tmp_path / "topology.json", tmp_path / "out.json"
    topology.write_text(json.dumps({"device": "cpu", "hbm_per_rank": 1, "host_memory_per_host": 1}))
    arguments = f"--topology {topology} --json {out} --batch-size 12 --rounds 1 --steps 4 --warm 12 --rest 0"
    assert plan_step.run(parser.parse_args(arguments.split())) == 0
    figures = json.loads(out.read_text())
    assert figures["plans"] == len(plan_step.BUDGETS)
    assert all(run["measured"] > 0 for run in figures["runs"])
    assert any(run["misses"] > 0 for run in figures["runs"])
    assert figures["miss_error.worst"] < 1
    text = capsys.readouterr().out
    assert all(name in text for name in plan_step.BUDGETS)
