"""Our policies are compiled by another process, so that none that trains keeps the compiler's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ASK = """
import subprocess
started, run = [], subprocess.run
subprocess.run = lambda *args, **options: started.append(args) or run(*args, **options)
import numpy
import cache_policies
from cache_policies import native
policy = cache_policies.get("lru").compile(8)
(hooks,) = native._compiled.values()
print(sum(hook.cache_hits for hook in hooks.values()), len(hooks))
cache_policies.simulate(cache_policies.prepare_flat(numpy.array([1, 2, 1]), 1), "lru", 1)
print(len(started))
"""


def asked(cache: Path, processes: int, **environment: str) -> list[list[int]]:
    """Return hooks from the cache, all hooks, and processes started, for each of several at once."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment}
    root = Path(__file__).parents[2]
    options = {"env": environment, "cwd": root, "stdout": subprocess.PIPE, "text": True}
    asking = [subprocess.Popen([sys.executable, "-c", ASK], **options) for _ in range(processes)]
    answers = [process.communicate()[0].split() for process in asking]
    assert not any(process.returncode for process in asking)
    return [list(map(int, answer)) for answer in answers]


def test_an_empty_compile_cache_is_filled_by_another_process(tmp_path: Path) -> None:
    assert asked(tmp_path / "here", 1, TIERSTORE_COMPILING="1") == [[0, 5, 0]]


def test_one_process_compiles_for_all_that_ask_at_once(tmp_path: Path) -> None:
    assert sorted(asked(tmp_path, 2)) == [[5, 5, 0], [5, 5, 1]]
