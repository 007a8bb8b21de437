"""Measures the drive alone: benchmarks compare with these figures, and a topology has them for a host's
SSD."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from tierstore.store.native import reads_per_second

Figure = TypeVar("Figure")

_PAGE = 4096
_SIZES = (4096, 8192, 16384, 32768, 65536)
_WRITE_BYTES = 2 << 20  # what the native store writes at a time


class Device:
    """A file on the stores' device, and raw loops on it, past the page cache."""

    def __init__(self, path: Path, size: int, seconds: float) -> None:
        self.path, self.size, self.seconds = path, size // _WRITE_BYTES * _WRITE_BYTES, seconds
        self.buffers = [mmap.mmap(-1, 2 * _WRITE_BYTES) for _ in range(2)]
        for buffer in self.buffers:
            buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer.write(np.random.default_rng(0).bytes(2 * _WRITE_BYTES))

    def measure(self) -> dict[str, float]:
        return {"write_bytes_per_s": self.writes(), "read_iops": self.reads()}

    def writes(self) -> float:
        """Measure the bytes per second of sequential direct writes: the better of one and two in flight."""
        return max(self._writes(1), self._writes(2))

    def _writes(self, in_flight: int) -> float:
        self.path.unlink(missing_ok=True)
        fd = os.open(self.path, os.O_CREAT | os.O_WRONLY | direct_flag(self.path.parent))
        places = iter(range(0, self.size, _WRITE_BYTES))

        def write(buffer: mmap.mmap) -> None:
            view = memoryview(buffer)[:_WRITE_BYTES]
            for place in places:  # of both threads; the lock of the interpreter keeps them apart
                os.pwrite(fd, view, place)

        try:
            start = time.perf_counter()
            with ThreadPoolExecutor(in_flight) as pool:
                list(pool.map(write, self.buffers[:in_flight]))
            os.fsync(fd)
            return self.size / (time.perf_counter() - start)
        finally:
            os.close(fd)

    def reads(self) -> float:
        """Measure the random reads of 4 KiB per second, 128 in flight."""
        return reads_per_second(self.path, _PAGE, 128, min(self.seconds, 1.0))

    def sequential_reads(self) -> float:
        """Measure the bytes per second of a read of the whole file, front to back, one read in flight."""
        fd = os.open(self.path, os.O_RDONLY | direct_flag(self.path.parent))
        try:
            start = time.perf_counter()
            for place in range(0, self.size, 2 * _WRITE_BYTES):
                os.preadv(fd, [self.buffers[0]], place)
            return self.size / (time.perf_counter() - start)
        finally:
            os.close(fd)

    def read_curve(self, seconds: float, in_flight: int = 128) -> list[list[float]]:
        """Measure pairs of the bytes of a random read and such reads per second.

        A larger read never brings fewer bytes per second: where noise says so, the figure is raised.
        """
        rates = [reads_per_second(self.path, size, in_flight, seconds) for size in _SIZES]
        return [
            [size, rate] for size, rate in zip(_SIZES, np.minimum.accumulate(rates).tolist(), strict=True)
        ]


class Drives:
    """Several devices, measured at the same time: every figure is the sum of theirs."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices

    def measure(self) -> dict[str, float]:
        return {
            "write_bytes_per_s": self.writes(),
            "read_iops": sum(self._at_once(lambda device: device.reads())),
        }

    def writes(self) -> float:
        return sum(self._at_once(lambda device: device.writes()))

    def read_curve(self, seconds: float, in_flight: int = 128) -> list[list[float]]:
        curves = self._at_once(lambda device: device.read_curve(seconds, in_flight))
        return [[size, sum(curve[i][1] for curve in curves)] for i, size in enumerate(_SIZES)]

    def _at_once(self, measure: Callable[[Device], Figure]) -> list[Figure]:
        with ThreadPoolExecutor(len(self._devices)) as pool:
            return list(pool.map(measure, self._devices))


def direct_flag(folder: Path) -> int:
    """Return ``O_DIRECT`` where the file system has it, else 0."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            os.close(os.open(probe.name, os.O_RDONLY | os.O_DIRECT))
        return os.O_DIRECT
    except OSError:
        return 0
