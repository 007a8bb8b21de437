"""How the thread of a prefetch shares the processors with the threads that compute."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from tierstore import _core
from tierstore.threads import Gate, Thread

_NICENESS = 5  # added to the niceness of the thread of a prefetch
_GRAIN = 1 << 15  # elements that torch gives one thread at least
_FEW = 4  # processors; where there are more, the system has a free one for each thread
_PERIOD = 0.5  # seconds
_WAITED = 0.05  # of a period; the training thread gains about as much while it need not wait
_LONGEST_PAUSE = 32.0  # seconds
_PROCESSOR = 36  # field of /proc/PID/task/TID/stat behind the name in parentheses, see proc_pid_stat(5)


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
        torch.zeros(2 * threads * _GRAIN, dtype=torch.uint8, device="cpu").add_(1)


class Sharing:
    """Lets waiting threads of OpenMP sleep soon while a prefetch works, also when torch gets more threads.

    A thread keeps the number of torch's threads that it has seen first, unless it sets another, which would
    be that of all later threads, too. So the team for a larger number belongs to a thread of its own.
    """

    def __init__(self) -> None:
        self._most = 0
        self._end = Gate()
        self._owners: list[Thread] = []

    def begin(self) -> None:
        """Let the calling thread own the first team."""
        self._most = torch.get_num_threads()
        share_processors()

    def look(self, threads: int) -> None:
        """Take notice of how many ``threads`` of torch the training thread computes with."""
        if threads <= self._most:
            return
        self._most = threads
        owner = Thread(target=self._own, name="tierstore-openmp", daemon=True)
        with suppress(RuntimeError):  # the system refuses threads: those that wait go on spinning
            owner.start()
            self._owners.append(owner)

    def _own(self) -> None:
        share_processors()
        self._end.wait()

    def end(self) -> None:
        """End the teams of all threads but the one that has begun."""
        self._end.open()
        for owner in self._owners:
            owner.join()


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


class Apart:
    """Keeps threads that work ahead off the processor that the training thread runs on.

    The system shares processors fairly, so threads that have time take some from a training thread that has
    none, and its caches. Kernels of the thread that plans would take more, by the pool's threads: they use as
    many threads as torch leaves processors. While the training thread waits for plans, as it does when a
    prefetch begins, these have all processors and threads. ``training``: the training thread; ``stalled``
    returns the seconds that it has waited so far. Only on Linux, and where processors are few.
    """

    def __init__(self, training: int, stalled: Callable[[], float]) -> None:
        self._training, self._stalled = training, stalled
        self._is_apart, self._pause = False, _PERIOD
        self._known: tuple[Sequence[int], set[int]] | None = None
        self._since: float | None = None  # None: nobody has looked yet
        self._until = self._stalled_before = 0.0

    def look(self, threads: Sequence[int], computing: int) -> None:
        """Let ``threads`` run where the training thread does not run, which computes with so many threads of
        torch. To be called once per plan, by the one that plans."""
        now = time.monotonic()
        if sys.platform != "linux" or now < self._until:
            return
        seconds = self._choose(now)
        self._since, self._until, self._stalled_before = now, now + seconds, self._stalled()
        try:
            processors = allowed = os.sched_getaffinity(self._training)
            are_few = 1 < len(allowed) <= _FEW
            left = max(1, len(allowed) - computing)
            _core.limit_threads(left if are_few and self._is_apart else 0)
            if not are_few:
                return
            if self._is_apart:
                processors = allowed - {processor_of(self._training)}
        except OSError:  # the training thread has ended
            return
        if self._known == (threads, processors):
            return
        self._known = threads, processors
        for thread in threads:
            with suppress(OSError):  # it has ended, or the system forbids it
                os.sched_setaffinity(thread, processors)

    def _choose(self, now: float) -> float:
        """Choose whether the threads are apart, and for how many seconds. Pauses grow.

        A training thread that waits although the threads have all processors would wait longer if they were
        apart. So does one whose prefetch has just begun.
        """
        waits = self._since is None or self._stalled() - self._stalled_before > _WAITED * (now - self._since)
        if self._is_apart and waits:
            self._is_apart, pause = False, self._pause
            self._pause = min(2 * pause, _LONGEST_PAUSE)
            return pause
        if self._is_apart:
            self._pause = max(self._pause / 2, _PERIOD)
        self._is_apart = not waits
        return _PERIOD


def processor_of(thread: int) -> int:
    """Return the processor on which a thread of this process runs, or has run last. Raises OSError."""
    with open(f"/proc/self/task/{thread}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[_PROCESSOR])
