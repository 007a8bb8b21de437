"""Shared libraries of csrc/cuda/tests, which g++ compiles once per source."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FLAGS = ["-std=c++20", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
_FLAGS += ["-fno-gnu-unique"]  # else two libraries in one process share the emulator, and the kernels of one


@functools.cache
def shared_library(name: str) -> Path:
    """Compile csrc/cuda/tests/``name``.cc, unless these sources were compiled before."""
    sources = [
        *sorted(path for path in (ROOT / "csrc" / "cuda").glob("**/*") if path.is_file()),
        *sorted((ROOT / "csrc/kernels").glob("*.h")),
    ]
    read = [source.read_bytes() for source in (*sources, Path(__file__))]
    digest = hashlib.sha256(b"".join(read)).hexdigest()[:16]
    target = ROOT / "build" / "cuda" / f"{name}-{digest}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling it
        if not target.exists():
            _compile(ROOT / "csrc" / "cuda" / "tests" / f"{name}.cc", target)
    return target


def _compile(source: Path, target: Path) -> None:
    made = target.with_suffix(".made")
    level = "-O0" if source.stem == "emulated" else "-O1"  # it takes longer to compile than to run
    compiler = os.environ.get("CXX", "g++").split()
    command = [*compiler, level, *_FLAGS, "-I", ROOT / "csrc", source, "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made.rename(target)
