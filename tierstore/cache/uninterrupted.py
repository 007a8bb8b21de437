"""Work that a signal must not cut in two.

Python runs signal handlers in the main thread, between any two steps, and what they raise (Ctrl-C, a time
limit of the user's) would leave rows half moved. Work that changes which rows are where is therefore done by
another thread while the main one waits; if that wait is interrupted, the work goes on to its end.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from tierstore.cache.at_exit import end_at_exit

Result = TypeVar("Result")


class Gate:
    """Is opened once, by any thread, and lets all threads pass from then on.

    Unlike ``threading.Event`` it is whole again after an exception at any step of a wait: its steps are
    the steps of a lock of the interpreter.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._closed = _thread.allocate_lock()
        self._closed.acquire()
        self._opening = iter((self._closed.release,))  # taken out by whoever opens first

    def open(self) -> None:
        self.is_open = True
        for release in self._opening:
            release()

    def wait(self) -> None:
        if not self.is_open:
            with self._closed:
                pass


class _Job(Generic[Result]):
    result: Result
    """Of work that has raised nothing."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self.work = work
        self.done = Gate()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error
        del self.work
        self.done.open()


class _Worker:
    """The thread that does the main thread's work."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job[Any]] = SimpleQueue()
        # ``Thread.start`` waits for an event, and a signal may come meanwhile.
        self.thread = _thread.start_new_thread(_serve, (self._jobs,))
        end_at_exit(self)

    def do(self, work: Callable[[], Result]) -> _Job[Result]:
        job = _Job(work)
        self._jobs.put(job)
        return job

    def end_at_exit(self) -> None:
        """Wait until work that was begun is over. Then the thread waits in the interpreter for ever, which
        does no harm."""
        global _over
        _over = True
        self.do(lambda: None).done.wait()


def _serve(jobs: SimpleQueue[_Job[Any]]) -> None:
    while True:
        jobs.get().run()  # no name keeps the job, whose result has to be free when its caller drops it


_worker: _Worker | None = None
_over = False  # the process ends: what is torn down now does its work itself


def uninterrupted(work: Callable[[], Result]) -> Result:
    """Return or raise what ``work()`` does, which no signal interrupts.

    An exception that a signal raises in the caller meanwhile is raised at once; ``work`` then goes on, what
    is called in this way later waits for it, and its result is dropped.
    """
    global _worker
    if _over or threading.get_ident() != threading.main_thread().ident:
        return work()
    if _worker is None:
        _worker = _Worker()
    job = _worker.do(work)
    job.done.wait()
    error, job.error = job.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error, job  # its traceback has this frame: no cycle keeps what the work has held
    return job.result


def works_here() -> bool:
    """Return whether this thread is the one that does the main thread's work."""
    return _worker is not None and threading.get_ident() == _worker.thread


def _forget() -> None:
    global _worker
    _worker = None


os.register_at_fork(after_in_child=_forget)
