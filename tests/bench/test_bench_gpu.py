"""``tierstore bench gpu``: a part that fails or hangs takes no other down, and what is said without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench._gpu_parts import PARTS, Part
from bench._gpu_targets import comparisons, targets
from tierstore.cli.main import main
from tierstore.cuda.driver import Driver
from tierstore.errors import GpuError


def has_gpu() -> bool:
    try:
        Driver().open_device(0)
    except GpuError:
        return False
    return True


def test_without_a_gpu_it_says_what_did_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if has_gpu():
        return
    file = tmp_path / "gpu.json"
    assert main(["bench", "gpu", "--json", str(file)]) == 1
    expected = "14 parts with 20 checks want a GPU and did not run: GpuError: no NVIDIA driver"
    assert expected in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["gpu"] is None
    assert result["parts"] == {}
    assert ["open", *result["not_run"]["parts"]] == list(PARTS)


def test_all_deadlines_are_eight_minutes() -> None:
    assert sum(part.seconds for part in PARTS.values()) <= 480


@pytest.mark.parametrize("wrong", [["--parts", "bit"], ["--parts", ""]])
def test_wrong_arguments(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", *wrong]) == 2
    assert f"--parts: there is no {wrong[1]!r}; there are open, " in capsys.readouterr().err


OPENED = 'print(\'{"gpu": "G", "max_rows": 7, "table_rows": 9, "scale": 0.25}\')'
SLEEPS = "import faulthandler as f, time; f.enable(); print('{\"a\": 1}', flush=True); "
SLEEPS += "print('{\"a\"', flush=True); time.sleep(60)"

Ran = Callable[..., dict[str, Any]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ran:
    """Run the benchmark with programs in the place of parts; return its result."""

    def run(programs: dict[str, str], seconds: int = 30, more: tuple[str, ...] = ()) -> dict[str, Any]:
        short = {name: Part(name, seconds, lambda _: iter(())) for name in programs}
        monkeypatch.setattr(gpu, "_LEAST", 1.0)
        plain = gpu.subprocess.Popen

        def start(command: list[str], **options: Any) -> Any:
            return plain([sys.executable, "-c", programs[command[3]], *command[4:]], **options)

        monkeypatch.setattr(gpu, "PARTS", short)
        monkeypatch.setattr(gpu.subprocess, "Popen", start)
        file = tmp_path / "gpu.json"
        parser = argparse.ArgumentParser()
        gpu.add_arguments(parser)
        gpu.run(parser.parse_args(["--parts", ",".join(programs), "--json", str(file), *more]))
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    return run


def test_a_part_that_fails_or_hangs_leaves_the_others(ran: Ran) -> None:
    programs = {
        "open": OPENED,
        "bits": SLEEPS,
        "kernels": "print('{\"a\": 2}'); raise SystemExit('out of memory')",
        "link": "import faulthandler as f, os; f.enable(); os.kill(os.getpid(), 11)",
        "batches": "print('hello'); print('{\"a\": 1.5}')",
        "hbm": "import json, sys; print(json.dumps({'given': json.loads(sys.argv[1])['max_rows']}))",
    }
    parts = ran(programs, seconds=3)["parts"]
    assert (parts["bits"]["a"], parts["bits"]["failed"]) == (1, "not done after 3 s")
    assert (parts["kernels"]["a"], parts["kernels"]["failed"]) == (2, "out of memory")
    assert parts["link"]["failed"] == "exit code -11"
    for name in ("bits", "link"):  # where it hangs, and where it has crashed
        assert any("line 1 in <module>" in line for line in parts[name]["where"])
    assert parts["batches"]["a"] == 1.5
    assert "failed" not in parts["batches"]
    assert parts["hbm"]["given"] == 7  # the tables that fit


def test_all_parts_end_in_time(ran: Ran) -> None:
    begin = time.monotonic()
    parts = ran({"open": OPENED, "bits": SLEEPS, "kernels": OPENED}, 60, ("--minutes", "0.05"))["parts"]
    assert time.monotonic() - begin < 30
    assert parts["bits"]["failed"].startswith("not done after")
    assert parts["kernels"]["failed"] == "not begun: no time was left"


def test_what_a_part_starts_ends_with_it(ran: Ran, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time; time.sleep(3); open({str(alive)!r}, 'w')"
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    begin = time.monotonic()
    ran({"open": OPENED, "bits": starts})
    time.sleep(max(0.0, begin + 4 - time.monotonic()))
    assert not alive.exists()


def test_a_gpu_that_does_not_open_in_time_is_said(ran: Ran) -> None:
    result = ran({"open": SLEEPS, "bits": OPENED}, seconds=3)
    assert result["not_run"] == {"parts": ["bits"], "checks": 0, "why": "not done after 3 s"}


def test_targets_are_ratios_of_one_run() -> None:
    parts = {
        "kernels": {"ratio.gather_vs_copy": 0.9, "ratio.pooled_vs_copy": 0.8},
        "hbm": {"bound.ms": 3.0, "embedding.ms_per_step": 4.0, "dlrm.ms_per_step": 9.0},
        "uvm": {"dlrm.ms_per_step": 12.0, "dcnv2.ms_per_step": 1.0},
        "uvm_ssd": {"dlrm.ms_per_step": None, "failed": "not done"},
        "planning": {"16_threads.planned_ms": 16.0},
    }
    found = targets(parts)
    assert {name: one["ratio"] for name, one in found.items()} == {
        "gather_vs_copy": 0.9,
        "pooled_vs_copy": 0.8,
        "rows_both_ways_vs_link": None,
        "hbm_step_vs_fbgemm": None,
        "hbm_step_vs_bandwidth": 0.75,
        "uvm_vs_hbm": 0.75,
        "uvm_ssd_vs_hbm": None,
        "plan_8_ms_vs_plan": 0.5,
    }
    assert [one["met"] for one in found.values()] == [True, False, None, None, True, False, None, False]
    assert comparisons(parts) == {"ratio.dlrm.uvm_vs_hbm": 0.75}
    found = targets({**parts, "fbgemm": {"embedding.ms_per_step": 5.0}})
    assert found["hbm_step_vs_fbgemm"] == {"ratio": 1.25, "target": 1.0, "met": True}
    assert "hbm_step_vs_bandwidth" not in found
