"""Trainings killed with SIGKILL, at random moments and at every operation of a save, end as undisturbed ones.

``TIERSTORE_CRASH_KILLS`` is the number of processes killed at random moments (``make crash-test``: 1,000),
shared among the engines.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.checkpoint import killed_runs

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("TIERSTORE_CRASH_KILLS", "32"))
THOROUGH = "TIERSTORE_CRASH_KILLS" in os.environ
SHARES = {"native": 0.5, "rocksdb": 0.25, "lmdb": 0.25}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: a killed process loses nothing that it gave to the kernel."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tierstore-test-") as path:
        yield Path(path)


def program(module: str, *arguments: object) -> str:
    """Output of a program of this folder, which forks what it kills."""
    command = [warm.python(), "-m", f"tests.checkpoint.{module}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return done.stdout


@pytest.mark.timeout(7200 if THOROUGH else 300)
@pytest.mark.parametrize("engine", SHARES)
def test_at_random_moments(engine: str, folder: Path) -> None:
    kills = round(KILLS * SHARES[engine])
    said = program("killed_runs", folder / "runs", engine, kills, random.randrange(1 << 32))
    assert int(said.split()[0]) >= kills


@pytest.mark.parametrize(
    ("engine", "stores"),
    [("native", 2), *([("native", 1), ("rocksdb", 2), ("lmdb", 2)] if THOROUGH else [])],
)
def test_at_every_operation_of_a_save(engine: str, stores: int, folder: Path) -> None:
    every = 1 if THOROUGH else 3
    said = program("killed_saves", folder / "saves", engine, stores, every)
    assert int(said.split()[0]) >= 30 // every


def test_at_every_operation_of_a_save_that_abandons_checkpoints(folder: Path) -> None:
    every = 1 if THOROUGH else 6
    said = program("killed_branches", folder / "branches", "native", 2, every)
    assert int(said.split()[0]) >= 40 // every


def test_whole_command_lines(folder: Path) -> None:
    """As users run it, from the start of the interpreter, also while it is still importing."""
    (folder / "calm").mkdir()
    (folder / "killed").mkdir()
    run_to_its_end(folder / "calm", warm.python())
    for seconds in (1.0, 3.5):
        with start(folder / "killed") as process:
            time.sleep(seconds * random.uniform(0.5, 1.5))
            process.kill()
    run_to_its_end(folder / "killed", warm.python())
    assert killed_runs.result(folder / "killed") == killed_runs.result(folder / "calm")


def start(folder: Path, python: str = sys.executable) -> subprocess.Popen:
    run = ["--checkpoint", str(folder / "run"), "--json", str(folder / "out.json")]
    command = [python, "-m", "tierstore.cli", "train", *killed_runs.DATA, *killed_runs.TIERS, *run]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_to_its_end(folder: Path, python: str) -> None:
    with start(folder, python) as process:
        said = process.communicate()[0]
    assert process.returncode == 0, said
