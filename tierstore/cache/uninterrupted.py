"""Runs work that a signal must not cut in two.

Python runs signal handlers in the main thread, between any two steps, and their exceptions (Ctrl-C, a time
limit of the user's) would leave rows half moved. Another thread therefore does work that changes which rows
are where, while the main thread waits; if that wait is interrupted, the work goes on to its end.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from tierstore.cache.at_exit import end_at_exit
from tierstore.threads import Gate

logger = logging.getLogger("tierstore")

Result = TypeVar("Result")


class _Job(Generic[Result]):
    result: Result
    """The result of work that has raised nothing."""

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
        """Wait until running work is over. The thread then waits in the interpreter for ever, which does no
        harm."""
        global _over
        _over = True
        self.do(lambda: None).done.wait()


def _serve(jobs: SimpleQueue[_Job[Any]]) -> None:
    while True:
        jobs.get().run()  # no name keeps the job: its result must be freed when its caller drops it


_worker: _Worker | None = None
_over = False  # the process ends: callers do their work themselves now


def _the_worker() -> _Worker | None:
    """Return the thread that does the main thread's work; None in other threads, which do their own."""
    global _worker
    if _over or threading.get_ident() != threading.main_thread().ident:
        return None
    if _worker is None:
        _worker = _Worker()
    return _worker


def uninterrupted(work: Callable[[], Result]) -> Result:
    """Return or raise what ``work()`` does; no signal interrupts the work.

    An exception that a signal raises in the caller meanwhile is raised at once. ``work`` then goes on, later
    calls wait for it, and its result is dropped.
    """
    if (worker := _the_worker()) is None:
        return work()
    job = worker.do(work)
    job.done.wait()
    error, job.error = job.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error, job  # its traceback has this frame: break the cycle that would keep the work's objects
    return job.result


def soon(work: Callable[[], None]) -> None:
    """Do ``work()`` as :func:`uninterrupted` does, but let the main thread go on meanwhile. What the work
    raises is logged."""

    def logged() -> None:
        try:
            work()
        except Exception:
            logger.exception("work in the background has failed")

    if (worker := _the_worker()) is None:
        logged()
    else:
        worker.do(logged)


def works_here() -> bool:
    """Return whether this thread is the one that does the main thread's work."""
    return _worker is not None and threading.get_ident() == _worker.thread


def _forget() -> None:
    global _worker
    _worker = None


os.register_at_fork(after_in_child=_forget)
