"""Ends objects with threads before the interpreter ends.

A thread that comes back from native code while the interpreter is torn down aborts the process or hangs it.
One function that is registered here therefore ends tables, and objects with threads above them, when the main
program and its threads are over: the newest first.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

from tierstore.threads import Thread

logger = logging.getLogger("tierstore")


class Ending(Protocol):
    def end_at_exit(self) -> None:
        """End the object's threads for good. A further call, also after an orderly end, does nothing."""


_THREAD_SECONDS = 30.0
_INTERRUPTED = 130  # exit code of a process that Ctrl-C has ended

_running: WeakValueDictionary[int, Ending] = WeakValueDictionary()
_numbers = itertools.count()
_threads: WeakSet[Thread] = WeakSet()


def end_at_exit(ending: Ending) -> None:
    """End ``ending`` with the process, as long as something else refers to it."""
    _running[next(_numbers)] = ending


def wait_at_exit(thread: Thread) -> None:
    """Wait for ``thread``, which ends by itself, when all objects have ended with the process: the thread may
    have the last reference to a store, and close that store."""
    _threads.add(thread)


def _end_all() -> None:
    for number in sorted(_running.keys(), reverse=True):
        ending = _running.get(number)
        if ending is None:
            continue
        _end(type(ending).__name__, ending.end_at_exit)
    for thread in list(_threads):
        _end(thread.name, partial(thread.join, _THREAD_SECONDS))


def _end(name: str, end: Callable[[], None]) -> None:
    try:
        try:
            end()
        except KeyboardInterrupt:  # has ended the wait, not what was waited for
            logger.warning("%s ends; Ctrl-C once more ends the process at once", name)
            _end_or_leave(end)
    except BaseException as error:  # further objects must end, and the program's exit code stays
        logger.warning("%s did not end as it should: %r", name, error)


def _end_or_leave(end: Callable[[], None]) -> None:
    try:
        end()
    except KeyboardInterrupt:
        _end_at_once()


def _end_at_once() -> None:
    """End the process beside threads that may be in native code, without the end of the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(_INTERRUPTED)


def _forget_all() -> None:
    """Forget all objects in a forked child, which has none of the threads that may hold the locks."""
    global _running, _threads
    _running, _threads = WeakValueDictionary(), WeakSet()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
