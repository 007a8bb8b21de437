"""``tierstore train --checkpoint``: saved as it goes, resumed to the same bits and closing figures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.small_training import ctrl_c_in_batch_10, small_data, small_training  # noqa: F401  (fixtures)
from tierstore import checkpoint
from tierstore.cli.trainer import Trainer

SAVED = ["--checkpoint-every", "7"]
SAME = ("final_loss", "auc", "batches", "examples", "rows_compared", "bit_identical")

train = small_training(hbm="1/16", steps=40)
pytestmark = pytest.mark.usefixtures("small_data")


@pytest.fixture
def stop_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``stop_before(n, error)``: raises in the training step after ``n`` batches."""
    step = Trainer._step

    def stop(batches: int, error: BaseException) -> None:
        def stopped(trainer: Trainer, batch: Any) -> None:
            if trainer.batches == batches:
                raise error
            step(trainer, batch)

        monkeypatch.setattr(Trainer, "_step", stopped)

    return stop


@pytest.mark.parametrize("engine", ["native", "rocksdb", "lmdb"])
def test_a_run_stopped_twice_ends_as_one_that_was_not(
    engine: str, tmp_path: Path, stop_before: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--engine", engine, "--uvm", "1/32", "--compare", "in-memory"]
    assert train(*options, "--json", tmp_path / "undisturbed.json") == 0
    saved = [*options, *SAVED, "--checkpoint", tmp_path / "run", "--resume", "--json", tmp_path / "out.json"]
    for batches in (17, 16, 30):  # the second one gets no further than the first
        stop_before(batches, KeyboardInterrupt())
        assert train(*saved) == 130
        after = {17: 14, 16: 14, 30: 28}[batches]
        assert f"saved after {after} batches in {tmp_path}/run; to go on" in capsys.readouterr().err
    stop_before(-1, KeyboardInterrupt())
    assert train(*saved) == 0
    result, expected = (
        json.loads((tmp_path / name).read_text()) for name in ("out.json", "undisturbed.json")
    )
    assert {key: result[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert result["bit_identical"] is True
    assert result["seconds"] > 0
    for tier, rates in expected["hit_rate"].items():  # tiers begin empty after a resume
        assert result["hit_rate"][tier]["per_access"] == pytest.approx(rates["per_access"], abs=0.2)
    assert train(*saved) == 0  # there is nothing left to do, and the figures are the same
    again = json.loads((tmp_path / "out.json").read_text())
    assert {key: again[key] for key in (*SAME, "hit_rate")} == {
        key: result[key] for key in (*SAME, "hit_rate")
    }


def test_a_resumed_run_may_have_other_tiers_engines_stay(
    tmp_path: Path, stop_before: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_before(20, KeyboardInterrupt())
    assert train(*SAVED, "--checkpoint", tmp_path / "run") == 130
    stop_before(-1, KeyboardInterrupt())
    resumed = ["--checkpoint", tmp_path / "run", "--resume", "--compare", "in-memory"]
    assert train(*resumed, "--engine", "lmdb") == 2
    assert 'written by engine "native", not "lmdb"' in capsys.readouterr().err
    assert train(*resumed, "--hbm", "1/4", "--uvm", "0", "--policy", "lru", "--depth", "0") == 0


@pytest.mark.usefixtures("ctrl_c_in_batch_10")
def test_ctrl_c_saves_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--checkpoint", tmp_path / "run") == 130
    assert f"saved after 10 batches in {tmp_path}/run" in capsys.readouterr().err
    assert checkpoint.read_extra(tmp_path / "run")["trainer"]["batches"] == 10


def test_only_the_last_checkpoint_stays(tmp_path: Path) -> None:
    assert train(*SAVED, "--checkpoint", tmp_path / "run") == 0
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names[0].startswith("000007-step40-")
    assert names[1:] == ["CHECKPOINTS.json", "LOCK", "rows"]


class TestWrongInput:
    def test_another_run_is_not_mixed_in(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = tmp_path / "run"
        assert train("--checkpoint", run) == 0
        assert train("--checkpoint", run) == 2
        assert f"{run} already holds a checkpoint; go on with it by --resume" in capsys.readouterr().err
        for option, value, was in (
            ("--seed", "1", "--seed 0"),
            ("--data", "synthetic:zipf:1.2", "--data synthetic:zipf:1.05"),
            ("--dim", "4", "--dim 8"),
            ("--optimizer", "adam", "--optimizer rowwise-adagrad"),
        ):
            assert train("--checkpoint", run, "--resume", option, value) == 2
            assert f"--resume: the run in {run} had {was}; give the same" in capsys.readouterr().err

    def test_other_folders(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "letters").mkdir()
        (tmp_path / "letters/love.txt").write_text("dear")
        for more in ([], ["--resume"]):
            assert train("--checkpoint", tmp_path / "letters", *more) == 2
            error = capsys.readouterr().err
            assert "letters is no folder of checkpoints: it has no CHECKPOINTS.json, but love.txt" in error
            assert error.count("\n") == 1
        assert os.listdir(tmp_path / "letters") == ["love.txt"]
        assert train("--checkpoint", tmp_path / "letters/love.txt") == 2
        assert "love.txt is a file" in capsys.readouterr().err

    def test_rows_that_no_checkpoint_names(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert train("--store", tmp_path / "rows", "--checkpoint", tmp_path / "a") == 0
        assert train("--store", tmp_path / "rows", "--checkpoint", tmp_path / "b") == 2
        assert "rows already holds a store" in capsys.readouterr().err
        assert train("--store", tmp_path / "rows", "--checkpoint", tmp_path / "b", "--resume") == 2
        assert "b has no whole checkpoint, but the store" in capsys.readouterr().err
        assert train("--store", tmp_path / "other", "--checkpoint", tmp_path / "a", "--resume") == 2
        assert "other is not the store that" in capsys.readouterr().err

    def test_tables_without_a_store(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert train("--hbm", "all", "--checkpoint", tmp_path / "run") == 2
        assert "nothing would be stored there" in capsys.readouterr().err
