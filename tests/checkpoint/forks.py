"""Children that begin with everything imported: for programs that have no threads themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path


def forked(work: Callable[[], int], output: Path) -> int:
    """A child that does ``work`` and prints to ``output``; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(child: int) -> int:
    """Exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finish(folder: Path, work: Callable[[], int]) -> None:
    """Lets a child end by itself."""
    code = wait(forked(work, folder / "log"))
    if code:
        raise AssertionError(f"exit code {code}:\n{(folder / 'log').read_text()}")
