"""Lets Ctrl-C wait while LLVM calls back into Python, which drops an exception that is raised there."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType


class WholeCompile:
    """While active, Ctrl-C that comes while LLVM compiles takes effect when numba's step of compiling ends.

    A signal that comes while native code runs reaches Python in its next step, which is LLVM's callback as a
    rule. At any other place Ctrl-C raises as always. Has no effect outside the main thread, or where
    Ctrl-C already has another handler.
    """

    def __init__(self) -> None:
        self._active = False

    def __enter__(self) -> WholeCompile:
        is_main = threading.current_thread() is threading.main_thread()
        self._active = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._active:
            signal.signal(signal.SIGINT, _raise_or_wait)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _raise_or_wait(number: int, frame: FrameType | None) -> None:
    if _is_compiling(frame):
        _raise_after_step(number)
    else:
        signal.default_int_handler(number, frame)


def _is_compiling(frame: FrameType | None) -> bool:
    """Return whether Python runs for LLVM, within a step that numba will end."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("llvmlite."):
            # Not there while numba itself is imported, which imports llvmlite.
            lock = getattr(sys.modules.get("numba.core.compiler_lock"), "global_compiler_lock", None)
            return lock is not None and bool(lock.is_locked())
        frame = frame.f_back
    return False


def _raise_after_step(number: int) -> None:
    from numba.core import event

    kind = "numba:compiler_lock"

    class AfterStep(event.Listener):  # type: ignore[misc]
        def on_start(self, event_: object) -> None:
            pass

        def on_end(self, event_: object) -> None:
            if threading.current_thread() is threading.main_thread():
                event.unregister(kind, self)
                signal.raise_signal(number)

    event.register(kind, AfterStep())
