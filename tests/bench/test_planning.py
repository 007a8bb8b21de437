"""``tierstore bench planning`` on a small batch: every figure is there and makes sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierstore.cli.main import main

SMALL = [
    "--data",
    "synthetic:zipf:1.1",
    "--batch-size",
    "500",
    "--run-in",
    "8",
    "--hbm",
    "512KiB",
    "--steps",
    "4",
    "--rounds",
    "2",
]


def test_every_figure_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "planning.json"
    assert main(["bench", "planning", *SMALL, "--threads", "1,2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["ids"] == 4000
    assert 0 < result["unique_rows"] < 4000
    assert result.keys() >= {"ratio.planned_vs_one_thread", "machine", "config", "slots"}
    for row in result["threads"].values():
        assert row["planned_ms"] > 0
        assert row["ids_per_s"] == pytest.approx(4e6 / row["planned_ms"])
        assert row["policy_ms"] <= row["planned_ms"]
        assert 0 < row["evicted_rows"] <= row["missed_rows"] < row["unique_rows"]
    out = capsys.readouterr().out
    assert "ms a plan" in out
    assert "flatter" not in out


def test_a_cache_that_never_evicts_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "planning", *SMALL, "--threads", "1", "--hbm", "256MiB"]) == 0
    assert "No row was evicted" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--threads", "two"], ["--threads", "0"], ["--steps", "0"]])
def test_wrong_arguments(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "planning", *SMALL, *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err
