"""The runner of checks that want a GPU, on programs in their place; what a bare machine lacks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.cuda import check_gpu

ROOT = check_gpu.ROOT


def test_every_check_of_a_gpu_is_run() -> None:
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.cuda" in path.read_text()]
    files = {ROOT / name.partition("::")[0] for name in check_gpu.checks()}
    assert files == set(marked) - {Path(__file__).resolve()}
    assert "tests/cuda/test_on_gpu.py::test_kernels_have_the_bits_of_the_host" in check_gpu.checks()


PROGRAMS = {
    "t::passes": "print('== 3 passed in 1s ==')",
    "t::crashes": "import os; print('half', flush=True); os.abort()",
    "t::hangs": "import time; print('begun', flush=True); time.sleep(60)",
    "t::fails": "print('1 failed, 2 passed'); raise SystemExit(1)",
    "t::last": "print('1 passed')",
}


def test_a_check_that_hangs_or_crashes_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_gpu, "SECONDS", 3)
    program = f"import sys; exec({PROGRAMS!r}[sys.argv[1]])"
    out = tmp_path / "out"
    found = check_gpu.run(list(PROGRAMS), out, 1, [sys.executable, "-c", program])
    assert found == json.loads((out / "checks.json").read_text())
    assert found["t::passes"] == "3 passed in 1s"
    assert found["t::crashes"].startswith("FAILED (-6): half")
    assert found["t::hangs"] == "not done after 3 s"
    assert found["t::fails"] == "FAILED (1): 1 failed, 2 passed"
    assert found["t::last"] == "1 passed"
    assert (out / "hangs.txt").read_text() == "begun\n"
    found = check_gpu.run(["t::passes"], out, 0, [sys.executable, "-c", program])
    assert found == {"t::passes": "not begun: no time was left"}


def test_what_is_missing_is_said() -> None:
    assert check_gpu.lacks(lambda name: "999") == []

    def version_of(name: str) -> str:
        if name in ("psutil", "lmdb", "rocksdict"):
            raise metadata.PackageNotFoundError(name)
        return {"setuptools": "68.1.2", "torch": "2.11.0+cu130"}.get(name, "999.1")

    assert check_gpu.lacks(version_of) == [
        "the Python package psutil>=5.9 is missing",
        "the Python package setuptools is 68.1.2; setuptools>=77 is needed",
    ]


def test_needs_are_said_without_any_package() -> None:
    """The runner begins before anything is installed."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tests.cuda.check_gpu", "--needs"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the Python package torch>=2.11 is missing" in done.stdout


def test_targets_of_make_stay_within_ten_minutes() -> None:
    targets = ["gpu-build", "gpu-check", "gpu-bench"]
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True)
    limits = [int(limit) for limit in re.findall(r"timeout -k 10 (\d+) ", done.stdout)]
    assert len(limits) == len(targets)
    assert max(limits) <= 590
    for part in ("--no-index", "tests.cuda.check_gpu --minutes 9", "bench gpu --json"):
        assert part in done.stdout
