"""``tierstore train`` from end to end, small: bit identity, resume, errors, what it writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.small_training import ctrl_c_in_batch_10, small_data, small_training  # noqa: F401  (fixtures)
from tierstore.cli.main import main
from tierstore.cli.trainer import Trainer

JSON_KEYS = [
    *(
        "final_loss",
        "auc",
        "in_memory_auc",
        "base_rate",
        "bit_identical",
        "examples_per_s",
        "in_memory_examples_per_s",
        "ratio",
    ),
    *(
        "hit_rate",
        "slots",
        "depth",
        "window",
        "stall",
        "peak_rss_bytes",
        "rss_before_bytes",
        "budget_bytes",
        "read_ahead_bytes",
        "table_bytes",
    ),
    *("touched_bytes", "touched_share", "ssd_bytes"),
    *("rows_compared", "difference", "batches", "examples", "seconds", "plan", "config", "machine"),
]
train = small_training(hbm="1/8", steps=24)
pytestmark = pytest.mark.usefixtures("small_data")


def test_small_tables_are_trained_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert train("--compare", "in-memory", "--json", out) == 0
    result = json.loads(out.read_text())
    assert list(result) == JSON_KEYS
    assert result["bit_identical"] is True
    assert result["batches"] == 24
    assert result["examples"] == 24 * 64
    assert result["rows_compared"] > 500
    assert result["ratio"] == result["examples_per_s"] / result["in_memory_examples_per_s"]
    assert result["table_bytes"] == 3 * 4000 * 48
    assert result["budget_bytes"] == result["table_bytes"] // 8
    assert result["read_ahead_bytes"] == result["table_bytes"] // 8
    assert result["touched_share"] == result["touched_bytes"] / result["table_bytes"]
    assert list(result["hit_rate"]) == ["hbm", "ssd"]
    assert 0 < result["hit_rate"]["hbm"]["per_unique"] <= result["hit_rate"]["hbm"]["per_access"] < 1
    assert result["config"]["data"] == "synthetic:zipf:1.05"
    streams = capsys.readouterr()
    assert "bit_identical: true" in streams.out
    assert "rows read ahead: at most 70.31 KiB beside the budget" in streams.out
    assert "tiered: 100% batch 24/24" in streams.err


@pytest.mark.parametrize("engine", ["native", "rocksdb", "lmdb", "memory"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_every_engine(engine: str, optimizer: str, tmp_path: Path) -> None:
    more = [] if engine == "memory" else ["--store", tmp_path / "store"]
    options = [
        "--engine",
        engine,
        "--optimizer",
        optimizer,
        "--policy",
        "lru",
        "--depth",
        "1",
        "--uvm",
        "1/10",
    ]
    assert train(*options, *more, "--compare", "in-memory", "--steps", "12") == 0


@pytest.mark.parametrize(("size", "expected"), [("0", 0), ("20KiB", 20 << 10), ("1/4", 3 * 4000 * 48 // 4)])
def test_read_ahead_takes_what_it_is_given(size: str, expected: int, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert train("--read-ahead", size, "--compare", "in-memory", "--json", out) == 0
    assert json.loads(out.read_text())["read_ahead_bytes"] == expected


def test_rows_of_fewer_bytes_are_compared_by_auc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, more = tmp_path / "out.json", ["--ssd-dtype", "bf16", "--state-dtype", "bf16"]
    assert train(*more, "--compare", "in-memory", "--rounding", "nearest", "--json", out) == 0
    result = json.loads(out.read_text())
    assert result["bit_identical"] is None
    assert result["auc"] == pytest.approx(result["in_memory_auc"], abs=0.02)
    told = capsys.readouterr().out
    assert "against memory; lower tiers round rows, so no bits are compared" in told
    assert "speed: " in told
    assert train("--uvm", "1/10", "--uvm-dtype", "int8", "--ssd", "0", "--hbm", "1/2", "--steps", "5") == 0
    with pytest.raises(SystemExit, match="2"):
        train("--rounding", "up")


def test_all_in_memory_needs_no_store(tmp_path: Path) -> None:
    assert train("--hbm", "all", "--json", tmp_path / "out.json") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["ssd_bytes"] == 0
    assert result["read_ahead_bytes"] == 0
    assert result["bit_identical"] is None


def test_a_difference_is_found_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = Trainer.evaluate

    def spoil(trainer: Trainer, dataset: Any) -> Any:
        if trainer.embeddings.engine.config.keeps_all:
            ids = next(trainer.embeddings.touched_ids("t1"))[:1]
            trainer.embeddings.load_rows(ids, torch.zeros(1, 8), table="t1")
        return evaluate(trainer, dataset)

    monkeypatch.setattr(Trainer, "evaluate", spoil)
    assert train("--compare", "in-memory", "--json", tmp_path / "out.json") == 1
    assert json.loads((tmp_path / "out.json").read_text())["bit_identical"] is False
    assert "bit_identical: false; first difference: weight of row" in capsys.readouterr().out


class TestStopping:
    @pytest.mark.usefixtures("ctrl_c_in_batch_10")
    def test_ctrl_c_saves_and_resume_goes_on_exactly(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = tmp_path / "store"
        assert train("--store", store) == 130
        said = f"saved after 10 batches in {store}/checkpoints; to go on, repeat the command with --resume"
        assert said in capsys.readouterr().err
        assert main(["inspect", str(store)]) == 0
        assert "  step: 10\n" in capsys.readouterr().out
        monkeypatch.undo()
        out = tmp_path / "out.json"
        assert train("--store", store, "--resume", "--compare", "in-memory", "--json", out) == 0
        assert json.loads(out.read_text())["examples"] == 24 * 64
        assert len(list((store / "checkpoints").glob("*-step24-*"))) == 1

    @pytest.mark.usefixtures("ctrl_c_in_batch_10")
    def test_without_a_folder_it_says_that_nothing_is_kept(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert train() == 130
        assert "nothing is kept" in capsys.readouterr().err

    def test_resume_wants_the_same_options(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert train("--store", tmp_path / "store") == 0
        assert train("--store", tmp_path / "store") == 2
        assert "already holds a checkpoint" in capsys.readouterr().err
        assert train("--store", tmp_path / "store", "--resume", "--lr", "0.5") == 2
        assert "had --lr 0.02" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--json", "/proc/nowhere/out.json"], "--json /proc/nowhere/out.json: No such file"),
        (["--tensorboard", "/etc/passwd"], "--tensorboard /etc/passwd: "),
        (["--data", "movies"], "unknown data 'movies'; known are flights"),
        (["--hbm", "lots"], "hbm is 'lots'"),
        (["--hbm", "3/2"], "--hbm 3/2"),
        (["--hbm", "100"], "hbm"),
        (["--read-ahead", "much"], "--read-ahead is 'much'"),
        (["--read-ahead", "3/2"], "--read-ahead 3/2"),
        (["--policy", "magic"], "magic"),
        (["--engine", "paper"], "unknown engine 'paper'"),
        (["--optimizer", "newton"], "unknown optimizer 'newton'; known optimizers"),
        (["--lr", "-1"], "lr is -1.0"),
        (["--resume"], "--resume needs --checkpoint DIR"),
        (["--checkpoint-every", "3"], "--checkpoint-every needs --checkpoint DIR"),
        (["--hbm", "all", "--store", "somewhere"], "nothing would be stored there"),
        (["--depth", "1000"], "depth is 1000"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert what in error
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_wrong_tiers_are_refused_before_a_data_set_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data sets take seconds and more to read; this one cannot be read at all."""
    data = f"--data criteo --data-path {tmp_path}/absent"
    for tiers, what in (("--hbm 12QB", "hbm is '12QB'"), ("--engine none", "engine"), ("--hbm 3/2", "--hbm")):
        assert main(f"train {data} {tiers} --store {tmp_path}/store".split()) == 2
        assert what in capsys.readouterr().err


def test_endless_data_needs_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", "synthetic:zipf:1.1"]) == 2
    assert "never ends; say after how many batches to stop, by --steps" in capsys.readouterr().err


def test_data_without_examples_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    assert main(["train", "--data", "criteo", "--data-path", str(tmp_path / "empty.txt")]) == 2
    assert "data 'criteo' has no examples to train on" in capsys.readouterr().err


def test_a_full_disk_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    assert train("--store", store, "--ssd", "64KiB", "--hbm", "8KiB") == 2
    error = capsys.readouterr().err
    assert f"{store}/checkpoints holds what was saved before this run, and nothing of it" in error
    assert "error: " in error.splitlines()[-1]


def test_tensorboard_gets_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert train("--tensorboard", tmp_path / "runs", "--tensorboard-every", "7") == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert {"train/loss", "train/auc", "hit_rate/hbm", "speed/examples_per_s"} <= set(
        events.Tags()["scalars"]
    )
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == [7, 14, 21, 24], "after every seventh batch, and at the end"
