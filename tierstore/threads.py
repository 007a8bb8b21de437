"""Threads that can be waited for, also by a thread whose waits are interrupted by signals."""

from __future__ import annotations

import _thread
import os
import threading
import time

_POLL_SECONDS = 0.01


class Gate:
    """A gate that any thread opens once; all threads pass from then on.

    Unlike ``threading.Event`` it is whole again after an exception at any step of a wait: its steps are
    the steps of a lock of the interpreter.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._closed = _thread.allocate_lock()
        self._closed.acquire()
        self._opening = iter((self._closed.release,))  # the thread that opens first takes it out

    def open(self) -> None:
        self.is_open = True
        for release in self._opening:
            release()

    def wait(self) -> None:
        if not self.is_open:
            with self._closed:
                pass


class Thread(threading.Thread):
    """A thread whose end any thread may wait for again after a wait that a signal's exception has ended.

    Up to Python 3.12 an exception that a signal handler raises in ``threading.Thread.join`` or ``is_alive``
    lets a running thread count as ended: further calls return at once, the interpreter ends beside the
    thread, and a thread that then comes back from native code aborts the process.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._over = Gate()
        self._process = os.getpid()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over.open()

    def is_alive(self) -> bool:
        return self.ident is not None and not self._over.is_open and os.getpid() == self._process

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, for ``timeout`` seconds at most."""
        if self.ident in (None, threading.get_ident()):
            super().join()  # raises RuntimeError
        elif os.getpid() != self._process:
            return  # a forked child has only the thread that forked
        elif timeout is None:
            self._over.wait()
        else:
            end = time.monotonic() + timeout
            while self.is_alive() and (left := end - time.monotonic()) > 0:
                time.sleep(min(left, _POLL_SECONDS))
        if self._over.is_open:
            super().join()  # for what the interpreter itself does at the end of a thread
