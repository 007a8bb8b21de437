"""The source of the GPU kernels as NVRTC takes it: one file, and headers that it includes by name."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAIN = "cuda/kernels.cu"
HEADERS = (
    "cuda/args.h",
    "cuda/batch.cuh",
    "cuda/device.cuh",
    "cuda/init.cuh",
    "cuda/lookup.cuh",
    "cuda/optimizer.cuh",
    "cuda/rows.cuh",
    "cuda/sort.cuh",
    "cuda/update.cuh",
    "cuda/weights.cuh",
    "kernels/inline.h",
    "kernels/normal.h",
    "kernels/philox.h",
)
STAND_INS = ("cmath", "cstdint", "cstring")
"""Standard headers, which NVRTC does not have; ours are in cuda/nvrtc."""


@dataclass(frozen=True)
class KernelSource:
    """``headers``: the text of each header by the name that ``#include`` has for it."""

    main: str
    headers: Mapping[str, str]

    @functools.cached_property
    def digest(self) -> str:
        """The hash of all of the source."""
        parts = [self.main, *(f"{name}\0{text}" for name, text in sorted(self.headers.items()))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def folder() -> Path:
    """Return the folder of the source: in the package where it was installed from a wheel, else csrc."""
    installed = Path(__file__).parent / "kernel_source"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "csrc"


@functools.cache
def kernel_source() -> KernelSource:
    """Return the source that belongs to this release."""
    root = folder()
    headers = {name: (root / name).read_text(encoding="utf-8") for name in HEADERS}
    headers |= {name: (root / "cuda/nvrtc" / name).read_text(encoding="utf-8") for name in STAND_INS}
    return KernelSource((root / MAIN).read_text(encoding="utf-8"), headers)
