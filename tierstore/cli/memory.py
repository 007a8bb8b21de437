"""Memory of this process as the kernel counts it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakRss:
    """The most resident bytes of this process since this object was made.

    Where the kernel cannot reset the peak, this is the peak since the process began: an upper bound.
    """

    def __init__(self) -> None:
        with suppress(OSError):
            _CLEAR_REFS.write_text("5")
        self.before_bytes = _status_bytes("VmRSS")
        """Resident bytes when this object was made."""

    def peak_bytes(self) -> int:
        return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s*(\d+) kB", _STATUS.read_text(), flags=re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0
