"""Other processes of the machine: whether a measurement was alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

LOUD = 0.1
"""CPU seconds per second of other processes from which on a measurement is disturbed."""


class Neighbours:
    """CPU seconds per second that other processes took since the last look.

    ``together``: of several processes that measure together, the sum of what each gives it; they all look at
    the same time.
    """

    def __init__(self, together: Callable[[float], float] = float) -> None:
        self._own, self._together = psutil.Process(), together
        self.share()

    def share(self) -> float:
        """Since the last call; what the kernel does for nobody in particular is left out."""
        everyone, own, now = psutil.cpu_times(), self._own.cpu_times(), time.perf_counter()
        busy = everyone.user + getattr(everyone, "nice", 0.0) + everyone.system
        busy -= self._together(own.user + own.system)
        before = getattr(self, "_before", (busy, now - 1.0))
        self._before = busy, now
        return max(0.0, (busy - before[0]) / max(now - before[1], 1e-3))
