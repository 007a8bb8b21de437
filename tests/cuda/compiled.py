"""Shared libraries of csrc/cuda/tests, which g++ compiles once per source."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FLAGS = ["-std=c++20", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC"]
_FLAGS += ["-fno-gnu-unique"]  # else two libraries in one process share the emulator, and the kernels of one
_LEVELS = {"emulated": "-O0"}  # it takes longer to compile than to run
_OBJECTS = {"emulated": ["some_layouts"], "fake_driver": ["some_layouts"]}
"""What libraries have from other files: compiled once, since it takes longest."""


@functools.cache
def shared_library(name: str) -> Path:
    """Compile csrc/cuda/tests/``name``.cc, unless these sources were compiled before."""
    return _made(name, ".so", "-shared", *map(_object, _OBJECTS.get(name, [])))


def _object(name: str) -> Path:
    return _made(name, ".o", "-c")


def _made(name: str, suffix: str, *inputs: str | Path) -> Path:
    """Return what the compiler makes of ``name``.cc and ``inputs``."""
    target = ROOT / "build" / "cuda" / f"{name}-{_digest()}{suffix}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(f"{suffix}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling it
        if not target.exists():
            _compile(ROOT / "csrc" / "cuda" / "tests" / f"{name}.cc", target, inputs)
    return target


@functools.cache
def _digest() -> str:
    """Return a hash of all that the libraries are made of."""
    sources = [
        *sorted(path for path in (ROOT / "csrc" / "cuda").glob("**/*") if path.is_file()),
        *sorted((ROOT / "csrc/kernels").glob("*.h")),
    ]
    read = [source.read_bytes() for source in (*sources, Path(__file__))]
    return hashlib.sha256(b"".join(read)).hexdigest()[:16]


def _compile(source: Path, target: Path, inputs: Sequence[str | Path]) -> None:
    made = target.with_suffix(f"{target.suffix}.made")
    compiler = os.environ.get("CXX", "g++").split()
    level = _LEVELS.get(source.stem, "-O1")
    command = [*compiler, level, *_FLAGS, "-I", ROOT / "csrc", source, *inputs, "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made.rename(target)
