"""One pass over a loader with prefetch: what the training thread does between batches.

The training thread pulls batches from the loader, so the loader needs no thread-safety, and random numbers
are drawn in a reproducible order. :mod:`tierstore.pipeline.worker` plans the batches ahead.

Only the training thread begins collectives of sharded modules, at points that depend on nothing but the
number of batches, so that all ranks begin them in the same order; the worker waits for their ends. The end of
the batches is exchanged like one more batch, so that no rank waits for a rank with fewer batches.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import ExitStack
from itertools import islice
from typing import Any

from cache_policies.windows import Pulls
from tierstore.cache.at_exit import end_at_exit, wait_at_exit
from tierstore.cache.engine import Engine
from tierstore.cache.group import TierGroup
from tierstore.cache.uninterrupted import uninterrupted, works_here
from tierstore.pipeline.exchanges import RankExchanges
from tierstore.pipeline.learning import Call
from tierstore.pipeline.planned import Planned
from tierstore.pipeline.worker import Worker
from tierstore.threads import Thread

_END_SECONDS = 30.0
_AGREED_EVERY = 16  # batches after which ranks choose again how many batches to pull


class Session:
    """Lookahead over one loader. Use it from one thread; :meth:`close` is final and may be called at any
    time.

    An exception that a signal raises in the training thread ends the pass, so that only locks matter then:
    the training thread takes no lock but the worker's, and waits for gates.
    """

    def __init__(self, engines: list[Engine], calls: list[Call]) -> None:
        self.engines, self.calls = engines, calls
        self.groups: list[TierGroup] = list({id(c): c for e in engines for c in e.groups}.values())
        self.depth = 0
        self.ranks = RankExchanges(calls)
        self._worker = Worker(self.groups, calls)
        self._is_automatic = True  # whether the window is
        self._pulls = Pulls(0, is_full=True)
        self._to_pull = 0  # batches behind the last batch that is planned ahead
        self._used = 0
        self._coming: deque[Planned] = deque()  # pulled, not yet used; the first is the next to be used
        self._announced: deque[Planned] = deque()  # sizes are being exchanged
        self._is_closed = False
        self._process = os.getpid()
        self._thread: Thread | None = None

    def begin(self) -> None:
        """Start the worker; the caller must call :meth:`close`, also if this fails."""
        uninterrupted(self._begin)

    def _begin(self) -> None:
        end_at_exit(self)
        for group in self.groups:
            group.prefetches.add(id(self))
        thread = Thread(target=self._work, name="tierstore-prefetch", daemon=True)
        thread.start()
        self._thread = thread

    def _work(self) -> None:
        self._worker.work()

    def add(self, batch: Any) -> Planned | None:
        """Take a batch that was pulled. Return None if another rank had no such batch."""
        self.send()
        if self.ranks.apart:
            return None
        planned = Planned(batch)
        self._coming.append(planned)
        self.ranks.begin(planned)
        self._announced.append(planned)
        if not planned.exchanges:
            self.send()
        return planned

    def end(self, error: Exception | None) -> Planned | None:
        """Announce to other ranks that the loader has no more batches, or has raised ``error``. Return None
        where there are no other ranks."""
        self.send()
        planned = Planned(None, is_end=True)
        self.ranks.begin_end(planned, error)
        if planned.exchanges:
            self._coming.append(planned)
            self._announced.append(planned)
        self._worker.exhaust()
        return planned if planned.exchanges else None

    @property
    def ended(self) -> bool:
        """Return whether no more batches are pulled, or another rank has no more batches."""
        return self._worker.is_exhausted

    def send(self) -> None:
        """Hand the worker the batches whose sizes the ranks have exchanged."""
        while self._announced:
            planned = self._announced.popleft()
            self.ranks.send(planned)
            self._worker.give(planned, self.ranks.apart)

    def choose(self, window: int | None) -> None:
        """Let the window have ``window`` batches, or be automatic. Call it before the first batch."""
        self._is_automatic = window is None
        self._worker.choose(window)

    def start(self, depth: int, window: int, is_full: bool) -> None:
        """Plan batches from now on, the first with ``window`` batches behind it. Later batches are planned
        when their windows are full, or as many batches are announced as :meth:`allow` says. ``is_full``:
        whether the first window is full.
        """
        self._pulls = Pulls(window, is_full)
        self._to_pull = self._pulls.window if self._is_automatic else window
        for group in self.groups:
            group.stats.prefetched = depth, window
        self.depth = depth
        self._worker.start(depth, self._coming[0] if self._coming else None)

    def allow(self) -> None:
        """Let the worker announce the batches that it has got before it plans the batches up to ``depth``
        ahead: the last of these can only be planned from now on, and what is known then must not depend on
        time."""
        self._worker.allow(islice(self._coming, self.depth + 1))

    def follow(self, planned: Planned) -> None:
        """Choose how many batches to pull now, by the plan of a batch that was used."""
        if not self._is_automatic:
            return
        planned.settled.wait()
        if planned.behind is not None:
            self._pulls.planned(planned.behind, planned.fills)
        self._used += 1
        if not self.ranks:
            self._to_pull = self._pulls.window
        elif self._used % _AGREED_EVERY == 0:
            self._to_pull = self.ranks.min_over_ranks(self._pulls.window)

    def wait_prepared(self, planned: Planned) -> None:
        if planned in self._announced:
            self.send()
        planned.prepared.wait()

    @property
    def pulled_ahead(self) -> int:
        """Return the number of batches pulled and not yet used."""
        return sum(not planned.is_end for planned in self._coming)

    @property
    def wants_more(self) -> bool:
        """Return whether to pull another batch before the next batch is used: up to the window behind the
        last planned batch, and one more where ranks need it to send the ids of the window's last batch."""
        return len(self._coming) <= self.depth + self._to_pull + bool(self.ranks)

    def next(self) -> Planned | None:
        """Return the next batch, its lookups handed to the modules; None when there are no more. Raises
        RankError if another rank has no such batch or is lost, and the worker's error."""
        if not self._coming:
            return None
        planned = self._coming.popleft()
        self.wait_prepared(planned)
        if planned.error is not None:
            raise planned.error
        if self._worker.failure is not None:
            raise self._worker.failure
        if planned.is_end:
            return None
        for module, ahead in planned.aheads:
            module.keep_for_forward(ahead)
        return planned

    @property
    def following(self) -> Planned | None:
        """Return the batch that is used next, once the worker has read its ids."""
        return self._coming[0] if self._coming and self._coming[0].is_ready else None

    def finish(self, planned: Planned) -> None:
        """Give back the lookups of a used batch that no forward call has taken."""
        for module, ahead in planned.aheads:
            module.give_back(ahead)
        self._worker.demand(planned.last)  # its plans gain nothing any more by waiting
        planned.drop()

    def close(self) -> None:
        # A forked child has no worker, and its locks may never be released.
        if self._is_closed or os.getpid() != self._process:
            return
        if self._is_in_the_way():
            closing = Thread(target=self._close, name="tierstore-end", daemon=True)
            closing.start()
            wait_at_exit(closing)
        else:
            uninterrupted(self._close)

    def _is_in_the_way(self) -> bool:
        """Return whether the garbage collector ended an abandoned loop in a thread that the worker waits
        for."""
        ours = works_here() or threading.current_thread().name.startswith("tierstore-")
        locks: list[Any] = [group.residency_lock for group in self.groups]
        return ours or any(lock._is_owned() for lock in locks)

    def _close(self, seconds: float | None = None) -> None:
        try:
            self._worker.stop()
        finally:
            if self._thread is not None:
                self._thread.join(seconds)
            if self._thread is None or not self._thread.is_alive():
                self._release()

    def _release(self) -> None:
        """Give back what the session holds: all of it, also if a step raises."""
        self._is_closed = True
        with ExitStack() as ends:
            while self._coming:
                for _, ahead in self._coming.popleft().aheads:
                    ends.callback(ahead.release)
            ends.callback(self._worker.abandon)
            for group in self.groups:
                group.prefetches.discard(id(self))

    def end_at_exit(self) -> None:
        if not self._is_closed:
            self._close(_END_SECONDS)  # other ranks may be gone, and the worker wait for them
