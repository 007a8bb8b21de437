"""The streams of a GPU, and what in them waits for what.

An operation is named by its *mark*: its number, in which the operations of all streams count together, and
its stream. Whoever touches memory after an operation waits for its mark, in a stream or on the host. Nothing
waits for a whole stream or for the device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_int
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from tierstore.cuda.driver import CallError, Driver
from tierstore.errors import ClosedError, GpuError

NOTHING = 0
"""The mark before the first operation, for which nobody waits."""
_STREAM_BITS = 3
_STREAM_MASK = (1 << _STREAM_BITS) - 1
_NON_BLOCKING, _DISABLE_TIMING, _RELAXED_CAPTURE = 1, 2, 2
_OF_KERNELS = frozenset({214, 220, 226, 700, 702, 710, *range(714, 720), 721})
"""Errors of kernels that ran earlier, and of the GPU's memory and links; no call succeeds after one."""


class Stream(IntEnum):
    """COMPUTE: lookups and updates. UP: into rows. DOWN: out of rows. INDEX: the index arrays of COMPUTE.
    SORT: lookups that are made on the GPU."""

    COMPUTE = 0
    UP = 1
    DOWN = 2
    INDEX = 3
    SORT = 4


def stream_of(mark: int) -> Stream:
    """Return the stream of an operation."""
    return Stream(mark & _STREAM_MASK)


class Context:
    """The context of a GPU that all libraries of the process share; current in a thread inside ``with``.

    The thread's calls are then no part of a graph that another thread captures. Without saying so, calls for
    memory and questions for events would be refused while a graph is captured, and the graph be lost.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device
        self._handle = driver.handle("cuDevicePrimaryCtxRetain", device)
        self._modes = threading.local()

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent_v2", self._handle)
        mode = c_int(_RELAXED_CAPTURE)
        self._modes.__dict__.setdefault("before", []).append(mode)
        self._driver.exchange_capture_mode(mode)

    def __exit__(self, *error: object) -> None:
        self._driver.exchange_capture_mode(self._modes.before.pop())
        self._driver.handle("cuCtxPopCurrent_v2")

    def release(self) -> None:
        """Give the context up; it ends with its last user."""
        self._driver.call("cuDevicePrimaryCtxRelease_v2", self._device)


@dataclass
class _Timeline:
    """Operations of one stream that are not known to be done: the event of each, and the kernels in it."""

    done: int = 0
    last: int = 0
    pending: dict[int, tuple[int, list[str]]] = field(default_factory=dict)


class Operation:
    """What one caller gives to a stream at once. ``handle``: the stream's. ``mark``: the operation's."""

    def __init__(self, streams: Streams, stream: Stream, handle: int, mark: int) -> None:
        self._streams, self.stream, self.handle, self.mark = streams, stream, handle, mark
        self.kernels: list[str] = []
        self.before: list[Sequence[int]] = []
        """Marks of operations that are to be done before this one, and that it does not wait for yet. Whoever
        puts this operation's mark in the place of another puts that here first, or in the same step."""

    def wait_for(self, mark: int) -> None:
        """Let what follows begin after the operation ``mark``."""
        self._streams.order(self.stream, self.handle, mark)

    def wait(self) -> None:
        """Let what follows begin after the operations ``before`` it."""
        while self.before:
            for mark in self.before[-1]:
                self.wait_for(mark)
            self.before.pop()

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes between device memory and pinned memory."""
        if size:
            self.copying(target, source, size)()

    def copying(self, target: int, source: int, size: int) -> partial[int]:
        """Return the native call that :meth:`copy` makes."""
        return self._streams.driver.ready("cuMemcpyAsync", target, source, size, self.handle)


class Streams:
    """Streams of one GPU. ``compute``: gives the handle of the stream in which the caller's thread computes
    now; None: a stream of its own. Calls come from any thread."""

    def __init__(self, driver: Driver, device: int, compute: Callable[[], int] | None = None) -> None:
        self.driver = driver
        self.context = Context(driver, device)
        self.lock = threading.RLock()
        """Held while an operation is given to its stream."""
        self._process = os.getpid()
        self._compute, self._last_compute = compute, 0
        self._timelines = [_Timeline() for _ in Stream]
        self._number = 0
        self._events: list[int] = []
        self._open: Operation | None = None
        """The operation under way; to who has taken the lock, one that a signal's exception has cut off."""
        self._failed: GpuError | None = None
        self._closed = False
        self._handles: dict[Stream, int] = {}
        try:
            with self.context:
                self._create([s for s in Stream if s is not Stream.COMPUTE or compute is None])
        except BaseException:
            self.context.release()
            raise

    def _create(self, own: Sequence[Stream]) -> None:
        # Copies must not wait behind the dense kernels of a model.
        highest = self._highest_priority()
        for stream in own:
            priority = highest if stream else 0
            self._handles[stream] = self.driver.handle("cuStreamCreateWithPriority", _NON_BLOCKING, priority)

    def _highest_priority(self) -> int:
        least, highest = c_int(), c_int()
        self.driver.call("cuCtxGetStreamPriorityRange", byref(least), byref(highest))
        return highest.value

    # -- operations -----------------------------------------------------------------------------

    @contextmanager
    def operation(self, stream: Stream) -> Iterator[Operation]:
        """Give an operation to ``stream``; nobody else gives any meanwhile.

        Raises ``GpuError`` if an earlier operation has failed.
        """
        with self.lock, self.calls():
            self._end_open()
            handle = self._handle_of(stream)
            self._number += 1
            operation = Operation(self, stream, handle, self._number << _STREAM_BITS | stream)
            self._open = operation
            try:
                yield operation
            finally:
                self._end_open()

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Let this thread call the driver; name what has failed."""
        self.check()
        try:
            with self.context:
                yield
        except CallError as error:
            if error.code not in _OF_KERNELS:
                raise
            raise self._named(error) from None

    def check(self) -> None:
        """Raise ``GpuError`` after a failure, ``ClosedError`` after :meth:`close` and in a forked child."""
        if self._closed or not self.is_here:
            raise ClosedError("the GPU device is closed, or was opened by the parent of this forked process")
        if self._failed is not None:
            raise GpuError(str(self._failed))

    @property
    def is_here(self) -> bool:
        """Whether this process has the device: a forked child has not."""
        return os.getpid() == self._process

    @property
    def is_usable(self) -> bool:
        """Whether the driver can be called."""
        return self.is_here and not self._closed and self._failed is None

    def _handle_of(self, stream: Stream) -> int:
        if stream is not Stream.COMPUTE or self._compute is None:
            return self._handles[stream]
        handle = self._compute()
        if self.driver.is_capturing(handle):
            raise GpuError(
                "a CUDA graph is being captured, and a lookup cannot be part of a graph: its rows move "
                "between replays. Capture the dense layers alone (torch.cuda.graph around them)"
            )
        if handle != self._last_compute:
            self._last_compute = handle
            self._follow(handle, self._timelines[stream])
        return handle

    def _follow(self, handle: int, timeline: _Timeline) -> None:
        """Let operations of one timeline follow each other, whichever stream the caller has chosen."""
        self._wait(handle, timeline, timeline.last)

    def handle(self, stream: Stream) -> int:
        """Return the handle of a stream of the device's own."""
        return self._handles[stream]

    def handles(self) -> list[int]:
        """Return the handles of all streams of the device's own."""
        return list(self._handles.values())

    def order(self, stream: Stream, handle: int, mark: int) -> None:
        """Let what ``stream`` is given from now on begin after the operation ``mark``."""
        if (other := mark & _STREAM_MASK) != stream:
            self._wait(handle, self._timelines[other], mark >> _STREAM_BITS)

    def _wait(self, handle: int, timeline: _Timeline, number: int) -> None:
        if number > timeline.done:
            try:
                self.driver.call("cuStreamWaitEvent", handle, self._event(timeline, number), 0)
            except CallError as error:  # what comes later would not be in order
                raise self._named(error) from None

    def _event(self, timeline: _Timeline, number: int) -> int:
        """Return the event of an operation that is not known to be done."""
        if number not in timeline.pending:
            self._end_open()
        return timeline.pending[number][0]

    def _end_open(self) -> None:
        """Record the event behind the open operation, without which nobody could wait for it. A signal's
        exception may come at any line: who needs the event next makes the call again."""
        if (operation := self._open) is not None:
            operation.wait()
            try:
                self._record(operation)
            except CallError as error:
                raise self._named(error, operation.kernels) from None
            self._open = None

    def _record(self, operation: Operation) -> None:
        timeline, number = self._timelines[operation.stream], operation.mark >> _STREAM_BITS
        if number in timeline.pending:
            return
        self._forget_done(timeline)
        if not self._events:
            self._events.append(self.driver.handle("cuEventCreate", _DISABLE_TIMING))
        self.driver.call("cuEventRecord", self._events[-1], operation.handle)
        timeline.last = number
        timeline.pending[number] = self._events.pop(), operation.kernels

    def _forget_done(self, timeline: _Timeline) -> None:
        while timeline.pending:
            number, (event, _) = next(iter(timeline.pending.items()))
            if number > timeline.done and not self.driver.is_done(event):
                break
            timeline.done = max(timeline.done, number)
            self._events.append(timeline.pending.pop(number)[0])  # an event is never in both

    # -- what is done ----------------------------------------------------------------------------

    def unknown(self, marks: Sequence[int]) -> list[int]:
        """Return the marks that are not known to be done."""
        return [m for m in marks if m >> _STREAM_BITS > self._timelines[m & _STREAM_MASK].done]

    def is_done(self, mark: int) -> bool:
        """Return whether the operation is done; the host may use its memory then."""
        self.check()
        timeline, number = self._timelines[mark & _STREAM_MASK], mark >> _STREAM_BITS
        if number <= timeline.done:
            return True  # without the lock, which another thread may hold while the driver lets it wait
        with self.lock, self.calls():
            if number > timeline.done and self.driver.is_done(self._event(timeline, number)):
                timeline.done = number
            return number <= timeline.done

    def synchronize(self, mark: int) -> None:
        """Wait until the operation is done. Only threads that plan or move rows may."""
        self.check()
        timeline, number = self._timelines[mark & _STREAM_MASK], mark >> _STREAM_BITS
        if number <= timeline.done:
            return
        with self.calls():
            with self.lock:
                if number <= timeline.done:
                    return
                event = self._event(timeline, number)
            self.driver.call("cuEventSynchronize", event)
            with self.lock:
                timeline.done = max(timeline.done, number)

    def synchronize_all(self) -> None:
        """Wait until every operation that was given so far is done."""
        with self.lock, self.calls():
            self._end_open()
            marks = [timeline.last << _STREAM_BITS | s for s, timeline in enumerate(self._timelines)]
        for mark in marks:
            self.synchronize(mark)

    def given_up(self, error: CallError) -> GpuError:
        """Return the error that every later call raises, because of this one."""
        return self._named(error)

    def _named(self, error: CallError, last: Sequence[str] = ()) -> GpuError:
        if self._failed is None:
            pending = [*(kernels for t in self._timelines for _, kernels in t.pending.values()), last]
            names = list(dict.fromkeys(name for kernels in pending for name in kernels))
            self._failed = GpuError(
                f"a kernel has failed on the GPU: {error}. Kernels that had not ended: "
                f"{', '.join(names) or 'none of tierstore'}. Rows of the last commit are safe; start again "
                "from it. CUDA_LAUNCH_BLOCKING=1 in the environment stops at the kernel that fails"
            )
        return self._failed

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all operations, and give everything back; after a failure, and in a forked child, there is
        nothing to give back."""
        if not self.is_usable:
            self._closed = True
            return
        try:
            self.synchronize_all()
            with self.calls():
                events = [event for t in self._timelines for event, _ in t.pending.values()] + self._events
                for event in events:
                    self.driver.call("cuEventDestroy_v2", event)
                for handle in self._handles.values():
                    self.driver.call("cuStreamDestroy_v2", handle)
            self.context.release()
        finally:
            self._closed = True
