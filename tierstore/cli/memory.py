"""Memory of this process as the kernel counts it, and the machine that a figure was measured on."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tierstore

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakRss:
    """The most resident bytes of this process since this object was made.

    Where the kernel does not let the peak be reset, it is that since the start: an upper bound.
    """

    def __init__(self) -> None:
        with suppress(OSError):
            _CLEAR_REFS.write_text("5")
        self.before_bytes = _status_bytes("VmRSS")
        """Resident when it began."""

    def peak_bytes(self) -> int:
        return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s*(\d+) kB", _STATUS.read_text(), flags=re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def machine() -> dict[str, Any]:
    """Describe the machine that gave a figure: processor, usable cores, memory, versions, date (UTC)."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tierstore": tierstore.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.machine()
