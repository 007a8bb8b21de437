"""One pass over a loader with prefetch: the worker that plans ahead, and what the training thread does
between batches.

The training thread pulls batches from the loader (so the loader needs no thread-safety, and random numbers
are drawn in a reproducible order); the worker deduplicates their ids, announces them to the window and
plans them in order, at most ``depth`` batches ahead of the one in use.

Only the training thread begins collectives of sharded modules, at points that depend on nothing but the
number of batches, so that all ranks begin them in the same order; the worker waits for their ends. The end of
the batches is exchanged like one more batch, so that no rank waits for a rank with fewer batches.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from functools import partial
from itertools import islice
from typing import Any

from cache_policies.windows import Pulls
from tierstore.cache.at_exit import end_at_exit
from tierstore.cache.engine import Engine
from tierstore.cache.group import TierGroup
from tierstore.cache.pinned_rows import PinnedRows
from tierstore.cache.uninterrupted import uninterrupted, works_here
from tierstore.errors import TierStoreError
from tierstore.modules.ahead import Ahead, content_of
from tierstore.modules.parts import Lookup
from tierstore.pipeline.exchanges import RankExchanges
from tierstore.pipeline.learning import Call, tensors_read
from tierstore.pipeline.openmp import share_processors
from tierstore.pipeline.planned import Planned, RecentBatches
from tierstore.pipeline.windows import Window

logger = logging.getLogger("tierstore")

_END_SECONDS = 30.0
_AGREED_EVERY = 16  # batches after which ranks choose again how many batches to pull


class Session:
    """Lookahead over one loader. Use it from one thread; :meth:`close` is final and may be called at any
    time.

    An exception that a signal raises in the training thread ends the pass, so that only locks matter then:
    the training thread takes no lock but ``_lock``, and waits for gates.
    """

    def __init__(self, engines: list[Engine], calls: list[Call]) -> None:
        self.engines, self.calls = engines, calls
        self.groups: list[TierGroup] = list({id(c): c for e in engines for c in e.groups}.values())
        self.depth = 0
        self.ranks = RankExchanges(calls)
        self._window = Window(self.groups, None)  # the worker's
        self._is_full = False  # whether the window is, since it has changed last
        self._pulls = Pulls(0, is_full=True)
        self._to_pull = 0  # batches behind the last batch that is planned ahead
        self._used = 0
        self._handed = 0  # batches that the worker has got
        self._prepared = 0  # of these, batches that it has prepared
        self._coming: deque[Planned] = deque()  # pulled, not yet used; the first is the next to be used
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._announced: deque[Planned] = deque()  # the training thread's: sizes are being exchanged
        self._to_prepare: deque[Planned] = deque()
        self._to_plan: deque[Planned] = deque()
        self._recent = RecentBatches()
        self._lookups = 0  # batches that have a place in the order of the worker's plans
        self._demanded = -1  # a thread cannot go on before the lookup at this place is planned
        self._exhausted = self._started = self._stopping = self._closed = self._broken = False
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the worker; the caller must call :meth:`close`, also if this fails."""
        uninterrupted(self._begin)

    def _begin(self) -> None:
        end_at_exit(self)
        thread = threading.Thread(target=self._work, name="tierstore-prefetch", daemon=True)
        thread.start()
        self._thread = thread

    # -- training thread ------------------------------------------------------------------------

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
        with self._lock:
            self._exhausted = True
            self._changed.notify_all()
        return planned if planned.exchanges else None

    @property
    def ended(self) -> bool:
        """Return whether no more batches are pulled, or another rank has no more batches."""
        return self._exhausted

    def send(self) -> None:
        """Hand the worker the batches whose sizes the ranks have exchanged."""
        while self._announced:
            planned = self._announced.popleft()
            self.ranks.send(planned)
            with self._lock:
                self._handed += 1
                if self._failure is None:
                    self._to_prepare.append(planned)
                else:
                    planned.prepared.open()
                    planned.settled.open()
                self._exhausted |= self.ranks.apart
                self._changed.notify_all()

    def choose(self, window: int | None) -> None:
        """Let the window have ``window`` batches, or be automatic. Call it before the first batch."""
        self._window = Window(self.groups, window)

    def start(self, depth: int, window: int, is_full: bool) -> None:
        """Plan batches from now on, the first with ``window`` batches behind it. Later batches are planned
        when their windows are full, or as many batches are announced as :meth:`allow` says. ``is_full``:
        whether the first window is full.
        """
        self._pulls = Pulls(window, is_full)
        self._to_pull = window if self._window.length is not None else self._pulls.window
        for group in self.groups:
            group.stats.prefetched = depth, window
        with self._lock:
            self.depth, self._started = depth, True
            if self._coming:
                self._coming[0].limit = self._handed
            self._changed.notify_all()

    def allow(self) -> None:
        """Let the worker announce the batches that it has got before it plans the batches up to ``depth``
        ahead: the last of these can only be planned from now on, and what is known then must not depend on
        time."""
        with self._lock:
            for planned in islice(self._coming, self.depth + 1):
                if planned.limit is None:
                    planned.limit = self._handed
            self._changed.notify_all()

    def follow(self, planned: Planned) -> None:
        """Choose how many batches to pull now, by the plan of a batch that was used."""
        if self._window.length is not None:
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
        if self._failure is not None:
            raise self._failure
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
        self._demand(planned.last)  # its plans gain nothing any more by waiting
        planned.drop()

    def _demand(self, place: int) -> None:
        """Let no lookup up to ``place`` wait for releases, in any group: a thread waits for the lookup at
        ``place``, and the release may depend on that thread."""
        with self._lock:
            self._demanded = max(self._demanded, place)
        for group in self.groups:
            group.order.wake()

    def close(self) -> None:
        # A forked child has no worker, and its locks may never be released.
        if self._closed or os.getpid() != self._process:
            return
        if self._is_in_the_way():
            threading.Thread(target=self._close, name="tierstore-end", daemon=True).start()
        else:
            uninterrupted(self._close)

    def _is_in_the_way(self) -> bool:
        """Return whether the garbage collector ended an abandoned loop in a thread that the worker waits
        for."""
        ours = works_here() or threading.current_thread().name.startswith("tierstore-")
        locks: list[Any] = [group.residency_lock for group in self.groups]
        return ours or any(lock._is_owned() for lock in locks)

    def _close(self, seconds: float | None = None) -> None:
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
        for group in self.groups:
            group.forget_window()  # a plan may wait for rows that are read ahead
            group.order.wake()
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return
        self._abandon()
        for planned in self._coming:
            for _, ahead in planned.aheads:
                ahead.release()
        self._coming.clear()
        self._closed = True

    def end_at_exit(self) -> None:
        if not self._closed:
            self._close(_END_SECONDS)  # other ranks may be gone, and the worker wait for them

    # -- worker -------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            share_processors()
            while self._do_next():
                pass
        except BaseException as error:  # next() tells the training thread
            with self._lock:
                self._failure = error
            self._break()

    def _do_next(self) -> bool:
        """Plan or prepare a batch; return False when all work is done."""
        with self._lock:
            self._changed.wait_for(lambda: self._stopping or self._can_plan() or bool(self._to_prepare))
            if self._stopping:
                return False
            plan = self._can_plan()
            planned = (self._to_plan if plan else self._to_prepare).popleft()
        try:
            if plan:
                self._window.plan(planned, self._is_full, self.depth)
                self._plan(planned)
                self._is_full = self._window.is_full()
            else:
                self._prepare(planned)
        except BaseException:
            planned.cancel()  # the forward call may wait before it learns the error
            raise
        finally:
            planned.prepared.open()
            if plan or self._broken:
                planned.settled.open()
        return True

    def _can_plan(self) -> bool:
        if not self._started or self._broken or not self._to_plan:
            return False
        limit = self._to_plan[0].limit
        at_limit = limit is not None and self._prepared >= limit
        return self._is_full or at_limit or (self._exhausted and not self._to_prepare)

    def _prepare(self, planned: Planned) -> None:
        if not self._broken and not planned.is_end:
            for number, call in enumerate(self.calls):
                self._prepare_call(planned, number, call)
        self._prepared += 1
        if not self._broken:
            self._window.add(planned)
            planned.fills = self._is_full = self._window.is_full()
        with self._lock:
            if not self._broken:
                self._to_plan.append(planned)

    def _prepare_call(self, planned: Planned, number: int, call: Call) -> None:
        module: Any = call.module
        exchange = planned.exchanges.pop(number, None)
        if module.collective and exchange is None:
            return
        try:
            with planned.on_streams():  # arguments may be computed where the ids are
                args, kwargs = call.arguments(planned.batch)
                inputs = module.lookup_inputs(*args, **kwargs)
                if exchange is None:
                    content = content_of(inputs)  # before the ids are read, so that changes are noticed
                    lookup = module.make_lookup(*args, **kwargs)
                else:
                    content, lookup = planned.contents[number], module.finish_exchange(exchange)
        except (TierStoreError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            # The forward call raises the batch's error in the user's own thread.
            logger.debug("no prefetch for a batch: %s", error)
            return
        except BaseException as error:  # no forward call would raise this error by itself
            planned.aheads.append((module, Ahead.failed(error)))
            return
        planned.keep(module, Ahead(inputs, content, lookup), tensors_read(module, args, kwargs))
        self._announce(planned, lookup)

    def _announce(self, planned: Planned, lookup: Lookup) -> None:
        for part in lookup.parts:
            if self._broken:
                return
            place = self._lookups = self._lookups + 1
            seq = part.group.order.take()
            part.rows = pinned = PinnedRows(part.group, part.batch, seq, partial(self._demand, place))
            planned.lookups.append((part.group, pinned))
            planned.last = place
            planned.first.setdefault(id(part.group), seq)
            try:
                part.group.announce(seq, part.batch)
            except BaseException as error:
                pinned.fail(error)
                self._break()

    def _plan(self, planned: Planned) -> None:
        self._recent.add(planned, self.depth)
        place = planned.last - len(planned.lookups)
        for group, pinned in planned.lookups:
            place += 1

            def stop(place: int = place) -> bool:
                return self._stopping or self._demanded >= place

            try:
                pinned_since = self._recent.pinned_since(group)
                with group.stats.stage("wait_seconds"):
                    group.order.wait_released(pinned_since, stop=stop)
                if not self._stopping and not self._broken:
                    group.plan(pinned, pinned_since, announced=True, stop=stop)
            except BaseException as error:  # the forward call that needs these rows raises it
                if not self._stopping:  # else the window was forgotten: that call looks up on demand
                    pinned.fail(error)
                self._break()
            pinned.cancel()

    def _break(self) -> None:
        """Look later batches up on demand, since a plan that they rely on has failed."""
        self._broken = True
        self._abandon()

    def _abandon(self) -> None:
        """Plan nothing more ahead: waiting forward calls look up on demand."""
        with self._lock:
            waiting = [*self._to_plan, *self._to_prepare]
            self._to_plan.clear()
            self._to_prepare.clear()
        for planned in waiting:
            planned.cancel()
        for group in self.groups:
            group.forget_window()
