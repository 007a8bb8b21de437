"""How the thread of a prefetch shares the processors with the threads that compute."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

import torch

from tierstore import _core

_NICENESS = 5  # added to the niceness of the thread of a prefetch
_GRAIN = 1 << 15  # elements that torch gives one thread at least


def share_processors() -> None:
    """Let waiting threads of OpenMP sleep soon, as long as the calling thread lives.

    A thread of libgomp that waits for work, or for other threads, spins for up to a millisecond, unless
    libgomp manages more threads than there are processors
    (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). Threads of a prefetch are none that it
    knows of, so they would wait for processors that only spin. A team of the calling thread makes libgomp
    manage more; its threads sleep, and end with the calling thread. Results do not depend on it. Other
    libraries of OpenMP, and OMP_WAIT_POLICY or GOMP_SPINCOUNT in the environment, do what they are told.
    """
    threads = torch.get_num_threads()
    if threads > 1:
        torch.zeros(2 * threads * _GRAIN, dtype=torch.uint8).add_(1)


def give_way() -> None:
    """Let threads of ordinary priority run before the calling thread where processors are few.

    The thread of a prefetch works ahead, so it has time; the training thread, which waits for a processor
    meanwhile, has none. Threads that the calling thread starts afterwards give way, too. On Linux a thread
    has a niceness of its own (setpriority(2), "C library/kernel differences"); elsewhere nothing happens, nor
    where the system forbids it or refuses threads.
    """
    if sys.platform != "linux":
        return
    try:
        _core.start_threads()  # the threads of the kernels work for all callers: they keep their priority
    except RuntimeError:  # a later loop may start them, from this thread
        return
    thread = threading.get_native_id()
    with suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness + _NICENESS, 19))
