"""One pass over a loader with prefetch: the worker that plans ahead, and what the training thread does
between batches.

The training thread pulls batches from the loader (so the loader needs no thread-safety, and random numbers
are drawn in a reproducible order); the worker deduplicates their ids, announces them to the window and
plans them in order, at most ``depth`` batches ahead of the one in use.

Collectives of sharded modules are begun by the training thread alone, at points that depend on nothing but
the number of batches, so that all ranks begin them in the same order; the worker waits for their ends. The
end of the batches is exchanged like one more batch, so that a rank that has fewer is not waited for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tierstore.cache.chain import Chain
from tierstore.cache.engine import Engine
from tierstore.cache.ticket import Ticket
from tierstore.errors import ClosedError, RankError, TierStoreError
from tierstore.modules.base import Ahead, TieredModule
from tierstore.modules.lookup import Lookup
from tierstore.pipeline.learning import Call

logger = logging.getLogger("tierstore")


@dataclass(eq=False)
class Planned:
    """One batch on its way: its lookups, and where each chain's numbers begin."""

    batch: Any
    lookups: list[tuple[TieredModule, tuple[Any, ...], Lookup]] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    first: dict[int, int] = field(default_factory=dict)  # id(chain) → number of its first lookup
    expected: list[tuple[TieredModule, Ahead]] = field(default_factory=list)
    exchanges: dict[int, Any] = field(default_factory=dict)  # number of the call → exchange with other ranks
    is_end: bool = False  # no batch, but what comes after the last one
    error: RankError | None = None  # why the ranks cannot go on with this batch
    prepared: bool = False


class Session:
    """Lookahead over one loader. Use from one thread; :meth:`close` is final and may be called at any
    time."""

    def __init__(self, engines: list[Engine], calls: list[Call]) -> None:
        self.engines = engines
        self.calls = calls
        self.chains: list[Chain] = list({id(c): c for e in engines for c in e.chains}.values())
        self.depth = 0
        self.window = 0
        self._coming: deque[Planned] = deque()  # pulled, not yet used; the first is the next to be used
        self._changed = threading.Condition()
        self._announced: deque[Planned] = deque()  # the training thread's: sizes are being exchanged
        self._to_prepare: deque[Planned] = deque()
        self._to_plan: deque[Planned] = deque()
        self._recent: deque[dict[int, int]] = deque()  # first numbers of the last planned batches
        self._exhausted = False
        self._apart = False  # the ranks do not have the same batches any more
        self._started = False
        self._stopping = False
        self._broken = False
        self._thread = threading.Thread(target=self._work, name="tierstore-prefetch", daemon=True)
        self._thread.start()

    # -- training thread ------------------------------------------------------------------------

    def add(self, batch: Any) -> Planned | None:
        """A batch was pulled. None if it is in vain: another rank has had no batch before this one."""
        self.send()
        if self._apart:
            return None
        planned = Planned(batch)
        self._coming.append(planned)
        for number, call in enumerate(self.calls):
            if call.module.collective:
                self._begin_exchange(planned, number, call)
        self._announced.append(planned)
        if not planned.exchanges:
            self.send()
        return planned

    def end(self, error: Exception | None) -> Planned | None:
        """The loader has no more batches, or has raised ``error``: other ranks learn of it. None where there
        are none."""
        self.send()
        planned = Planned(None, is_end=True)
        for number, call in enumerate(self.calls):
            if call.module.collective and not self._apart:
                module: Any = call.module
                planned.exchanges[number] = module.announce_end(error)
        if planned.exchanges:
            self._coming.append(planned)
            self._announced.append(planned)
        with self._changed:
            self._exhausted = True
            self._changed.notify_all()
        return planned if planned.exchanges else None

    @property
    def ended(self) -> bool:
        """Whether no more batches are pulled, or all in vain."""
        return self._exhausted

    def _begin_exchange(self, planned: Planned, number: int, call: Call) -> None:
        module: Any = call.module
        try:
            args, kwargs = call.arguments(planned.batch)
        except (LookupError, AttributeError, TypeError) as error:
            logger.debug("no prefetch for a batch: %s", error)
            args, kwargs = (None,), {}  # a wrong input, of which the other ranks learn: they begin too
        planned.exchanges[number] = module.begin_exchange(*args, **kwargs)

    def send(self) -> None:
        """Hands batches to the worker, whose sizes the ranks have announced to one another meanwhile."""
        while self._announced:
            planned = self._announced.popleft()
            for number, exchange in list(planned.exchanges.items()):
                try:
                    exchange.send()
                except RankError as error:
                    planned.error, self._apart = error, True
                    del planned.exchanges[number]
                except TierStoreError as error:  # on all ranks, and the forward call will raise it
                    logger.debug("no prefetch for a batch: %s", error)
                    del planned.exchanges[number]
            with self._changed:
                self._to_prepare.append(planned)
                self._exhausted |= self._apart
                self._changed.notify_all()

    def least(self, value: int) -> int:
        """The smallest ``value`` of any rank, where ranks look rows up together; else ``value`` itself."""
        for call in self.calls:
            if call.module.collective:
                module: Any = call.module
                return int(module.least(value))
        return value

    def any_rank(self, condition: bool) -> bool:
        """Whether ``condition`` holds on any rank, where ranks look rows up together."""
        return not self.least(int(not condition))

    def start(self, depth: int, window: int) -> None:
        """From now on batches are planned, each once the ``window`` batches behind it are announced."""
        with self._changed:
            self.depth, self.window, self._started = depth, window, True
            self._changed.notify_all()

    def wait_prepared(self, planned: Planned) -> None:
        if planned in self._announced:
            self.send()
        with self._changed:
            self._changed.wait_for(lambda: planned.prepared)

    @property
    def pulled_ahead(self) -> int:
        """Batches pulled and not yet used."""
        return sum(not planned.is_end for planned in self._coming)

    @property
    def wants_more(self) -> bool:
        """Whether another batch is to be pulled before the next one is used: up to the window behind the last
        one that is planned ahead; and one more where that is what sends the ids of the window's last."""
        announced = any(call.module.collective for call in self.calls)
        return len(self._coming) <= self.depth + self.window + announced

    def next(self) -> Planned | None:
        """The next batch, its lookups handed to the modules; None when there are no more. Raises RankError
        where another rank has no such batch, or is lost."""
        if not self._coming:
            return None
        planned = self._coming.popleft()
        self.wait_prepared(planned)
        if planned.error is not None:
            raise planned.error
        if planned.is_end:
            return None
        for module, inputs, lookup in planned.lookups:
            planned.expected.append((module, module.expect(inputs, lookup)))
        return planned

    def finish(self, planned: Planned) -> None:
        """The batch was used: lookups that no forward call has taken are given back."""
        for module, ahead in planned.expected:
            module.drop(ahead)
        for ticket in planned.tickets:  # nothing is gained any more by waiting with its plan
            ticket.chain.sequence.demand(ticket.seq)
        planned.expected.clear()
        planned.lookups.clear()

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for chain in self.chains:
            chain.sequence.wake()
        self._thread.join()
        self._abandon()
        for planned in self._coming:
            for _, _, lookup in planned.lookups:
                lookup.release()
        self._coming.clear()

    # -- worker -------------------------------------------------------------------------------------

    def _stop(self) -> bool:
        return self._stopping

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._can_plan() or bool(self._to_prepare))
                if self._stopping:
                    return
                plan = self._can_plan()
                planned = self._to_plan.popleft() if plan else self._to_prepare.popleft()
            if plan:
                self._plan(planned)
            else:
                self._prepare(planned)

    def _can_plan(self) -> bool:
        if not self._started or self._broken or not self._to_plan:
            return False
        ahead = len(self._to_plan) - 1
        return ahead >= self.window or (self._exhausted and not self._to_prepare)

    def _prepare(self, planned: Planned) -> None:
        if not self._broken and not planned.is_end:
            for number, call in enumerate(self.calls):
                self._prepare_call(planned, call, planned.exchanges.pop(number, None))
        with self._changed:
            planned.prepared = True
            self._to_plan.append(planned)
            self._changed.notify_all()

    def _prepare_call(self, planned: Planned, call: Call, exchange: Any) -> None:
        module: Any = call.module
        if module.collective and exchange is None:
            return
        try:
            args, kwargs = call.arguments(planned.batch)
            inputs = module.lookup_inputs(*args, **kwargs)
            lookup = (
                module.make_lookup(*args, **kwargs) if exchange is None else module.finish_exchange(exchange)
            )
        except (TierStoreError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            # Whatever is wrong with this batch, the forward call will say, in the user's own thread.
            logger.debug("no prefetch for a batch: %s", error)
            return
        for part in lookup.parts:
            seq = part.chain.sequence.take()
            ticket = Ticket(part.chain, part.batch, seq)
            try:
                part.chain.announce(seq, part.batch)
            except ClosedError:
                return
            part.rows = ticket
            planned.first.setdefault(id(part.chain), seq)
            planned.tickets.append(ticket)
        planned.lookups.append((module, inputs, lookup))

    def _plan(self, planned: Planned) -> None:
        self._recent.append(planned.first)
        while len(self._recent) > self.depth + 1:
            self._recent.popleft()
        for index, ticket in enumerate(planned.tickets):
            pinned_since = self._pinned_since(ticket)
            ticket.chain.sequence.wait_released(pinned_since, ticket.seq, stop=self._stop)
            if self._stopping:
                for rest in planned.tickets[index:]:
                    rest.cancel()
                return
            try:
                ticket.chain.plan(ticket, pinned_since, announced=True, stop=self._stop)
            except BaseException as error:  # it surfaces in the forward call that needs these rows
                self._broken = True
                ticket.fail(error)
                for rest in planned.tickets[index + 1 :]:
                    rest.cancel()
                self._abandon()
                return

    def _pinned_since(self, ticket: Ticket) -> int:
        """The first number of this chain in the last ``depth`` batches before this one."""
        return min(first[id(ticket.chain)] for first in self._recent if id(ticket.chain) in first)

    def _abandon(self) -> None:
        """Nothing more is planned ahead: waiting forward calls look up on demand."""
        with self._changed:
            waiting = [*self._to_plan, *self._to_prepare]
            self._to_plan.clear()
            self._to_prepare.clear()
            for planned in waiting:
                planned.prepared = True
            self._changed.notify_all()
        for chain in self.chains:
            try:
                chain.forget_window()
            except ClosedError:
                continue
        for planned in waiting:
            for ticket in planned.tickets:
                ticket.cancel()
