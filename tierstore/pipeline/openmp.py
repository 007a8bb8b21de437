"""Processors for the threads of a prefetch beside the threads of OpenMP, by which torch computes."""

from __future__ import annotations

import torch

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
