"""``tierstore bench gpu``: its parts on a fake GPU, which says nothing of speed, and what it says without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench import _gpu_parts as parts
from bench import gpu
from tests.cuda.fake_torch import fake_torch
from tierstore.cli.main import main
from tierstore.cuda.driver import Driver
from tierstore.errors import GpuError

SIZES = parts.Sizes(rows=200, dim=8, batch_size=10, max_rows=500, steps=4)


def has_gpu() -> bool:
    try:
        Driver().open_device(0)
    except GpuError:
        return False
    return True


def wall(call: Callable[[], object], finish: Callable[[], object]) -> float:
    call()
    finish()
    return 1.0


def test_without_a_gpu_it_says_what_did_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if has_gpu():
        return
    file = tmp_path / "gpu.json"
    assert main(["bench", "gpu", "--json", str(file)]) == 1
    assert "5 parts with 20 checks want a GPU and did not run: no NVIDIA driver" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["gpu"] is None
    assert result["parts"] == {}
    assert result["not_run"]["parts"] == list(parts.PARTS)


def test_bits_are_compared() -> None:
    with fake_torch("random", seed=2):
        assert parts.bits(SIZES) == {"checks": 20, "equal_to_the_cpu": 20}


@pytest.mark.parametrize("name", ["link", "kernels"])
def test_a_part_has_its_figures(name: str) -> None:
    ceilings = {"copy_gb_per_s": 1.0, "to_gpu_gb_per_s": 1.0, "from_gpu_gb_per_s": 1.0}
    with fake_torch("random", seed=2), mock.patch.object(parts, "copies", return_value=ceilings):
        found = parts.link(SIZES) if name == "link" else parts.kernels(SIZES, wall)
    assert all(value > 0 for value in found.values())
    expected = {"link": {"pinned.up_gb_per_s", "managed.both_gb_per_s", "ratio.both"}}
    assert expected.get(name, {"gather_gb_per_s", "ratio.pooled", "ratio.update"}) <= found.keys()


def test_a_training_takes_steps() -> None:
    with fake_torch("random", seed=2), mock.patch.object(torch.cuda, "synchronize"):
        found = parts.training(SIZES)
    assert {"hbm.ms_per_step", "uvm.ms_per_step", "ratio.uvm_ssd_vs_hbm"} <= found.keys()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import time; time.sleep(60)", "not done after 1 s"),
        ("raise SystemExit('out of memory')", "out of memory"),
        ("print('hello'); print('{\"a\": 1.5}')", None),
    ],
)
def test_a_part_that_fails_is_said(code: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse
    import subprocess
    import sys

    plain = subprocess.run
    monkeypatch.setattr(
        gpu.subprocess, "run", lambda command, **more: plain([sys.executable, "-c", code], **more)
    )
    short = {"copies": parts.Part("copies", 1 if "sleep" in code else 30, parts.copies)}
    monkeypatch.setattr(gpu, "PARTS", short)
    found = gpu._run_part("copies", argparse.Namespace(**vars(SIZES)))
    if expected is None:
        assert found["a"] == 1.5
    else:
        assert expected in found["failed"]
