"""Waiting threads of OpenMP leave the processors to a prefetch, and a prefetch gives way to other threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.bags import SGD, budget, build, random_batches
from tests.pipeline.conftest import BESIDE, BY_WORKER
from tierstore import TierConfig
from tierstore.pipeline import made
from tierstore.pipeline.processors import give_way

SECONDS = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import threading, time
import torch

def seconds() -> float:
    # CPU seconds of 100 short operations with pauses, in which nothing is to be done.
    begun = time.process_time()
    for _ in range(100):
        ones.add_(1)
        time.sleep(0.004)
    return time.process_time() - begun
"""
CODE = """
from tierstore.pipeline.processors import share_processors

torch.set_num_threads(2)
ones, end = torch.ones(1 << 17), threading.Event()
seconds()
alone = seconds()
def prefetch():
    share_processors()
    begun.set()
    end.wait()
begun = threading.Event()
thread = threading.Thread(target=prefetch)
thread.start()
begun.wait()
beside = seconds()
end.set()
thread.join()
print(alone, beside, seconds())
"""
RAISED = """
import tierstore
from tests.bags import SGD, build, random_batches

torch.set_num_threads(1)
ones = torch.ones(1 << 17)
with build(tierstore.TierConfig(hbm="all"), SGD, (8,)) as module:
    batches = random_batches(1, 8, 1, 40, 2)
    loop = iter(tierstore.prefetch(batches, module, inputs={"": lambda batch: (batch,)}, window=1))
    module(next(loop)).sum().backward()
    torch.set_num_threads(2)
    seconds()
    alone = seconds()
    module(next(loop)).sum().backward()
    time.sleep(0.1)
    beside = seconds()
    for batch in loop:
        module(batch).sum().backward()
    print(alone, beside, seconds())
"""


def measured(code: str) -> list[float]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    command, root = [sys.executable, "-c", SECONDS + code], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=own, capture_output=True, text=True, check=True)
    return [float(value) for value in done.stdout.split()]


def test_waiting_threads_sleep_while_a_prefetch_works():
    """Without a prefetch one of two threads spins through the pauses, a millisecond and more of each."""
    alone, beside, again = measured(CODE)
    assert alone > 0.1, "libgomp does not spin any more; share_processors() can go"
    assert beside < 0.4 * alone
    assert again > 2 * beside


def test_waiting_threads_sleep_also_when_torch_gets_more_threads_during_a_prefetch() -> None:
    """They do from the next batch that is pulled until the prefetch ends."""
    alone, beside, again = measured(RAISED)
    assert alone > 0.1
    assert beside < 0.4 * alone
    assert again > 2 * beside


def niceness() -> dict[str, set[int]]:
    """The niceness of the process's threads, by their names; those that Python does not know are native."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has ended meanwhile
            found.setdefault(names.get(int(task.name), "native"), set()).add(of_thread(int(task.name)))
    return found


def of_thread(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, with which what the thread changes of itself ends."""
    with ThreadPoolExecutor(1) as pool:
        thread, result = pool.submit(lambda: (threading.get_native_id(), function())).result()
    while Path(f"/proc/self/task/{thread}").exists():  # a joined thread may be about to end
        time.sleep(0.001)
    return result


def own_niceness() -> int:
    give_way()
    return of_thread(threading.get_native_id())


@pytest.mark.parametrize("threads", [BESIDE, BY_WORKER])
def test_only_the_threads_of_a_prefetch_give_way(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "MANY_THREADS", threads)
    seen = []
    config = TierConfig(hbm=budget(60, dim=8), engine="native", path=tmp_path, read_ahead="1MiB")
    with build(config, SGD, (8,)) as module:
        batches = random_batches(1, 20, 1, 40, 2)
        for batch in tierstore.prefetch(batches, module, inputs={"": lambda batch: (batch,)}, window=4):
            module(batch).sum().backward()
            seen.append(niceness())
    own = of_thread(0)
    assert "tierstore-read-ahead" not in seen[0], "rows leave memory later than expected"
    (worker,) = seen[10].pop("tierstore-prefetch")
    assert worker == min(own + 5, 19)
    assert seen[10].pop("tierstore-lookups", {worker}) == {worker}
    assert {"tierstore-read-ahead", "native"} <= seen[10].keys()
    assert set().union(*seen[10].values()) == {own}


def test_a_thread_gives_way_up_to_the_least_priority() -> None:
    own = of_thread(0)
    assert in_thread(own_niceness) == min(own + 5, 19)
    assert in_thread(lambda: [own_niceness() for _ in range(6)][-1]) == 19
    assert of_thread(0) == own


def test_a_system_that_forbids_it_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: int) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(os, "setpriority", forbidden)
    assert in_thread(own_niceness) == of_thread(0)


def test_a_system_that_refuses_threads() -> None:
    """A prefetch goes on at its own priority, and a number of threads that cannot be is an error."""
    code = """
import resource, tierstore
from tests.pipeline.test_processors import of_thread, own_niceness
from tierstore.errors import ConfigError
tierstore.set_num_threads(1000)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
assert own_niceness() == of_thread(0)
try:
    tierstore.set_num_threads(1001)
except ConfigError as error:
    assert "the number of threads is 1001" in str(error), error
else:
    raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_elsewhere_the_whole_process_keeps_its_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where threads have no niceness of their own, setpriority changes the process's."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "setpriority", None)
    assert in_thread(own_niceness) == of_thread(0)


def test_threads_of_the_kernels_keep_their_priority() -> None:
    """In a process whose first kernel is called by a thread that gives way, also with more threads later."""
    code = """
import threading
from tests.pipeline.test_processors import in_thread, niceness, of_thread, own_niceness
import tierstore
tierstore.set_num_threads(3)
in_thread(own_niceness)
first = niceness()["native"], len(list(__import__("os").scandir("/proc/self/task")))
tierstore.set_num_threads(6)
second = niceness()["native"], len(list(__import__("os").scandir("/proc/self/task")))
assert first[0] == second[0] == {of_thread(0)}, (first, second)
assert second[1] == first[1] + 3, (first, second)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
