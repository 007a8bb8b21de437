"""Threads of OpenMP that wait do not take the processors that a prefetch needs."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import threading, time
import torch
from tierstore.pipeline.openmp import share_processors

def seconds() -> float:
    # CPU seconds of 100 short operations with pauses, in which nothing is to be done.
    begun = time.process_time()
    for _ in range(100):
        ones.add_(1)
        time.sleep(0.004)
    return time.process_time() - begun

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


def measured() -> list[float]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run([sys.executable, "-c", CODE], env=own, capture_output=True, text=True, check=True)
    return [float(value) for value in done.stdout.split()]


def test_waiting_threads_sleep_while_a_prefetch_works():
    """Without a prefetch one of two threads spins through the pauses, a millisecond and more of each."""
    alone, beside, again = measured()
    assert alone > 0.1, "libgomp does not spin any more; share_processors() can go"
    assert beside < 0.4 * alone
    assert again > 2 * beside
