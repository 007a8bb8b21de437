"""Processor seconds of this process, by thread."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_TASKS = Path("/proc/self/task")


class ThreadSeconds:
    """Processor seconds since the object was made, by name of thread.

    Python's threads have the names that were given to them, native threads those that the system has; threads
    of one name count together. The system counts in ticks, mostly of 10 ms each.
    """

    def __init__(self) -> None:
        self._before = _seconds()

    def since(self) -> dict[str, tuple[float, float]]:
        """Return (user, system) seconds by name; threads that have ended meanwhile are left out."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        result: dict[str, tuple[float, float]] = {}
        for task, (name, user, system) in _seconds().items():
            _, user_before, system_before = self._before.get(task, (name, 0.0, 0.0))
            label = names.get(task, name)
            total = result.get(label, (0.0, 0.0))
            result[label] = (total[0] + user - user_before, total[1] + system - system_before)
        return result


def _seconds() -> dict[int, tuple[str, float, float]]:
    """Return (name, user seconds, system seconds) of every thread of this process."""
    result = {}
    for task in _TASKS.iterdir():
        try:
            text = (task / "stat").read_text()
        except OSError:  # the thread has ended
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        result[int(task.name)] = (name, int(fields[11]) * _TICK, int(fields[12]) * _TICK)
    return result
