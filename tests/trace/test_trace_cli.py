"""``tierstore trace``."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tierstore.cli.main import main
from tierstore.trace import open_trace

SOURCE = ["synthetic:zipf:1.0", "--batches", "4", "--batch-size", "64", "--tables", "2", "--rows", "300"]


def test_record_then_describe(tmp_path, capsys):
    out, description = tmp_path / "t.npz", tmp_path / "d.json"
    assert main(["trace", "record", *SOURCE, "--out", str(out)]) == 0
    assert "4 batches" in capsys.readouterr().out
    assert [keys.size for keys in open_trace(out).key_batches()] == [128] * 4
    assert main(["trace", "describe", str(out), "--json", str(description)]) == 0
    text = capsys.readouterr().out
    assert "2 tables, 4 batches, 512 accesses" in text
    assert "up to 1 " in text
    assert json.loads(description.read_text())["accesses"] == 512


def test_columns(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,4\n")
    assert main(["trace", "describe", str(tmp_path / "a.csv"), "--columns", "b"]) == 0
    assert "1 tables, 1 batches, 2 accesses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "no file or dataset 'nope'"),
        (["synthetic:zipf:1.0"], "endless"),
        ([*SOURCE, "--batches", "0"], "at least 1"),
        (["flights", "--rows", "5"], "does not take rows"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert main(["trace", "describe", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_drift_and_fit_are_told(tmp_path, capsys):
    path = tmp_path / "a.npy"
    np.save(path, (3000 * np.random.default_rng(0).random(60_000) ** 4).astype(np.int64))
    assert main(["trace", "describe", str(path), "--batch-size", "1000"]) == 0
    text = capsys.readouterr().out
    assert "drift" in text
    assert "Zipf-Mandelbrot" in text
