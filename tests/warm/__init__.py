"""Processes that begin with torch and the like imported, for tests of what a program does once it has begun.

Many tests run a program as users do: ``python script.py``, ``tierstore train``, ``torchrun``. Half of their
time would go into importing torch. The commands of :func:`folder` have a process forked instead, by one that
has imported it. The fork runs the program as ``__main__`` with the command's arguments, environment, folder
and files, and it ends as an interpreter ends. Signals and exit codes pass through.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def folder() -> Path:
    """Return the folder of ``python``, ``tierstore`` and ``torchrun``.

    Their processes are forked by one that lives as long as this process, and have one thread for OpenMP.
    """
    scratch = tempfile.TemporaryDirectory(prefix="tierstore-warm-")
    commands = Path(scratch.name)
    client = (Path(__file__).parent / "client.py").read_text(encoding="utf-8")
    for name in ("python", "tierstore", "torchrun"):
        command = commands / name
        command.write_text(f"#!{sys.executable} -IS\n{client}", encoding="utf-8")
        command.chmod(0o755)
    ready, theirs = os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm.server", str(commands / "socket"), str(theirs)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        pass_fds=[theirs],
    )
    os.close(theirs)
    with os.fdopen(ready) as listens:
        assert listens.read() == "listens", "the server of processes has ended"

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
        scratch.cleanup()

    atexit.register(end)
    return commands


def python() -> str:
    """Return the path of the command to be used in place of ``sys.executable``."""
    return str(folder() / "python")
