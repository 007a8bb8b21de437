"""Costs per row from small tables, and plans that are trained with (bench/research/plan_step.py)."""

from __future__ import annotations

import argparse
import json
import os

import pytest

from bench import _rounds, _runtime_costs
from bench._neighbours import LOUD
from bench._runtime_costs import Sample
from bench.research import plan_step
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
    kinds = {"memory": [plain, skewed], "uvm": [plain, skewed]}
    for mode, values in kinds.items():
        monkeypatch.setitem(_runtime_costs.KINDS, mode, values)
    monkeypatch.setattr(plan_step, "TABLES", [(6000, 8, 1.0), (4000, 16, 0.8)])
    monkeypatch.setattr(plan_step, "in_a_process", lambda work, *arguments: work(*arguments))


def test_work_runs_in_another_process():
    assert _rounds.in_a_process(os.getpid) != os.getpid()


def test_runtime_figures_are_fields_of_a_topology():
    figures = _runtime_costs.runtime_figures(steps=10)
    assert figures.pop("step_s") >= 0
    machine = {"hbm_per_rank": "1MiB", "host_memory_per_host": 0, "device": "cpu"}
    topology = Topology.from_dict({**machine, **json.loads(json.dumps(figures))})
    assert topology.row_seconds.keys() == ROW_COSTS.keys()
    assert all(seconds >= 0 for seconds in topology.row_seconds.values())
    assert topology.one_fetcher


def bench(arguments: str) -> int:
    parser = argparse.ArgumentParser()
    plan_step.add_arguments(parser)
    return plan_step.run(parser.parse_args(arguments.split()))


def test_plans_are_trained_with_and_later_commands_add_to_them(tmp_path, capsys):
    out = tmp_path / "out.json"
    common = f"--json {out} --batch-size 12 --dir {tmp_path}"
    few = "--turns 1 --steps 4 --warm 12 --cost-steps 10 --file-size 4MiB --probe 0.01"
    assert bench(f"{common} {few}") == 0
    figures = json.loads(out.read_text())
    assert figures["plans"] == len(plan_step.BUDGETS)
    assert all(run["measured"] > 0 for run in figures["runs"])
    assert any(run["misses"] > 0 for run in figures["runs"])
    assert figures["miss_error.worst"] < 1
    text = capsys.readouterr().out
    assert all(name in text for name in plan_step.BUDGETS)
    assert bench(f"{common} {few} --plans 2,4-5") == 0
    more = json.loads(out.read_text())
    trained = [record["plan"] for record in more["records"] if "plan" in record]
    twice = {name for name in trained if trained.count(name) == 2}
    assert twice == {list(plan_step.BUDGETS)[i] for i in (2, 4, 5)}
    assert bench(f"{common} --no-measure") == 0
    assert json.loads(out.read_text())["runs"] == more["runs"]
    Topology.from_dict(more["topology"])


def test_disturbed_samples_do_not_count():
    calm, loud = (Sample("memory", 1, 1, 0, 0, 1, s, s, LOUD * s) for s in (0.5, 9.0))
    assert Sample.median([loud, calm, loud]).fetch == 0.5
    assert Sample.median([loud]).fetch == 9.0


@pytest.mark.parametrize("plans", ["10", "x", "-3"])
def test_unknown_plans_are_refused(plans):
    with pytest.raises(ConfigError, match="give numbers below 10"):
        _rounds.chosen(plans, 10)


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="no measurements"):
        bench(f"--json {tmp_path}/other.json")
