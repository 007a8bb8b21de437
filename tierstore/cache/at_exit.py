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
from contextlib import suppress
from typing import Protocol
from weakref import WeakValueDictionary

logger = logging.getLogger("tierstore")


class Ending(Protocol):
    def end_at_exit(self) -> None:
        """End the object's threads for good. A further call, also after an orderly end, does nothing."""


_INTERRUPTED = 130  # exit code of a process that Ctrl-C has ended

_running: WeakValueDictionary[int, Ending] = WeakValueDictionary()
_numbers = itertools.count()


def end_at_exit(ending: Ending) -> None:
    """End ``ending`` with the process, as long as something else refers to it."""
    _running[next(_numbers)] = ending


def _end_all() -> None:
    for number in sorted(_running.keys(), reverse=True):
        ending = _running.get(number)
        if ending is None:
            continue
        try:
            _end(ending)
        except BaseException as error:  # further objects must end, and the program's exit code stays
            logger.warning("%s did not end as it should: %r", type(ending).__name__, error)


def _end(ending: Ending) -> None:
    try:
        ending.end_at_exit()
    except KeyboardInterrupt:  # has ended the wait, not what was waited for
        logger.warning("%s ends; Ctrl-C once more ends the process at once", type(ending).__name__)
        try:
            ending.end_at_exit()
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
    global _running
    _running = WeakValueDictionary()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
