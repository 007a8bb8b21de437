"""Shared libraries of csrc/cuda/tests, which g++ compiles once per source."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]


@functools.cache
def shared_library(name: str) -> Path:
    """Compile csrc/cuda/tests/``name``.cc, unless these sources were compiled before."""
    sources = [
        *sorted(path for path in (ROOT / "csrc" / "cuda").glob("**/*") if path.is_file()),
        *sorted((ROOT / "csrc/kernels").glob("*.h")),
    ]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    target = ROOT / "build" / "cuda" / f"{name}-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "g++").split()
        source = ROOT / "csrc" / "cuda" / "tests" / f"{name}.cc"
        command = [*compiler, *_FLAGS, "-I", ROOT / "csrc", source, "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        made.rename(target)
    return target
