"""The runner of checks that want a GPU, on programs in their place; what a bare machine lacks."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
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


def test_checks_need_no_package_of_other_tests() -> None:
    """``pytest -m cuda`` where packages that tierstore is compared with are missing."""
    program = """
import sys
for name in ("torchrec", "fbgemm_gpu", "lightning", "accelerate", "sklearn", "rocksdict", "lmdb"):
    sys.modules[name] = None
import pytest
raise SystemExit(pytest.main(["-m", "cuda", "--collect-only", "-p", "no:cacheprovider"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert " error" not in done.stdout, done.stdout
    wanted = re.search(r"(\d+) checks want a GPU and did not run", done.stdout)
    collected = re.search(r"(\d+) tests collected", done.stdout)
    found = wanted or collected
    assert found, done.stdout + done.stderr
    assert int(found[1]) > 150


PROGRAMS = {
    "t::passes": "print('== 3 passed in 1s ==')",
    "t::crashes": "import os; print('half', flush=True); os.abort()",
    "t::hangs": "import faulthandler as f, time; f.enable(); print('begun', flush=True); time.sleep(60)",
    "t::times_out": "print('+++ Timeout +++'); raise SystemExit(1)",
    "t::hangs_too": "import time; time.sleep(60)",
    "t::fails": "print('1 failed, 2 passed'); raise SystemExit(1)",
    "t::wants": "print('1 checks want a GPU and did not run: why\\n1 deselected'); raise SystemExit(5)",
    "t::last": "print('1 passed')",
}


def test_a_check_that_hangs_or_crashes_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_gpu, "SECONDS", 3)
    monkeypatch.setattr(check_gpu, "LEAST_SECONDS", 2)
    program = f"import sys; exec({PROGRAMS!r}[sys.argv[1]])"
    out = tmp_path / "out"
    found = check_gpu.run(list(PROGRAMS), out, 1, [sys.executable, "-c", program])
    assert found == json.loads((out / "checks.json").read_text())
    assert found["t::passes"] == "3 passed in 1s"
    assert found["t::crashes"].startswith("FAILED (-6): half")
    assert found["t::hangs"] == "not done after 3 s"
    assert found["t::hangs_too"] == "not done after 2 s"
    assert found["t::fails"] == "FAILED (1): 1 failed, 2 passed"
    assert found["t::wants"] == "FAILED (5): 1 checks want a GPU and did not run: why"
    assert found["t::last"] == "1 passed"
    said = (out / "hangs.txt").read_text()
    assert said.startswith("begun\n")
    assert 'File "<string>", line 1 in <module>' in said  # where it hangs
    found = check_gpu.run(["t::passes"], out, 0, [sys.executable, "-c", program])
    assert found == {"t::passes": "not begun: no time was left"}


def test_checks_run_beside_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at a time but those that take the whole GPU, which begin when the others have ended."""
    now, most, seen = [0], [0], {}

    def outcome(command: list[str], seconds: float, said: Path) -> str:
        now[0] += 1
        most[0] = max(most[0], now[0])
        if command[-1] != "t::whole":
            together.wait(20)
        seen[command[-1]] = now[0]
        now[0] -= 1
        return "1 passed"

    together = threading.Barrier(3)
    monkeypatch.setattr(check_gpu, "_outcome", outcome)
    monkeypatch.setattr(check_gpu, "ALONE", ("whole",))
    found = check_gpu.run(["t::whole", "t::a", "t::b", "t::c"], tmp_path, 1, [], jobs=3)
    assert set(found.values()) == {"1 passed"}
    assert most == [3]
    assert seen["t::whole"] == 1
    assert list(found)[-1] == "t::whole"


def test_the_longest_begin_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def outcome(command: list[str], seconds: float, said: Path) -> str:
        begun.append(command[-1])
        return "1 passed"

    monkeypatch.setattr(check_gpu, "_outcome", outcome)
    check_gpu.run(check_gpu.checks(), tmp_path, 1, [])
    functions = [name.partition("::")[2] for name in begun]
    longest, alone = check_gpu.LONGEST_FIRST, check_gpu.ALONE
    assert functions[: len(longest)] == list(longest)
    assert set(functions[-len(alone) :]) == set(alone)
    assert sorted(begun) == sorted(check_gpu.checks())


@pytest.mark.parametrize("whole", [["t::whole"], []])
def test_those_that_need_the_whole_gpu_have_time_left(
    whole: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever hangs before them; without them the others get their time."""
    now, given = [0.0], {}

    def outcome(command: list[str], seconds: float, said: Path) -> str:
        given[command[-1]] = seconds
        now[0] += seconds
        return f"not done after {seconds:.0f} s"

    monkeypatch.setattr(check_gpu, "_outcome", outcome)
    monkeypatch.setattr(check_gpu, "ALONE", ("whole",))
    monkeypatch.setattr(check_gpu.time, "monotonic", lambda: now[0])
    found = check_gpu.run([*whole, *(f"t::{number}" for number in range(20))], tmp_path, 9, [])
    hang = sum(seconds for name, seconds in given.items() if name != "t::whole")
    assert hang == pytest.approx(9 * 60 * (0.85 if whole else 1))
    assert found["t::19"] == "not begun: no time was left"
    if whole:
        assert given["t::whole"] == 30


def test_those_that_hang_leave_time_for_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nine minutes are enough for some check of every file, whichever hang."""
    given: list[float] = []

    def outcome(command: object, seconds: float, said: Path) -> str:
        given.append(seconds)
        return f"not done after {seconds:.0f} s" if len(given) < 9 else "1 passed"

    monkeypatch.setattr(check_gpu, "_outcome", outcome)
    check_gpu.run([f"t::{number}" for number in range(20)], tmp_path, 9, [])
    assert [round(seconds) for seconds in given] == [180, 60, *[30] * 18]
    assert sum(given[:9]) <= 9 * 60


def test_what_is_here_and_of_no_use_is_said() -> None:
    def said(program: str) -> list[str]:
        return check_gpu.broken([sys.executable, "-c", program])

    assert said("print('13.0')") == []
    assert said("print(None)") == ["torch is built for CPUs alone"]
    assert said("raise ImportError('Numba needs NumPy 2.3 or less. Got NumPy 2.5.')") == [
        "the Python packages cannot be imported: ImportError: Numba needs NumPy 2.3 or less. Got NumPy 2.5."
    ]
    installed = [name for name in check_gpu.IMPORTED if importlib.util.find_spec(name)]
    assert set(check_gpu.IMPORTED) - set(installed) <= {"pybind11"}  # which only builds need
    assert check_gpu.broken(check_gpu.importing(installed)) in ([], ["torch is built for CPUs alone"])
    assert (
        "ModuleNotFoundError: No module named 'no_such'"
        in check_gpu.broken(check_gpu.importing([*installed, "no_such"]))[0]
    )


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


def test_a_core_that_was_brought_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert check_gpu.lacks(lambda name: "999")[-1] == "there is no C++ compiler"
    assert check_gpu.lacks(lambda name: "999", compiles=False) == []


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
