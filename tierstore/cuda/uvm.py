"""Rows of ``uvm``: in memory of the host that kernels of a GPU read and write in place.

Rows move between here and the GPU's memory by a kernel, so the host neither copies them nor waits for them.
The host reads and writes rows here, too, for the store: it waits for the last operations on these rows alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from tierstore._core import AddressSpaceError, HostMemory, HostRows, RowCodec
from tierstore.config import format_bytes
from tierstore.cuda.compute import CudaRows
from tierstore.cuda.driver import OUT_OF_MEMORY, CallError
from tierstore.cuda.places import Memory
from tierstore.cuda.rows import Parts, RowBytes, Slots
from tierstore.cuda.streams import Stream, Streams
from tierstore.errors import GpuError
from tierstore.row_format import WIDE

PIECE = 1 << 30
"""Bytes that are registered by one call: the driver refuses, or holds up others, in larger ones."""
_PAGE = 2 << 20
_PORTABLE, _MAPPED = 1, 2
_GLOBAL, _HOST = 1, -1
_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5


class PinnedArena:
    """Address space of the host whose first part has memory that is locked and registered with the driver. A
    forked child does not have it."""

    def __init__(self, streams: Streams, size: int) -> None:
        self._streams = streams
        self._memory = HostMemory(size)
        self.base = self._memory.address
        self._size = size + -size % _PAGE
        self._pieces: list[int] = []
        self.mapped = 0

    def commit(self, size: int) -> None:
        """Give the first ``size`` bytes memory. Raises ``AddressSpaceError``; earlier bytes stay usable."""
        end = min(size + -size % _PAGE, self._size)
        if end > self.mapped:
            self._memory.commit(end)
        while self.mapped < end:
            self._register(min(PIECE, end - self.mapped))

    ensure = commit

    def _register(self, size: int) -> None:
        begin = self.base + self.mapped
        try:
            with self._streams.calls():
                self._streams.driver.call("cuMemHostRegister_v2", begin, size, _PORTABLE | _MAPPED)
        except CallError as refused:
            raise AddressSpaceError(
                f"{format_bytes(size)} of host memory cannot be locked for the GPU, beside "
                f"{format_bytes(self.mapped)} that are: {refused}"
            ) from None
        self._pieces.append(begin)
        self.mapped += size

    def discard(self, begin: int, marks: Sequence[int]) -> None:
        """Keep the memory, since pages that are registered must stay."""

    def close(self, marks: Callable[[], Sequence[int]]) -> None:
        """Wait for the last operations, ``marks()``, and give everything back; after a failure nothing can
        be."""
        if not self._streams.is_usable:
            return
        with suppress(GpuError):
            for mark in marks():
                self._streams.synchronize(mark)
            with self._streams.calls():
                while self._pieces:
                    self._streams.driver.call("cuMemHostUnregister", self._pieces.pop())


class ManagedArena:
    """Managed memory that stays with the host, and that the GPU reaches without moving pages."""

    def __init__(self, streams: Streams, device: int, size: int) -> None:
        self._streams = streams
        self.mapped = size + -size % _PAGE
        driver = streams.driver
        with streams.calls():
            try:
                self.base = driver.address("cuMemAllocManaged", self.mapped, _GLOBAL)
            except CallError as refused:
                if refused.code != OUT_OF_MEMORY:
                    raise
                raise AddressSpaceError(
                    f"the driver refuses {format_bytes(self.mapped)} of managed memory"
                ) from None
            try:
                for advice, where in ((_PREFERRED_LOCATION, _HOST), (_ACCESSED_BY, device)):
                    driver.call("cuMemAdvise", self.base, self.mapped, advice, where)
            except BaseException:
                driver.call("cuMemFree_v2", self.base)
                raise

    def commit(self, size: int) -> None:
        """Do nothing: pages get memory when they are first touched."""

    ensure = commit

    def discard(self, begin: int, marks: Sequence[int]) -> None:
        """Keep the memory."""

    def close(self, marks: Callable[[], Sequence[int]]) -> None:
        """Wait for the last operations, ``marks()``, and give the memory back."""
        if not self._streams.is_usable:
            return
        with suppress(GpuError):
            for mark in marks():
                self._streams.synchronize(mark)
            with self._streams.calls():
                self._streams.driver.call("cuMemFree_v2", self.base)


class UvmRows(CudaRows):
    """``DeviceRows`` of tierstore/cache/device.py in memory of the host that a GPU works on, too."""

    arrival = Stream.DOWN

    def __init__(
        self, parts: Parts, memory: Memory, slots: int, row_bytes: int, weights: str = WIDE.weights
    ) -> None:
        super().__init__(parts, memory, slots, row_bytes, weights)
        self._view: RowBytes = np.empty((0, row_bytes), np.uint8)

    def commit(self, slots: int) -> None:
        """Take the memory of the first ``slots`` slots; others may use the GPU meanwhile."""
        if slots > self._slots:
            raise ValueError("there are not so many slots")
        self._memory.commit(slots * self.row_bytes)
        with self.parts.streams.lock:
            self.touched.grow(slots)

    def on_host(self, slots: Slots, *, write: bool) -> HostRows:
        """Wait for the last operations on ``slots``, and return the rows for the host to read, or with
        ``write`` to write."""
        self.parts.streams.check()
        for mark in self.touched.last(slots):
            self.parts.streams.synchronize(mark)
        n = self._memory.mapped // self.row_bytes
        if len(self._view) != n:
            memory = (ctypes.c_uint8 * (n * self.row_bytes)).from_address(self._memory.base)
            self._view = np.frombuffer(memoryview(memory).cast("B"), np.uint8).reshape(n, self.row_bytes)
        return HostRows.view(self._view, self.weights)

    def copy_out(self, slots: Slots, out: RowBytes) -> None:
        self.on_host(slots, write=False).copy_out(slots, out)

    def copy_in(self, slots: Slots, rows: RowBytes, source: Slots | None = None) -> None:
        self.on_host(slots, write=True).copy_in(slots, rows, source)

    def encode(
        self, codec: RowCodec, keys: NDArray[np.uint64], out: RowBytes, slots: Slots | None = None
    ) -> int:
        at = _first(len(keys)) if slots is None else slots
        return self.on_host(at, write=False).encode(codec, keys, out, at)

    def decode(
        self, codec: RowCodec, rows: RowBytes, slots: Slots | None = None, source: Slots | None = None
    ) -> None:
        n = len(rows if source is None else source)
        at = _first(n) if slots is None else slots
        self.on_host(at, write=True).decode(codec, rows, at, source)


def _first(n: int) -> Slots:
    return np.arange(n, dtype=np.int32)
