"""``tierstore train --plan`` on ranks: bits, figures beside predictions, going on, bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli import ranks
from tierstore.cli.main import main
from tierstore.cli.planned import PlanFile
from tierstore.placement import ShardingPlan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ranks.make_plan(tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def saved(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was saved after 12 batches, and of what it printed."""
    folder = tmp_path_factory.mktemp("saved")
    done = ranks.train("--plan", plan, "--steps", "12", "--checkpoint", folder / "run")
    assert done.returncode == 0, done.stderr
    assert "uvm" in done.stdout
    for name in ("stdout", "stderr"):
        (folder / name).write_text(getattr(done, name))
    return folder


def test_a_plan_of_the_command_trains_to_the_bits_of_memory_and_is_compared(
    plan: Path, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also: a run that goes on has the bits of one in memory that was never stopped."""
    shutil.copytree(saved / "run", tmp_path / "run")
    more = ["--checkpoint", tmp_path / "run", "--resume", "--compare", "in-memory"]
    figures = ranks.trained(tmp_path, "--plan", plan, "--steps", "24", *more)
    assert figures["bit_identical"] is True
    assert figures["batches"] == 24
    assert figures["examples"] == 24 * 2 * 64
    assert figures["rows_compared"] > 2000
    assert figures["auc"] == figures["in_memory_auc"] > 0.6
    found, entry = figures["plan"], json.loads(plan.read_text())
    assert found["step_seconds"]["predicted"] == entry["predicted_step_s"]
    assert found["step_seconds"]["measured"] > 0
    assert found["batches"] == 6, "the last half of the twelve batches of this process"
    sent = found["exchange_bytes"]
    assert sent["measured"] == pytest.approx(sent["predicted"], rel=0.2)
    lines = {(line["table"], line["rank"]): line for line in found["tables"]}
    (whole,) = (rank for table, rank in lines if table == "t1")
    assert set(lines) == {("t0", 0), ("t0", 1), ("t1", whole), ("t2", 0), ("t2", 1)}
    for line in lines.values():
        assert line["rows"] == pytest.approx(line["predicted_rows"], rel=0.4)
        assert 0 < line["misses"] <= line["rows"]


def test_the_record_of_ranks_simulates_what_they_hit(tmp_path: Path) -> None:
    """Also: their curves are those of a training in one process, and the planner reads them."""
    files = ["--record", tmp_path / "trace.npz", "--save-curves", tmp_path / "curves.json"]
    plan = ranks.make_plan(tmp_path, hbm="160KiB")
    figures = ranks.trained(tmp_path, "--plan", plan, "--steps", "60", *files)
    command = ["bench", "hit-rate", tmp_path / "trace.npz", "--plan", plan, "--json", tmp_path / "s.json"]
    assert main([*map(str, command)]) == 0
    (training,) = json.loads((tmp_path / "s.json").read_text())["trainings"]
    found = [rank["tiers"] for rank in training["ranks"]]
    for tier, rates in figures["hit_rate"].items():
        counted = [sum(of[tier][kind] for of in found) for kind in ("row_hits", "rows")]
        assert rates["per_unique"] == counted[0] / counted[1]
        counted = [sum(of[tier][kind] for of in found) for kind in ("access_hits", "accesses")]
        assert rates["per_access"] == counted[0] / counted[1]
    assert figures["hit_rate"].keys() == found[0].keys() == {"hbm", "uvm"}
    assert 0.01 < figures["hit_rate"]["uvm"]["per_unique"] < 0.99

    alone = ["--batch-size", "128", "--steps", "60", "--save-curves", tmp_path / "alone.json"]
    assert main(["train", *ranks.DATA, *map(str, alone)]) == 0
    curves, expected = (
        json.loads((tmp_path / name).read_text())["tables"] for name in ("curves.json", "alone.json")
    )
    assert list(curves) == list(expected) == ranks.TABLES
    for name, curve in curves.items():
        assert curve["accesses"] == expected[name]["accesses"] == 128
        assert curve["num_embeddings"] == 4000
        for figure in ("unique_rows", "footprint"):
            assert curve[figure] == pytest.approx(expected[name][figure])
        sizes = expected[name]["sizes_rows"]
        assert curve["sizes_rows"] == sizes
        for size, *ratios in zip(
            sizes, curve["capacity_miss_ratio"], expected[name]["capacity_miss_ratio"], strict=True
        ):
            assert ratios[0] == pytest.approx(ratios[1], abs=0.03), f"{name}: {size} rows"
    again = ["--stats", tmp_path / "curves.json", "--search-seconds", "0.1", "--batch-size", "64"]
    inputs = [f"--{name}={plan.parent / name}.yaml" for name in ("tables", "topology")]
    assert main(["plan", *inputs, *map(str, again)]) == 0


def test_a_record_that_cannot_be_written_is_one_error(plan: Path, tmp_path: Path) -> None:
    done = ranks.train("--plan", plan, "--steps", "4", "--record", tmp_path)
    (line,) = ranks.own_lines(done.stderr)
    assert line == f"error: --record {tmp_path} is a folder; give the path of a file"


class TestOutput:
    def test_rank_0_alone_prints(self, saved: Path) -> None:
        stdout, stderr = ((saved / name).read_text() for name in ("stdout", "stderr"))
        for once in ("examples/s  ", "bytes that ranks exchange", "misses of hbm", "measured: means over"):
            assert stdout.count(once) == 1
        assert stderr.count("tiered: 100% batch 12/12") == 1
        assert "the plan is for ranks with GPUs" in stdout, "the topology says no device"
        assert max(map(len, stdout.split("measured: means")[0].splitlines())) <= 80

    def test_ranks_without_a_plan_are_refused_once(self) -> None:
        done = ranks.train("--steps", "4")
        assert done.returncode != 0
        (line,) = ranks.own_lines(done.stderr)
        assert line.startswith("error: torchrun started 2 ranks, and there is no plan for them; give --plan")

    def test_another_number_of_ranks_is_refused_once(self, plan: Path) -> None:
        done = ranks.train("--plan", plan, "--steps", "4", ranks=1)
        (line,) = ranks.own_lines(done.stderr)
        assert line.startswith("error: the plan is for 2 ranks and there is 1; start as many by torchrun")

    def test_other_tables_are_refused_once(self, plan: Path) -> None:
        done = ranks.train("--plan", plan, "--steps", "4", "--dim", "16")
        (line,) = ranks.own_lines(done.stderr)
        assert "this plan is for another model: table 't0' is (4000, 16) in the model" in line


class TestStopping:
    def test_ctrl_c_saves_on_all_ranks_with_one_message(self, plan: Path, tmp_path: Path) -> None:
        more = ["--plan", plan, "--checkpoint", tmp_path / "run"]
        (line,) = ranks.disturbed(tmp_path, *more)
        assert line.startswith("saved after ")
        assert "repeat the command with --resume" in line
        batches = int(line.split()[2].replace(",", ""))
        figures = ranks.trained(tmp_path, *more, "--resume", "--steps", str(batches + 2))
        assert figures["batches"] == batches + 2

    def test_a_killed_rank_is_one_error_and_the_run_goes_on(self, plan: Path, tmp_path: Path) -> None:
        more = ["--plan", plan, "--checkpoint", tmp_path / "run"]
        hint, error = ranks.disturbed(tmp_path, *more, "--checkpoint-every", "5", kill=1)
        assert hint.startswith("saved after ")
        assert error.startswith(("error: another rank of the job has died", "error: rank 1 has stopped"))
        # The rank may have died after the next checkpoint was committed, and before rank 0 knew of that.
        steps = int(hint.split()[2].replace(",", "")) + 5 + 2
        assert ranks.trained(tmp_path, *more, "--resume", "--steps", str(steps))["batches"] == steps

    def test_a_killed_rank_0_is_told_by_the_other(self, plan: Path, tmp_path: Path) -> None:
        lines = ranks.disturbed(tmp_path, "--plan", plan, kill=0)
        assert [line for line in lines if line.startswith("rank 1: error: another rank of the job has died")]
        assert len(lines) == 1

    def test_a_folder_that_lacks_a_rank_is_refused(self, plan: Path, saved: Path, tmp_path: Path) -> None:
        shutil.copytree(saved / "run", tmp_path / "run")
        (folder,) = (tmp_path / "run/rows").glob("*/*/rank00001")
        shutil.rmtree(folder)
        done = ranks.train("--plan", plan, "--steps", "24", "--checkpoint", tmp_path / "run", "--resume")
        (line,) = ranks.own_lines(done.stderr)
        assert f"{folder} is missing, and the last commit of all ranks has rows there; restore" in line
        assert not folder.exists()


class TestWithoutTorchrun:
    """What is refused before there are ranks, in this process."""

    def refused(self, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
        assert main(["train", *ranks.DATA, "--steps", "4", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    def test_a_plan_needs_its_ranks(self, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
        error = self.refused(capsys, "--plan", plan)
        assert "the plan is for 2 ranks and there is 1; start as many by torchrun --standalone" in error

    def test_a_saved_run_of_ranks_is_no_run_of_one_process(
        self, saved: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        error = self.refused(capsys, "--checkpoint", saved / "run", "--resume", "--batch-size", "64")
        assert "was trained on 2 ranks (--plan); go on with it in this way" in error
        assert "already holds a store" in self.refused(capsys, "--store", saved / "run/rows")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "No such file"),
            ("[", "is not JSON"),
            ("{}", "not a sharding plan: world_size is missing"),
            ({"feasible": False}, "the tables do not fit the machines of this plan"),
            ({"ranks": [{"exchange_bytes": "many"}]}, "its predictions cannot be read"),
            ({"predicted_step_s": "soon"}, "its predictions cannot be read"),
            ({"ranks": 5}, "its predictions cannot be read"),
            ({"batch_size_per_rank": float("inf")}, "its predictions cannot be read"),
        ],
    )
    def test_foreign_files(
        self, content: Any, message: str, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "plan.json"
        if isinstance(content, dict):
            file.write_text(json.dumps({**json.loads(plan.read_text()), **content}))
        elif content is not None:
            file.write_text(content)
        assert message in self.refused(capsys, "--plan", file)

    def test_a_plan_that_python_saved_has_no_predictions(self, plan: Path, tmp_path: Path) -> None:
        ShardingPlan.load(plan).save(tmp_path / "plan.json")
        file = PlanFile.load(tmp_path / "plan.json")
        assert (file.step_seconds, file.exchange_bytes, file.batch_size) == (None, None, 0)
        assert not file.rows
        assert file.plan.tables == ShardingPlan.load(plan).tables

    def test_a_plan_of_one_rank_needs_no_torchrun(self, tmp_path: Path) -> None:
        alone = ranks.make_plan(tmp_path, ["table_wise"] * 3, ranks=1)
        more = ["--plan", str(alone), "--compare", "in-memory", "--json", str(tmp_path / "out.json")]
        assert main(["train", *ranks.DATA, "--steps", "4", *more]) == 0
        figures = json.loads((tmp_path / "out.json").read_text())
        assert figures["bit_identical"] is True
        assert figures["config"]["batch_size"] == 64, "the plan's"
