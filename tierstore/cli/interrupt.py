"""Ctrl-C during training: the first signal lets the present batch finish, the second signal stops at once."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

EXIT_INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended."""


class GracefulInterrupt:
    """While active, it only notes the first SIGINT or SIGTERM, so that the run is saved between batches.

    The next signal acts as always. Outside the main thread it has no effect. ``says``: whether it prints
    what will happen; ranks of a job do not, since what they do depends on all of them. A rank that an error
    ends ignores SIGTERM from then on: torchrun sends it where a peer has died, and this rank has to say so.
    """

    def __init__(self, says: bool = True) -> None:
        self._says = says
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
        if isinstance(error, Exception) and not self._says and self._previous:
            self._previous[signal.SIGTERM] = signal.SIG_IGN
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        if self._says:
            with suppress(BrokenPipeError):  # an error here would end the batch
                print("\nstopping after this batch; once more to stop at once", file=sys.stderr, flush=True)
