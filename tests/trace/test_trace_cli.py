"""``tierstore trace``."""

from __future__ import annotations

import json
import subprocess
import sys

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


def test_a_trace_is_recorded_over_its_source(tmp_path):
    path = tmp_path / "t.npz"
    assert main(["trace", "record", *SOURCE, "--out", str(path)]) == 0
    assert main(["trace", "record", str(path), "--out", str(path)]) == 0
    assert [keys.size for keys in open_trace(path).key_batches()] == [128] * 4
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_recording_leaves_the_file_as_it_was(tmp_path, capsys):
    path, log = tmp_path / "t.npz", tmp_path / "a.csv"
    assert main(["trace", "record", *SOURCE, "--out", str(path)]) == 0
    before = path.read_bytes()
    log.write_text("a\n1\n-1\n")
    assert main(["trace", "record", str(log), "--out", str(path)]) == 2
    assert "id -1 of table 'a'; ids must not be negative" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [log, path]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["record", "--out", "/dev/full"], "error: --out /dev/full is no regular file; give another path"),
        (["record", "--out", "."], "error: --out . is a folder; give the path of a file"),
        (["record", "--out", "t.npz", "--rate", "0"], "error: --rate must be above 0 and at most 1, not 0"),
        (
            ["describe", "--json", "/dev/full"],
            "error: --json /dev/full: No space left on device; give another",
        ),
    ],
)
def test_results_that_cannot_be_written(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["trace", arguments[0], *SOURCE, *arguments[1:]]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_full_disk_while_recording_is_one_error(tmp_path):
    """The limit of the process's files stands for the end of the disk."""
    script = (
        "import resource, signal, sys; from tierstore.cli.main import main; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        "sys.exit(main(sys.argv[1:]))"
    )
    out = tmp_path / "t.npz"
    source = ["synthetic:zipf:0", "--tables", "1", "--rows", "500000", "--batches", "4"]
    command = [sys.executable, "-c", script, "trace", "record", *source, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.lstrip() == f"error: --out {out}: File too large; give another path\n"
    assert not list(tmp_path.iterdir())
