"""From a trace, or from training, to the planner and the simulator: the commands read one another's files."""

from __future__ import annotations

import json

import pytest
import yaml

from bench import hit_rate
from cache_policies import get as get_policy
from cache_policies import names, simulate
from tierstore.cli.main import main
from tierstore.trace import open_trace

SOURCE = "synthetic:zipf:0.9"
SHAPE = ["--tables", "3", "--rows", "20000", "--batch-size", "256"]
TOPOLOGY = {
    "hosts": 1,
    "ranks_per_host": 1,
    "hbm_per_rank": "64MiB",
    "host_memory_per_host": "1GiB",
    "ssd_per_host": "10GB",
    "ssd_read_iops": "1e5",
}


def train(tmp_path, *arguments: object) -> dict:
    out = tmp_path / "train.json"
    command = ["train", "--data", SOURCE, *SHAPE, "--steps", "40", "--dim", "16", "--json", out]
    assert main([str(argument) for argument in (*command, *arguments)]) == 0
    return json.loads(out.read_text())


def planned(tmp_path, stats) -> list[dict]:
    tables = [{"name": f"t{t}", "num_embeddings": 20_000, "embedding_dim": 16} for t in range(3)]
    (tmp_path / "tables.yaml").write_text(yaml.safe_dump(tables))
    (tmp_path / "topology.yaml").write_text(yaml.safe_dump(TOPOLOGY))
    command = ["plan", "--tables", tmp_path / "tables.yaml", "--topology", tmp_path / "topology.yaml"]
    command += ["--stats", stats, "--batch-size", 256, "--search-seconds", 0.2]
    assert main([str(argument) for argument in (*command, "--json", tmp_path / "plan.json")]) == 0
    return json.loads((tmp_path / "plan.json").read_text())["tables"]


def test_the_planner_reads_the_curves_of_a_trace_and_of_training(tmp_path, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    hit_rate.add_arguments(parser)
    from_trace = tmp_path / "trace-curves.json"
    command = [SOURCE, *SHAPE, "--batches", "40", "--policies", "lru", "--sizes", "10%", "--iops", "1e5"]
    assert hit_rate.run(parser.parse_args([*command, "--export", str(from_trace)])) == 0
    from_training = tmp_path / "live-curves.json"
    train(tmp_path, "--hbm", "1MiB", "--policy", "lru", "--export", from_training)

    traced, live = (json.loads(path.read_text())["tables"] for path in (from_trace, from_training))
    assert list(traced) == list(live) == ["t0", "t1", "t2"]
    for name, table in traced.items():
        assert live[name]["unique_rows"] == pytest.approx(table["unique_rows"])
        assert live[name]["accesses"] == pytest.approx(table["accesses"])
        assert live[name]["footprint"] == pytest.approx(table["footprint"], rel=0.1)
    for stats in (from_trace, from_training):
        assert {table["name"] for table in planned(tmp_path, stats)} == {"t0", "t1", "t2"}


@pytest.mark.parametrize("policy", [name for name in names() if not get_policy(name).offline])
def test_training_reports_the_hit_rate_that_the_simulator_finds_on_its_trace(tmp_path, capsys, policy):
    recorded = tmp_path / "trace.npz"
    assert main(["trace", "record", SOURCE, *SHAPE, "--batches", "40", "--out", str(recorded)]) == 0
    options = ["--hbm", "900KiB", "--policy", policy, "--depth", "2", "--window", "5"]
    report = train(tmp_path, *options, "--ssd-cap", "1GiB", "--engine", "memory")
    slots = report["slots"]["hbm"]
    result = simulate(open_trace(str(recorded)).key_batches(), policy, slots, depth=2, window=5, on_demand=1)
    assert report["hit_rate"]["hbm"]["per_access"] == pytest.approx(1 - result.miss_ratio, rel=1e-12)
    assert report["hit_rate"]["hbm"]["per_unique"] == pytest.approx(1 - result.unique_miss_ratio, rel=1e-12)
    assert 0.1 < result.unique_miss_ratio < 0.95
