"""``tierstore plan --data`` predicts for each table and rank what a training with the plan misses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.cli import ranks
from tests.small_training import small_data
from tierstore.cli import plan, plan_data
from tierstore.cli.main import main
from tierstore.planner import EmbeddingShardingPlanner, Topology
from tierstore.planner.planner import plan_of

__all__ = ["small_data"]

# What is predicted is about the batches that are trained on.
pytestmark = pytest.mark.usefixtures("small_data")
BATCHES, BATCH_SIZE = 160, 64
DATA = ["--data", "synthetic:criteo", "--max-rows", "6000", "--dim", "8", "--steps", str(BATCHES)]
"""26 tables, of 3 to 6,000 rows."""
MACHINE = {"hosts": 1, "device": "cpu", "host_memory_per_host": "41MiB", "ssd_per_host": "4GiB"}
FEW = 5  # rows per step, of which a share means little
Report = dict[str, Any]


def made(folder: Path, data: list[str], hbm: str, ranks_per_host: int, *more: str) -> Report:
    """Plan, and return the report."""
    machine = MACHINE | {"ranks_per_host": ranks_per_host, "hbm_per_rank": hbm}
    (folder / "topology.yaml").write_text(yaml.safe_dump(machine))
    files = ["--topology", f"{folder}/topology.yaml", "--json", f"{folder}/plan.json"]
    own = ["--batch-size", str(BATCH_SIZE), "--search-seconds", "1"]
    assert main(["plan", *data, *files, *own, *more]) == 0
    report: Report = json.loads((folder / "plan.json").read_text())
    return report


def lines_of(figures: Report) -> dict[tuple[str, int], Report]:
    return {(line["table"], line["rank"]): line for line in figures["plan"]["tables"]}


@pytest.mark.parametrize("policy", ["lookahead", "lru", "lfu"])
def test_each_table_misses_what_was_predicted(tmp_path, capsys, policy):
    report = made(tmp_path, DATA, "600KiB", 1, "--policy", policy)
    assert report["simulated"] == {"policy": policy, "cold_batches": 80, "batches": 80}
    assert f"simulated: policy {policy}, the last 80 batches" in capsys.readouterr().out
    options = ["--plan", f"{tmp_path}/plan.json", "--policy", policy, "--threads", "1"]
    assert main(["train", *DATA, *options, "--json", f"{tmp_path}/out.json"]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["plan"]["batches"] == 80
    measured = lines_of(figures)
    missing = 0
    for table in report["tables"]:
        (predicted,), (cold,) = table["predicted"], table["cold_start"]
        line = measured[table["name"], 0]
        assert line["predicted_misses"] == predicted["hbm_misses"] == pytest.approx(line["misses"])
        assert (predicted["unique_rows"], predicted["new_rows"]) == (line["rows"], line["new"])
        assert line["predicted_reads"] == predicted["memory_misses"] == pytest.approx(line["reads"])
        assert predicted["memory_misses"] <= predicted["hbm_misses"] - predicted["new_rows"] + 1e-9
        assert cold["new_rows"] >= predicted["new_rows"], "the first batches bring most of the new rows"
        missing += predicted["hbm_misses"] > 5
        assert (
            table["predicted_hit_rate"]
            == pytest.approx(1 - predicted["hbm_misses"] / predicted["unique_rows"], abs=0.05)
            or table["sharding_type"] == "data_parallel"
        )
    assert missing > 4, "too few tables miss rows for this to say something"
    assert sum(table["predicted"][0]["memory_misses"] for table in report["tables"]) > 20


def test_another_policy_than_the_predicted_one_is_said(tmp_path, capsys):
    made(tmp_path, DATA, "600KiB", 1)
    assert (
        main(["train", *DATA, "--plan", f"{tmp_path}/plan.json", "--policy", "fifo", "--threads", "1"]) == 0
    )
    text = " ".join(capsys.readouterr().out.split())
    assert "predicted for policy lookahead, and this training has fifo: plan with --policy fifo" in text


def test_another_number_of_batches_than_the_predicted_one_is_said(tmp_path, capsys):
    made(tmp_path, DATA, "600KiB", 1)
    for steps, said in ((BATCHES, False), (BATCHES // 4, True)):
        command = ["train", *DATA, "--steps", str(steps), "--plan", f"{tmp_path}/plan.json", "--threads", "1"]
        assert main(command) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("are predicted for the last half of 160 batches: plan with as many --steps" in text) == said


def test_ranks_miss_what_was_predicted(tmp_path):
    steps = ["--steps", "60"]
    report = made(tmp_path, [*ranks.DATA, *steps], "160KiB", 2)
    figures = ranks.trained(tmp_path, "--plan", tmp_path / "plan.json", *steps)
    measured = lines_of(figures)
    assert {rank for _, rank in measured} == {0, 1}
    for line in measured.values():
        assert line["predicted_misses"] == pytest.approx(line["misses"])
        assert line["predicted_rows"] == pytest.approx(line["rows"])
        assert line["predicted_reads"] == pytest.approx(line["reads"])
    assert sum(line["misses"] - line["new"] for line in measured.values()) > 5
    assert report["simulated"]["policy"] == "lookahead"


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_the_search_divides_memory_by_the_misses_of_the_policy(tmp_path, policy):
    """What it predicts without a simulation is about what the simulation counts, but for first uses."""
    parser = plan.add_parser(argparse.ArgumentParser().add_subparsers())
    options = [*DATA, "--batch-size", str(BATCH_SIZE), "--policy", policy, "--topology", "none"]
    found = plan_data.planned_data(parser.parse_args(options), 1)
    machine = Topology.from_dict(MACHINE | {"hbm_per_rank": "600KiB"})
    planner = EmbeddingShardingPlanner(machine, batch_size=BATCH_SIZE, stats=found.stats, search_seconds=0.2)
    solution = planner.solve(found.tables)
    assert not solution.caches.missing
    unique = solution.caches.field("unique")
    simulated = found.simulate(plan_of(solution)).steady
    counted = np.array([one.hbm_misses - one.new_rows for one in simulated])
    known = unique * solution.missed[0]
    many = counted > FEW
    assert known.sum() == pytest.approx(counted.sum(), rel=0.3), (
        "with curves of lru it was half as many again"
    )
    assert known[many] == pytest.approx(counted[many], rel=0.4)
    assert many.sum() > 10, "too few tables miss rows for this to say something"
