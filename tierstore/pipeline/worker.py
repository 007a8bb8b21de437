"""The worker of a prefetch: the steps of the thread that prepares batches and plans them ahead.

The worker deduplicates the ids of the batches that it is given, announces them to the window and plans them
in order, at most ``depth`` batches ahead of the one in use.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch

from tierstore.cache.group import TierGroup
from tierstore.cache.pinned_rows import PinnedRows
from tierstore.modules.ahead import Ahead
from tierstore.modules.parts import Lookup
from tierstore.pipeline.learning import Call, tensors_read
from tierstore.pipeline.made import Made, Maker, Stopped
from tierstore.pipeline.on_demand import WRONG_BATCH, say_why
from tierstore.pipeline.planned import Planned, RecentBatches
from tierstore.pipeline.processors import Apart, Sharing, give_way
from tierstore.pipeline.windows import Window


class Worker:
    """The batches that wait to be prepared or planned, and what is known between them.

    ``_lock`` guards the batches that wait and the flags that say what the worker may do; the other fields are
    the worker's own. Private methods run in the worker's thread, public ones but :meth:`work` in the training
    thread, which takes no other lock here.
    """

    def __init__(self, groups: list[TierGroup], calls: list[Call]) -> None:
        self.groups, self.calls = groups, calls
        self.failure: BaseException | None = None  # what ended the worker
        self.is_exhausted = False  # whether no batches come after those that it has got
        self._depth = 0
        self._window = Window(groups, None)
        self._is_full = False  # whether the window is, since it has changed last
        self._given = 0  # batches that it has got
        self._prepared = 0  # of these, batches that it has prepared
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._to_prepare: deque[Planned] = deque()
        self._to_plan: deque[Planned] = deque()
        self._recent = RecentBatches()
        self._apart: Apart | None = None  # once it gives way
        self._training = 0  # the system's number of the training thread
        self._computing = 0  # threads that torch computes with there, which a user may change at any time
        self._sharing = Sharing()
        self._lookups = 0  # batches that have a place in the order of the worker's plans
        self._demanded = -1  # a thread cannot go on before the lookup at this place is planned
        self._is_started = False  # whether batches may be planned
        self._is_stopping = False
        self._is_broken = False  # whether a plan has failed that later plans rely on
        self._maker = Maker.beside() if any(not call.module.collective for call in calls) else None

    # -- training thread ------------------------------------------------------------------------

    def give(self, planned: Planned, is_last: bool) -> None:
        """Let a batch be prepared. ``is_last``: whether no batches come after it."""
        with self._lock:
            self._given += 1
            self._computing = torch.get_num_threads()  # the worker would see the number of its own first look
            if self.failure is None:
                if self._maker is not None:
                    self._maker.begin(planned, self.calls)
                self._to_prepare.append(planned)
            else:
                planned.prepared.open()
                planned.settled.open()
            self.is_exhausted |= is_last
            self._changed.notify_all()

    def exhaust(self) -> None:
        """Tell the worker that no batches come after those that it has got."""
        with self._lock:
            self.is_exhausted = True
            self._changed.notify_all()

    def choose(self, window: int | None) -> None:
        """Let the window have ``window`` batches, or be automatic. Call it before the first batch."""
        self._window = Window(self.groups, window)

    def start(self, depth: int, first: Planned | None) -> None:
        """Let batches be planned, ``first`` with the batches that the worker has got by now."""
        with self._lock:
            self._training = threading.get_native_id()
            self._depth, self._is_started = depth, True
            if first is not None:
                first.limit = self._given
            self._changed.notify_all()

    def allow(self, coming: Iterable[Planned]) -> None:
        """Let each of the ``coming`` batches be planned once the batches that the worker has got by now are
        announced."""
        with self._lock:
            for planned in coming:
                if planned.limit is None:
                    planned.limit = self._given
            self._changed.notify_all()

    def demand(self, place: int) -> None:
        """Let no lookup up to ``place`` wait for releases, in any group: a thread waits for the lookup at
        ``place``, and the release may depend on that thread."""
        with self._lock:
            self._demanded = max(self._demanded, place)
        for group in self.groups:
            group.order.wake()

    def stop(self) -> None:
        """Let the worker end after the step that it is making, which waits for nothing any more. It ends also
        if this raises."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
        with ExitStack() as ends:
            if self._maker is not None:
                ends.callback(self._maker.stop)
            for group in self.groups:
                ends.callback(group.order.wake)
                ends.callback(group.forget_window)  # a plan may wait for rows that are read ahead

    def abandon(self) -> None:
        """Plan nothing more ahead: waiting forward calls look up on demand, also if this raises."""
        with self._lock:
            waiting = [*self._to_plan, *self._to_prepare]
            self._to_plan.clear()
            self._to_prepare.clear()
        with ExitStack() as ends:
            for group in self.groups:
                ends.callback(group.forget_window)
            for planned in waiting:
                ends.callback(planned.cancel)

    # -- worker's thread ------------------------------------------------------------------------

    def work(self) -> None:
        """Prepare and plan batches until :meth:`stop`, or until a step fails."""
        try:
            self._sharing.begin()
            while self._do_next():
                pass
        except BaseException as error:  # the session tells the training thread
            with self._lock:
                self.failure = error
            with suppress(BaseException):  # the session's end forgets the windows again
                self._break()
        finally:
            self._sharing.end()
            if self._maker is not None:
                self._maker.end()

    def _do_next(self) -> bool:
        """Plan or prepare a batch; return False when all work is done."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_stopping or self._can_plan() or bool(self._to_prepare))
            if self._is_stopping:
                return False
            plan = self._can_plan()
            planned = (self._to_plan if plan else self._to_prepare).popleft()
            computing = self._computing
        self._sharing.look(computing)
        try:
            if plan:
                self._window.plan(planned, self._is_full, self._depth)
                self._plan(planned)
                self._is_full = self._window.is_full()
            else:
                self._prepare(planned)
        except BaseException:
            planned.cancel()  # the forward call may wait before it learns the error
            raise
        finally:
            planned.prepared.open()
            if plan or self._is_broken:
                planned.settled.open()
        return True

    def _can_plan(self) -> bool:
        if not self._is_started or self._is_broken or not self._to_plan:
            return False
        limit = self._to_plan[0].limit
        at_limit = limit is not None and self._prepared >= limit
        return self._is_full or at_limit or (self.is_exhausted and not self._to_prepare)

    def _prepare(self, planned: Planned) -> None:
        if not self._is_broken and not planned.is_end:
            for number, call in enumerate(self.calls):
                self._prepare_call(planned, number, call)
        self._prepared += 1
        if not self._is_broken:
            self._window.add(planned)
            planned.fills = self._is_full = self._window.is_full()
        with self._lock:
            if not self._is_broken:
                self._to_plan.append(planned)

    def _prepare_call(self, planned: Planned, number: int, call: Call) -> None:
        module: Any = call.module
        exchange = planned.exchanges.pop(number, None)
        if module.collective and exchange is None:
            return
        made = planned.made.pop(number, None) or Made(call)
        try:
            with planned.on_streams():  # arguments may be computed where the ids are
                if exchange is None:
                    made.lookup_of(planned.batch)
                else:
                    made.arguments_of(planned.batch)
                    made.content, made.lookup = planned.contents[number], module.finish_exchange(exchange)
        except Stopped:
            return
        except WRONG_BATCH as error:  # the forward call raises the batch's error in the user's own thread
            say_why(call, error, has_arguments=made.args is not None)
            return
        except BaseException as error:  # no forward call would raise this error by itself
            planned.aheads.append((module, Ahead.failed(error)))
            return
        assert made.args is not None
        ahead = Ahead(made.inputs, made.content, made.lookup, made.form)
        planned.keep(module, ahead, tensors_read(module, made.args, made.kwargs))
        self._announce(planned, made.lookup)

    def _announce(self, planned: Planned, lookup: Lookup | None) -> None:
        assert lookup is not None
        for part in lookup.parts:
            if self._is_broken:
                return
            place = self._lookups = self._lookups + 1
            seq = part.group.order.take()
            part.rows = pinned = PinnedRows(part.group, part.batch, seq, partial(self.demand, place))
            pinned.index_arrays = part.index_arrays
            planned.lookups.append((part.group, pinned))
            planned.last = place
            planned.first.setdefault(id(part.group), seq)
            try:
                part.group.announce(seq, part.batch)
            except BaseException as error:
                pinned.fail(error)
                self._break()

    def _plan(self, planned: Planned) -> None:
        self._give_way()
        self._recent.add(planned, self._depth)
        place = planned.last - len(planned.lookups)
        for group, pinned in planned.lookups:
            place += 1

            def stop(place: int = place) -> bool:
                return self._is_stopping or self._demanded >= place

            try:
                pinned_since = self._recent.pinned_since(group)
                with group.stats.stage("wait_seconds"):
                    group.order.wait_released(pinned_since, stop=stop)
                if not self._is_stopping and not self._is_broken:
                    group.plan(pinned, pinned_since, announced=True, stop=stop)
            except BaseException as error:  # the forward call that needs these rows raises it
                if not self._is_stopping:  # else the window was forgotten: that call looks up on demand
                    pinned.fail(error)
                self._break()
            pinned.cancel()

    def _give_way(self) -> None:
        """Give way to other threads, once no thread is left to be started here that they wait for, and stay
        off the training thread's processor."""
        threads = [threading.get_native_id()]
        for group in self.groups:
            if (own := group.stack.threads()) is None:
                return
            threads += own
        if self._apart is None:
            give_way()
            self._apart = Apart(self._training, self._stalled)
        if not any(call.module.collective for call in self.calls):  # else other ranks train beside
            self._apart.look(threads, self._computing)

    def _stalled(self) -> float:
        """Return the seconds that forward calls have waited for plans."""
        return sum(group.stats.counters.stall_seconds for group in self.groups)

    def _break(self) -> None:
        """Look later batches up on demand, since a plan that they rely on has failed."""
        self._is_broken = True
        self.abandon()
