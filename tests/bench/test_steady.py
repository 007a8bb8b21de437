from __future__ import annotations

import argparse
import json
import threading

import pytest
import torch

from bench import _steady, record, steady
from bench._checks import use_threads
from bench._steady import Turn, warm_up
from bench._threads import ThreadSeconds
from docs.generate import measurements
from tierstore import _core
from tierstore.errors import ConfigError


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    steady.add_arguments(parser)
    return steady.run(parser.parse_args(arguments))


SMALL = [
    "--rows=20000",
    "--tables=2",
    "--dim=16",
    "--batch-size=64",
    "--rounds=2",
    "--steps=30",
    "--run-in=30",
]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(steady, "_MOST_WARM_UP", 120)
    monkeypatch.setattr(steady, "_DEVICE_BYTES", 4 << 20)
    monkeypatch.setattr(steady, "_DEVICE_SECONDS", 0.05)


def test_every_row_comes_from_the_store(tmp_path, capsys, short):
    out = tmp_path / "out.json"
    assert run(*SMALL, "--hbm", "1/30,128KiB", "--json", str(out)) == 0
    result = json.loads(out.read_text())
    assert list(result["systems"]) == ["in-memory", "fbgemm", "tiered 1/30", "tiered 128KiB"]
    assert set(result["ratio"]) == {"tiered_vs_in_memory", "step_vs_bound", "in_memory_vs_fbgemm"}
    assert all(value > 0 for value in [*result["ratio"].values(), *result["device"].values()])
    for name in ("tiered 1/30", "tiered 128KiB"):
        figures = result["systems"][name]
        assert figures["equal_losses"]
        assert figures["misses"] > 0
        assert figures["new_rows"] == 0  # no row is made from its initial value: all were written
        assert figures["read_requests"] > 0
        assert 0 < figures["read_ahead_bytes"] <= 2 * 20000 * 80 // 10
        assert set(figures["bound_ms"]) == {"compute", "requests", "bytes", "cpu"}
    assert result["systems"]["tiered 128KiB"]["budget_bytes"] == 128 << 10
    told = capsys.readouterr()
    assert "every row written" in told.out
    assert "tiered 128KiB: budget 128 KiB; rows read ahead take " in told.out
    assert "warm-up" in told.err


def test_stores_of_smaller_rows_are_trained_beside_stores_of_float32(tmp_path, capsys, short):
    out = tmp_path / "out.json"
    options = ["--no-fbgemm", "--hbm=1/30", "--ssd-dtype=fp32,int8", "--state-dtype=fp32"]
    assert run(*SMALL, *options, "--json", str(out)) == 0
    systems = json.loads(out.read_text())["systems"]
    assert list(systems) == ["in-memory", "tiered 1/30", "tiered 1/30 int8"]
    wide, short_rows = systems["tiered 1/30"], systems["tiered 1/30 int8"]
    assert wide["equal_losses"]
    assert "equal_losses" not in short_rows
    assert short_rows["row_bytes"] == 32  # 16 weights, step and offset, the state
    assert short_rows["mean_loss"] == pytest.approx(short_rows["mean_loss_in_memory"], rel=0.01)
    assert short_rows["mean_loss"] != short_rows["mean_loss_in_memory"]
    assert short_rows["read_bytes"] < wide["read_bytes"]
    assert "rows of 32 bytes in the store; mean loss" in capsys.readouterr().out


@pytest.fixture
def threads_of_before():
    threads, others = _core.num_threads(), torch.get_num_threads()
    yield
    _core.set_num_threads(threads)
    torch.set_num_threads(others)


def test_systems_with_tiers_may_compute_with_other_threads(tmp_path, short, threads_of_before, monkeypatch):
    took = []
    monkeypatch.setattr(_steady, "use_threads", lambda count: took.append(count) or use_threads(count))
    out = tmp_path / "out.json"
    options = ["--no-fbgemm", "--threads=2", "--tiered-threads=1"]
    assert run(*SMALL, *options, "--json", str(out)) == 0
    systems = json.loads(out.read_text())["systems"]
    assert [figures["threads"] for figures in systems.values()] == [2, 1]
    assert systems["tiered 1/37"]["equal_losses"]
    assert took[-8:] == [2, 2, 1, 1, 1, 1, 2, 2]  # what comes before a turn, and the turn, in two rounds


def test_figures_are_recorded_for_the_page_of_measurements(tmp_path, short):
    out, folder = tmp_path / "steady.json", tmp_path / "results"
    folder.mkdir()
    options = ["--no-fbgemm", "--read-ahead", "0", "--window", "8"]
    assert run(*SMALL, *options, "--json", str(out)) == 0
    parser = argparse.ArgumentParser()
    record.add_arguments(parser)
    command = ["--command", "tierstore bench steady", "--subject", "Training", "--to", str(folder)]
    assert record.run(parser.parse_args([str(out), *command])) == 0
    page = measurements.page(folder)
    assert "## Training\n" in page
    assert "```text\ntierstore bench steady\n```" in page
    assert "| touched_share | 1 |" in page
    assert "| systems | in-memory | tiered 1/37 |" in page
    assert "| ratio.tiered_vs_in_memory |  | " in page
    assert "| read_ahead_bytes |  | 0 |" in page


def test_figures_keep_the_machine_that_they_name(tmp_path):
    """Those of a GPU that is lent are filed on another machine."""
    out, there = tmp_path / "gpu.json", {"cpu": "another", "cores": 16}
    out.write_text(json.dumps({"machine": there, "ratio": 0.9}))
    parser = argparse.ArgumentParser()
    record.add_arguments(parser)
    assert record.run(parser.parse_args([str(out), "--command", "x", "--to", str(tmp_path)])) == 0
    (filed,) = tmp_path.glob("*-gpu.json")
    assert json.loads(filed.read_text())["machine"] == there


def test_losses_that_differ_are_an_error(tmp_path, capsys, short, monkeypatch):
    monkeypatch.setattr(steady, "_result", lambda *_: {"systems": {"tiered": {"equal_losses": False}}})
    monkeypatch.setattr(steady, "_print", lambda _: None)
    assert run(*SMALL, "--no-fbgemm") == 1
    assert "its losses differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hbm", "1/0"], "--hbm 1/0: cannot divide by 0"),
        (["--hbm", "a/b"], "--hbm is 'a/b'"),
        (["--read-ahead", "2/1"], "--read-ahead 2/1: a fraction"),
        (["--read-ahead", "much"], "--read-ahead is 'much'"),
        (["--window", "soon"], "--window is a number of batches or auto"),
        (["--data", "nothing"], "unknown data"),
        (["--tiered-threads", "0"], "threads"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        run(*SMALL, *arguments)


def test_seconds_of_threads():
    begun, stop = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work, name="busy")
    thread.start()
    begun.wait()
    seconds = ThreadSeconds()
    threading.Event().wait(0.3)
    user, system = seconds.since()["busy"]
    stop.set()
    thread.join()
    assert user > 0.02
    assert system >= 0


class Scripted:
    """Training whose turns count what they are told, one entry of ``written`` per turn."""

    name, steps = "scripted", 0

    def __init__(self, written: list[float]) -> None:
        self.written, self.done = written, 0

    def train(self, steps: int) -> Turn:
        counted = {
            "misses": 100.0 * steps,
            "read_requests": 10.0 * steps,
            "written_bytes": steps * self.written[self.done],
        }
        self.done += 1
        return Turn(steps, steps, 1.0, {}, counted)


def test_warm_up_goes_on_until_compaction_writes_what_it_will_write():
    trainee = Scripted([50.0, 50.0, 50.0, 70.0, 90.0, 90.0, 90.0, 90.0, 90.0])
    assert warm_up(trainee, 10, 90, 0.02)
    assert trainee.done == 8  # the first four turns whose halves are alike


def test_warm_up_says_that_requests_still_change():
    trainee = Scripted([50.0 * 2**turn for turn in range(9)])
    assert not warm_up(trainee, 10, 90, 0.02)
