"""What has to end before the interpreter does.

A thread that comes back from native code while the interpreter is torn down aborts the process or hangs it.
Tables, and objects with threads above them, are therefore ended by the one function that is registered here:
when the main program and its threads are over, the newest first, whatever the program left undone.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
from typing import Protocol
from weakref import WeakValueDictionary

logger = logging.getLogger("tierstore")


class Ending(Protocol):
    def end_at_exit(self) -> None:
        """End its threads for good. May be called again, and after an orderly end."""


_running: WeakValueDictionary[int, Ending] = WeakValueDictionary()
_numbers = itertools.count()


def end_at_exit(thing: Ending) -> None:
    """End ``thing`` with the process, as long as something else refers to it."""
    _running[next(_numbers)] = thing


def _end_all() -> None:
    for number in sorted(_running.keys(), reverse=True):
        thing = _running.get(number)
        if thing is None:
            continue
        try:
            thing.end_at_exit()
        except BaseException as error:  # further things have to end, and the exit code is the program's
            logger.warning("%s did not end as it should: %r", type(thing).__name__, error)


def _forget_all() -> None:
    """Forget everything in a forked child, which has none of the threads that may hold the locks."""
    global _running
    _running = WeakValueDictionary()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
