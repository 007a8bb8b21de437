"""Ctrl-C during training: the first signal lets the present batch finish, the second signal stops at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class GracefulInterrupt:
    """While active, it only notes the first SIGINT or SIGTERM, so that the run is saved between batches.

    The next signal acts as always. Outside the main thread it has no effect.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal that came, if any."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> GracefulInterrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        print("\nstopping after this batch; once more to stop at once", file=sys.stderr, flush=True)
