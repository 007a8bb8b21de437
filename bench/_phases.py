"""What a phase of a benchmark costs: seconds, bytes of the devices, and CPU time of this process."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np


class Phase:
    """Calls of one kind: their seconds, and the process's IO and CPU time meanwhile."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes, self.rows = row_bytes, 0
        self.latencies: list[float] = []
        self._moved, self._cpu = moved_bytes(), cpu_seconds()

    @contextmanager
    def call(self, rows: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.latencies.append(time.perf_counter() - start)
        self.rows += rows

    @property
    def calls(self) -> int:
        return len(self.latencies)

    @property
    def seconds(self) -> float:
        return sum(self.latencies)

    @property
    def useful(self) -> int:
        return self.rows * self.row_bytes

    @property
    def written(self) -> int:
        return moved_bytes()[1] - self._moved[1]

    def figures(self, name: str, moved: str = "") -> dict[str, float]:
        figures = {
            "rows_per_s": self.rows / self.seconds,
            "p50_ms": float(np.percentile(self.latencies, 50)) * 1e3,
            "p99_ms": float(np.percentile(self.latencies, 99)) * 1e3,
            "cpu_s": cpu_seconds() - self._cpu,
            "cpu_us_per_row": (cpu_seconds() - self._cpu) / self.rows * 1e6,
        }
        if moved:
            read, written = moved_bytes()
            count = read - self._moved[0] if moved == "read" else written - self._moved[1]
            figures["useful_per_moved_byte"] = self.useful / max(count, 1)
        return {f"{name}.{key}": value for key, value in figures.items()}


def moved_bytes() -> tuple[int, int]:
    """Return the bytes that this process made the devices read and write so far."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def cpu_seconds() -> float:
    """Return the CPU seconds of all threads of this process, the system's work for them included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def settle(seconds: float = 30) -> None:
    """Wait until this process moves no bytes, so that no compaction runs beside what comes next."""
    end = time.perf_counter() + seconds
    before, now = (-1, -1), moved_bytes()
    while now != before and time.perf_counter() < end:
        time.sleep(0.5)
        before, now = now, moved_bytes()


def forget(paths: Iterable[Path]) -> None:
    """Drop the files below ``paths`` from the page cache."""
    os.sync()
    for file in chain.from_iterable(path.rglob("*") for path in paths):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
