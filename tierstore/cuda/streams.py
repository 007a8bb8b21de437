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

from tierstore.cuda.driver import CallError, Driver
from tierstore.errors import ClosedError, GpuError

NOTHING = 0
"""The mark before the first operation, for which nobody waits."""
_STREAM_BITS = 2
_STREAM_MASK = (1 << _STREAM_BITS) - 1
_NON_BLOCKING, _DISABLE_TIMING = 1, 2
_OF_KERNELS = frozenset({700, 702, 710, *range(714, 720)})
"""Errors of kernels that ran earlier; no call succeeds after one."""


class Stream(IntEnum):
    """COMPUTE: lookups and updates. UP: into rows. DOWN: out of rows. INDEX: the index arrays of COMPUTE."""

    COMPUTE = 0
    UP = 1
    DOWN = 2
    INDEX = 3


class Context:
    """The context of a GPU that all libraries of the process share; current in a thread inside ``with``."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device
        self._handle = driver.handle("cuDevicePrimaryCtxRetain", device)

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent_v2", self._handle)

    def __exit__(self, *error: object) -> None:
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

    def wait_for(self, mark: int) -> None:
        """Let what follows begin after the operation ``mark``."""
        self._streams.order(self.stream, self.handle, mark)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes between device memory and pinned memory."""
        if size:
            self._streams.driver.call("cuMemcpyAsync", target, source, size, self.handle)


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
            handle = self._handle_of(stream)
            self._number += 1
            operation = Operation(self, stream, handle, self._number << _STREAM_BITS | stream)
            try:
                yield operation
            finally:
                self._end(operation)

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
                self.driver.call("cuStreamWaitEvent", handle, timeline.pending[number][0], 0)
            except CallError as error:  # what comes later would not be in order
                raise self._named(error) from None

    def _end(self, operation: Operation) -> None:
        try:
            self._record(operation)
        except CallError as error:
            raise self._named(error, operation.kernels) from None
        except BaseException:  # an interrupt; without an event nobody could wait for the operation
            self._record(operation)
            raise

    def _record(self, operation: Operation) -> None:
        timeline, number = self._timelines[operation.stream], operation.mark >> _STREAM_BITS
        self._forget_done(timeline)
        event = self._events.pop() if self._events else self.driver.handle("cuEventCreate", _DISABLE_TIMING)
        self.driver.call("cuEventRecord", event, operation.handle)
        timeline.pending[number] = event, operation.kernels
        timeline.last = number

    def _forget_done(self, timeline: _Timeline) -> None:
        while timeline.pending:
            number, (event, _) = next(iter(timeline.pending.items()))
            if number > timeline.done and not self.driver.is_done(event):
                break
            timeline.done = max(timeline.done, number)
            self._events.append(event)
            del timeline.pending[number]

    # -- what is done ----------------------------------------------------------------------------

    def unknown(self, marks: Sequence[int]) -> list[int]:
        """Return the marks that are not known to be done."""
        return [m for m in marks if m >> _STREAM_BITS > self._timelines[m & _STREAM_MASK].done]

    def is_done(self, mark: int) -> bool:
        """Return whether the operation is done; the host may use its memory then."""
        timeline, number = self._timelines[mark & _STREAM_MASK], mark >> _STREAM_BITS
        with self.lock, self.calls():
            if number > timeline.done and self.driver.is_done(timeline.pending[number][0]):
                timeline.done = number
            return number <= timeline.done

    def synchronize(self, mark: int) -> None:
        """Wait until the operation is done. Only threads that plan or move rows may."""
        timeline, number = self._timelines[mark & _STREAM_MASK], mark >> _STREAM_BITS
        with self.calls():
            with self.lock:
                if number <= timeline.done:
                    return
                event = timeline.pending[number][0]
            self.driver.call("cuEventSynchronize", event)
            with self.lock:
                timeline.done = max(timeline.done, number)

    def synchronize_all(self) -> None:
        """Wait until every operation that was given so far is done."""
        with self.lock:
            marks = [timeline.last << _STREAM_BITS | s for s, timeline in enumerate(self._timelines)]
        for mark in marks:
            self.synchronize(mark)

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
