"""Parts of ``tierstore train`` on their own: budgets, comparison, display, interrupts, result files."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import tierstore
from tests import warm
from tierstore import data, optim
from tierstore.cache.shares import budget
from tierstore.cli import checkpoint
from tierstore.cli.compare import same_bits, touched_ids
from tierstore.cli.interrupt import GracefulInterrupt
from tierstore.cli.planned import PlanFile, Predicted, Sample, TableLine
from tierstore.cli.progress import Display, Progress
from tierstore.cli.train import add_parser
from tierstore.cli.trainer import Schedule
from tierstore.errors import ConfigError
from tierstore.placement import ShardingPlan, ShardingType, TablePlacement
from tierstore.result_file import JsonFile
from tierstore.simulation import Counts


class TestBudget:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("1/37", 1000),
            ("1 / 37", 1000),
            ("2.5%", 925),
            ("100%", 37000),
            ("64MiB", "64MiB"),
            ("4096", "4096"),
        ],
    )
    def test_fractions_are_of_the_tables_bytes(self, text: str, expected: int | str) -> None:
        assert budget(text, 37000, "--hbm") == expected

    @pytest.mark.parametrize("text", ["3/2", "0/4", "0%", "101%", "1/0"])
    def test_fractions_that_make_no_sense(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--hbm"):
            budget(text, 37000, "--hbm")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["train", *arguments])


class TestOptions:
    @pytest.mark.parametrize(
        ("arguments", "what"),
        [
            (["--depth", "deep"], "'deep' is neither a whole number nor 'auto'"),
            (["--window", "-1"], "'-1' is neither a whole number"),
            (["--batch-size", "0"], "'0' is not a whole number of at least 1"),
            (["--epochs", "1.5"], "'1.5' is not a whole number of at least 1"),
            (["--compare", "gpu"], "invalid choice: 'gpu'"),
        ],
    )
    def test_wrong_values_are_named(
        self, arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            parse(*arguments)
        assert stop.value.code == 2
        assert what in capsys.readouterr().err

    def test_the_options_are_these(self) -> None:
        """Frozen, so that growth is a visible change."""
        assert sorted(vars(parse())) == [
            *(
                "admission",
                "batch_size",
                "checkpoint",
                "checkpoint_every",
                "compare",
                "data",
                "data_path",
                "depth",
                "dim",
                "engine",
                "epochs",
                "hbm",
                "json",
                "lr",
            ),
            *(
                "max_rows",
                "optimizer",
                "plan",
                "policy",
                "read_ahead",
                "record",
                "record_rate",
                "resume",
                "rounding",
                "rows",
                "save_curves",
                "seed",
                "ssd",
                "ssd_dtype",
                "state_dtype",
                "steps",
                "store",
            ),
            *("tables", "tensorboard", "tensorboard_every", "threads", "uvm", "uvm_dtype", "window"),
        ]


class TestCompare:
    def test_touched_ids_are_distinct_and_all(self) -> None:
        dataset = data.load("synthetic:zipf:1.1", rows=500, tables=2)
        batches = list(Schedule(batch_size=64, steps=5).draw(dataset))
        ids = touched_ids(batches)
        for key in ids:
            seen = np.concatenate([batch.sparse[key].values().numpy() for batch in batches])
            assert ids[key].tolist() == sorted(set(seen.tolist()))

    def test_bits_count_not_values(self) -> None:
        zero, nan = torch.zeros(3), torch.tensor([1.0, math.nan])
        assert same_bits(nan, nan.clone())
        assert not same_bits(zero, -zero)
        assert not same_bits(zero, zero.double())
        assert not same_bits(zero, zero.reshape(3, 1))


class TestSchedule:
    def test_steps_bound_the_batches(self) -> None:
        dataset = data.load("synthetic:zipf:1.1", rows=100, tables=1)
        schedule = Schedule(batch_size=8, steps=5)
        whole = [batch.sparse.values().tolist() for batch in schedule.draw(dataset)]
        rest = [batch.sparse.values().tolist() for batch in schedule.draw(dataset, 3)]
        assert len(whole) == 5
        assert rest == whole[3:]
        assert list(schedule.draw(dataset, 9)) == []


class TestDisplay:
    line = Progress(126, 296, 129024, 4.0, 0.08, 0.44321, 0.69049, {"hbm": 0.931, "ssd": 0.41})

    def test_the_line(self) -> None:
        assert self.line.text() == (
            " 43% batch 126/296 · 32,256 examples/s · loss 0.4432 · AUC 0.6905"
            " · hits hbm 93.1% ssd 41.0% · stall 2%"
        )

    def test_a_narrow_line_keeps_hits_and_stall(self) -> None:
        texts = [
            self.line.text(),
            " 43% 126/296 · 32.3k/s · loss 0.4432 · AUC 0.6905 · hits hbm 93.1% ssd 41.0% · stall 2%",
            " 43% 126/296 · 32.3k/s · loss 0.4432 · hits hbm 93.1% ssd 41.0% · stall 2%",
            " 43% 126/296 · 32.3k/s · hits hbm 93.1% ssd 41.0% · stall 2%",
            " 43% 126/296 · hits hbm 93.1% ssd 41.0% · stall 2%",
            "126 · hits hbm 93.1% ssd 41.0% · stall 2%",
        ]
        for longer, text in pairwise([texts[0] * 2, *texts]):
            assert self.line.text(len(longer) - 1) == text
            assert self.line.text(len(text)) == text
        assert self.line.text(5) == texts[-1]

    @pytest.mark.parametrize("title", ["tiered", "in memory"])
    def test_a_terminal_of_80_columns_shows_hits_and_stall(
        self, title: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("TERM", "xterm")
        hits = {"hbm": 0.931, "uvm": 0.81, "ssd": 0.41}
        long = Progress(1_234_567, 2_950_000, 1 << 40, 1e6, 1.2e5, 0.44321, 0.69049, hits)
        stream = Terminal()
        with Display(title, stream) as display:
            display.show(long)
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
        (line,) = {line.strip() for line in re.split(r"[\r\n]", lines) if title in line}
        assert line.endswith("hits hbm 93.1% uvm 81.0% ssd 41.0% · stall 12%")
        assert len(line) <= 80

    def test_before_the_first_batch_nothing_divides_by_zero(self) -> None:
        text = Progress(0, None, 0, 0.0, 0.0, 0.0, 0.5).text()
        assert text == "batch 0 · 0 examples/s · loss 0.0000 · AUC 0.5000 · stall 0%"

    def test_without_a_terminal_plain_lines(self) -> None:
        stream = io.StringIO()
        with Display("tiered", stream) as display:
            assert not display.due()
            display.show(self.line)
            display.show(self.line)  # says nothing new
        assert stream.getvalue() == f"tiered: {self.line.text()}\n"


class TestInterrupt:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_the_first_signal_is_noted(self, number: int, capsys: pytest.CaptureFixture[str]) -> None:
        before = signal.getsignal(number)
        with GracefulInterrupt() as interrupt:
            assert interrupt.signal is None
            os.kill(os.getpid(), number)
            assert interrupt.signal == number
            assert signal.getsignal(number) == before  # the next one acts as always
        assert "once more to stop at once" in capsys.readouterr().err

    def test_the_second_ctrl_c_stops(self) -> None:
        # Where tests run as a background job, SIGINT is ignored from the start.
        inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with GracefulInterrupt():
                os.kill(os.getpid(), signal.SIGINT)
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, inherited)

    @pytest.mark.parametrize("says", [True, False], ids=["alone", "a rank"])
    def test_sigterm_does_not_end_a_rank_that_has_an_error_to_tell(self, says: bool) -> None:
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(ZeroDivisionError), GracefulInterrupt(says):
                raise ZeroDivisionError
            assert signal.getsignal(signal.SIGTERM) == (before if says else signal.SIG_IGN)
        finally:
            signal.signal(signal.SIGTERM, before)


class TestJsonFile:
    def test_replaces_whole(self, tmp_path: Path) -> None:
        file = tmp_path / "new" / "out.json"
        JsonFile(file).write({"auc": 0.5})
        assert json.loads(file.read_text()) == {"auc": 0.5}
        assert os.listdir(file.parent) == ["out.json"]

    def test_what_is_no_regular_file_is_written_to_and_stays(self, tmp_path: Path) -> None:
        pipe, link = tmp_path / "pipe", tmp_path / "link"
        os.mkfifo(pipe)
        link.symlink_to(tmp_path / "real.json")
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        for path in (pipe, link):
            JsonFile(path).write({"auc": 0.5})
        assert json.loads(os.read(reader, 100)) == {"auc": 0.5}
        os.close(reader)
        assert pipe.is_fifo()
        assert link.is_symlink()
        assert json.loads((tmp_path / "real.json").read_text()) == {"auc": 0.5}

    def test_removes_what_killed_writers_of_the_same_file_have_left(self, tmp_path: Path) -> None:
        file = tmp_path / "out[1].json"
        with subprocess.Popen(["true"]) as ended:
            pass
        names = [f".out[1].json.{ended.pid}.tmp", f".out[1].json.{os.getppid()}.tmp", ".out1.json.1.tmp"]
        for name in names:
            (tmp_path / name).touch()
        JsonFile(file).write({"auc": 0.5})  # the file of a process of another machine may be as new
        assert sorted(os.listdir(tmp_path)) == sorted([*names, file.name])
        for name in names:
            os.utime(tmp_path / name, (0, 0))
        JsonFile(file)
        assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], file.name])

    def test_a_folder_is_refused_before_training(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is a folder"):
            JsonFile(tmp_path)

    def test_ranks_check_one_path_at_a_time(self, tmp_path: Path) -> None:
        file = tmp_path / "out.json"
        check = f"""
from pathlib import Path
from tierstore.result_file import JsonFile
from tierstore.simulation import Counts
for _ in range(1000):
    JsonFile(Path({str(file)!r})).write({{"auc": 0.5}})
"""
        ranks = [subprocess.Popen([warm.python(), "-c", check], stderr=subprocess.PIPE) for _ in range(3)]
        errors = [rank.communicate()[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0, 0], errors
        assert json.loads(file.read_text()) == {"auc": 0.5}
        assert os.listdir(tmp_path) == ["out.json"]


def test_a_store_is_not_overwritten(tmp_path: Path) -> None:
    arguments = ["--store", str(tmp_path)]
    checkpoint.check(parse(*arguments))
    (tmp_path / "TIERSTORE.json").write_text("{}")
    with pytest.raises(ConfigError, match="already holds a store"):
        checkpoint.check(parse(*arguments))
    checkpoint.check(parse(*arguments, "--resume"))


def test_peak_rss_starts_again() -> None:
    """In a process of its own: threads of other tests may give memory back at any time."""
    program = """
import numpy as np
from tierstore.cli.memory import PeakRss
first = PeakRss()
block = np.ones(8 << 20)  # 64 MiB
grown = first.peak_bytes() - first.before_bytes
del block
second = PeakRss()
assert grown > 50 << 20, grown
assert second.peak_bytes() - second.before_bytes < 30 << 20
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_first_uses_of_rows_are_counted_beside_the_misses_that_a_plan_predicts() -> None:
    config = tierstore.TierConfig(hbm="64KiB", uvm="1MiB", ssd=0, policy="lru", overcommit=True)
    bag = tierstore.TieredEmbeddingBag(10**6, 16, config=config, optimizer=optim.SGD(lr=0.1), name="t")
    env = SimpleNamespace(traffic=SimpleNamespace(bytes_sent=0))
    trainer: Any = SimpleNamespace(embeddings=bag, batches=0, ranks=SimpleNamespace(env=env))
    for first in range(0, 2000, 100):
        bag(torch.arange(first, first + 100).view(10, 10)).sum().backward()
    begin = Sample.of(trainer)
    assert begin.tables == {"t": Counts(2000, 2000, 0, 2000)}
    for first in (0, 5000):  # lru has dropped the oldest rows
        bag(torch.arange(first, first + 100).view(10, 10)).sum().backward()
    end = replace(Sample.of(trainer), batches=2)
    assert end.tables == {"t": Counts(2200, 2200, 0, 2100)}
    plan = ShardingPlan((TablePlacement("t", ShardingType.TABLE_WISE, ()),), 1, 1)
    found = Predicted.measured(PlanFile(plan), 10, [(begin, end)])
    assert found is not None
    assert found.tables == (TableLine("t", 0, None, 100, None, 100, 50, None, 0),)
    with io.StringIO() as text:
        found.print(Console(file=text, width=80))
        assert "first uses of rows" in text.getvalue()
    bag.close()
