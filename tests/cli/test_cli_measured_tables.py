"""From a trace, or from training, to the planner and the simulator: the commands read one another's files."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from bench import hit_rate
from cache_policies import get as get_policy
from cache_policies import names, simulate
from cache_policies.reuse import sampled
from tests.small_training import small_data
from tierstore.cli.main import main
from tierstore.trace import open_trace

__all__ = ["small_data"]

pytestmark = pytest.mark.usefixtures("small_data")
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
    assert hit_rate.run(parser.parse_args([*command, "--save-curves", str(from_trace)])) == 0
    from_training = tmp_path / "live-curves.json"
    train(tmp_path, "--hbm", "1MiB", "--policy", "lru", "--save-curves", from_training)

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
    options = ["--hbm", "900KiB", "--policy", policy, "--record", recorded]
    report = train(tmp_path, *options, "--ssd", "1GiB", "--engine", "memory")
    assert f"--depth {report['depth']} --window {report['window']}" in capsys.readouterr().out
    slots, known = report["slots"]["hbm"], {name: report[name] for name in ("depth", "window")}
    result = simulate(open_trace(str(recorded)).key_batches(), policy, slots, on_demand=1, **known)
    assert report["hit_rate"]["hbm"]["per_access"] == pytest.approx(1 - result.miss_ratio, rel=1e-12)
    assert report["hit_rate"]["hbm"]["per_unique"] == pytest.approx(1 - result.unique_miss_ratio, rel=1e-12)
    assert 0.1 < result.unique_miss_ratio < 0.95


def test_a_sample_may_be_recorded_while_training(tmp_path, capsys):
    for rate in ("1", "0.2"):
        train(tmp_path, "--hbm", "all", "--record", tmp_path / f"{rate}.npz", "--record-rate", rate)
    full, part = (open_trace(str(tmp_path / f"{rate}.npz")) for rate in ("1", "0.2"))
    assert part.tables == full.tables == ("t0", "t1", "t2")
    assert part.rate == 0.2
    for whole, kept in zip(full.key_batches(), part.key_batches(), strict=True):
        chosen = whole[sampled(whole, 0.2)]
        assert kept.tolist() == chosen.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--record-rate", "2"], "--record-rate must be above 0 and at most 1, not 2"),
        (["--record", "/proc/nowhere/t.npz"], "--record /proc/nowhere/t.npz: .*give another path"),
    ],
)
def test_a_recording_that_cannot_be_is_said(tmp_path, capsys, options, message):
    command = ["train", "--data", SOURCE, *SHAPE, "--steps", "2", *options]
    assert main(command) != 0
    assert re.search(message, capsys.readouterr().err)
