"""Watches other processes of the machine, to tell whether a measurement was alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

LOUD = 0.1
"""The CPU seconds per second of other processes that disturb a measurement."""


class Neighbours:
    """Measures the CPU seconds per second that other processes take.

    ``summed`` adds up a number over the processes that measure together; all of them call :meth:`share` at
    the same time.
    """

    def __init__(self, summed: Callable[[float], float] = float) -> None:
        self._own, self._summed = psutil.Process(), summed
        self.share()

    def share(self) -> float:
        """Return the share since the last call, without the kernel's work for no process in particular."""
        everyone, own, now = psutil.cpu_times(), self._own.cpu_times(), time.perf_counter()
        busy = everyone.user + getattr(everyone, "nice", 0.0) + everyone.system
        busy -= self._summed(own.user + own.system)
        before = getattr(self, "_before", (busy, now - 1.0))
        self._before = busy, now
        return max(0.0, (busy - before[0]) / max(now - before[1], 1e-3))
