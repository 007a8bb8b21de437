"""Runs the checks that want a GPU, each function in a process of its own: ``python -m tests.cuda.check_gpu``.

A check that hangs, crashes or breaks the GPU's context takes no other down. The outcome of each is written
when it ends. ``--needs`` says only what this machine lacks to build and run them; that needs no package.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

from tests.cuda import pack

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = {"rocksdict", "lmdb"}
"""Dependencies of engines that nothing else needs."""
FOR_CHECKS = ["setuptools>=77", "pybind11>=3.0", "pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100"]
SECONDS = 180
"""Of one function, with all of its parameters: the longest compiles 156 parts of the kernels first, which
takes 60 s of a processor by NVRTC 13.0."""
LEAST_SECONDS = 30
"""Of a function after others have hung: each of these divides the time by three, since what is hung once
hangs again, and must not take the time of all others."""
JOBS = min(8, os.cpu_count() or 1)
"""Functions at a time: most of their time is the host's."""
ALONE = (
    "test_memory_comes_back_when_tables_are_closed",
    "test_growth_beyond_the_gpu_is_named_and_keeps_the_rows",
)
"""Functions that measure the GPU's free memory, or take all of it: they run after the others, one at a
time."""
SHARE_OF_OTHERS = 0.85
"""Of the time, for the functions before those: else checks that hang would leave these nothing."""
LONGEST_FIRST = (
    "test_kernels_have_the_bits_of_the_host",
    "test_tables_of_16_bits_have_the_bits_of_the_host",
    "test_every_optimizer_has_the_bits_of_the_host",
    "test_tiers_have_the_bits_and_hits_of_the_host",
    "test_a_compiled_model_trains_the_same_rows",
)
"""Functions that take longest begin first, so that they end with the others. The first two use most of the
kernels, and must compile what nobody brought."""
_SAYING = 3


def requirements() -> list[str]:
    """Return what the package needs, as ``name>=version``."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    return [*re.findall(r'"([^"]+)"', block[1]), *FOR_CHECKS]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


def lacks(version_of: Callable[[str], str] = metadata.version, *, compiles: bool = True) -> list[str]:
    """Return what must be brought here, in words; nothing where the package can be built and checked.

    ``compiles``: no compiled core was brought.
    """
    found = []
    for requirement in requirements():
        name, least = requirement.split(">=")
        if name in OPTIONAL:
            continue
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            found.append(f"the Python package {requirement} is missing")
            continue
        if _numbers(version) < _numbers(least):
            found.append(f"the Python package {name} is {version}; {requirement} is needed")
    if not compiles:
        return found
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        found.append(f"the headers of {sys.executable} are missing")
    if shutil.which(os.environ.get("CXX", "g++").split()[0]) is None:
        found.append("there is no C++ compiler")
    return found


IMPORTED = ("numba", "numpy", "psutil", "pybind11", "scipy", "safetensors", "torch", "yaml")


def importing(packages: Sequence[str]) -> list[str]:
    """Return the command that imports ``packages``, torch among them, and prints the CUDA of torch."""
    return [sys.executable, "-c", f"import {', '.join(packages)}; print(torch.version.cuda)"]


def broken(command: Sequence[str] = tuple(importing(IMPORTED))) -> list[str]:
    """Return what is here and of no use, in words: packages that do not go together, such as NumPy and numba,
    and torch for CPUs."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return [f"the Python packages cannot be imported: {said[-1]}"]
    return ["torch is built for CPUs alone"] if done.stdout.strip() == "None" else []


def checks() -> list[str]:
    """Return the test functions that want a GPU, as pytest names them."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if re.search(r"^pytestmark = .*pytest\.mark\.cuda", text, re.MULTILINE):
            file = path.relative_to(ROOT)
            found += [f"{file}::{name}" for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)]
    return found


def run(
    names: Sequence[str], out: Path, minutes: float, command: Sequence[str], jobs: int = 1
) -> dict[str, str]:
    """Run each check by ``command``, ``jobs`` at a time; write its output and all outcomes to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, str] = {}
    started, hung, lock = time.monotonic(), 0, threading.Lock()

    def one(name: str, share: float = 1.0) -> None:
        nonlocal hung
        end = started + 60 * minutes * share
        begin = time.monotonic()
        left = min(SECONDS, max(SECONDS / 3**hung, LEAST_SECONDS), end - begin)
        function = name.partition("::")[2]
        outcome = (
            "not begun: no time was left"
            if left <= 0
            else _outcome([*command, name], left, out / f"{function}.txt")
        )
        with lock:
            outcomes[name] = outcome
            hung += any(word in outcome for word in ("not done", "Timeout"))
            (out / "checks.json").write_text(json.dumps(outcomes, indent=2) + "\n")
            print(f"{time.monotonic() - begin:6.1f} s  {function}: {outcome}", flush=True)

    alone = [name for name in names if name.partition("::")[2] in ALONE]
    others = sorted((name for name in names if name not in alone), key=_place)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(partial(one, share=SHARE_OF_OTHERS if alone else 1.0), others))
    for name in alone:
        one(name)
    return outcomes


def _place(name: str) -> int:
    function = name.partition("::")[2]
    return LONGEST_FIRST.index(function) if function in LONGEST_FIRST else len(LONGEST_FIRST)


def _outcome(command: Sequence[str], seconds: float, said: Path) -> str:
    with said.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            for number in (signal.SIGABRT, signal.SIGKILL):  # pytest says at the first one where it hangs
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(_SAYING)
            hangs = "" if process.returncode is not None else ", and hangs in the driver"
            return f"not done after {seconds:.0f} s{hangs}"
    lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
    missing = [line for line in lines if "want a GPU and did not run" in line]
    last = [*lines, *missing][-1].strip("= ") if lines else "no output"
    return last if code == 0 else f"FAILED ({code}): {last}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    whole = (
        f"for all checks; the {len(ALONE)} that need the whole GPU come last, and the others end at "
        f"{SHARE_OF_OTHERS:.0%}% of the time (default: 9)"
    )
    parser.add_argument("--needs", action="store_true", help="say what this machine lacks, and end")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), metavar="DIR", help="(default: gpu-out)")
    parser.add_argument("--minutes", type=float, default=9.0, metavar="N", help=whole)
    parser.add_argument("--only", default="", metavar="TEXT", help="checks whose names have this text")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"at a time (default: {JOBS})")
    given = parser.parse_args(arguments)
    missing = lacks(compiles=pack.core() is None) or broken()
    for line in missing:
        print(line)
    if given.needs or missing:
        return 1 if missing else 0
    names = [name for name in checks() if given.only in name]
    pytest = [sys.executable, "-m", "pytest", "-m", "cuda", "-v", "--timeout-method=thread"]
    before = pack.cached()
    outcomes = run(names, given.out, given.minutes, pytest, given.jobs)
    failed = [name for name, outcome in outcomes.items() if " passed" not in outcome or "FAILED" in outcome]
    if compiled := pack.cached() - before:
        print(f"{len(compiled)} parts of the kernels were compiled here, and stay in the user's cache")
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} functions passed; outputs are in {given.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
