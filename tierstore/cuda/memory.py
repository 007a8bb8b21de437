"""Memory of a GPU: arenas of rows that grow in place, and blocks of pinned memory that are used again."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from ctypes import byref
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierstore._core import AddressSpaceError
from tierstore.config import format_bytes
from tierstore.cuda.driver import (
    OUT_OF_MEMORY,
    AccessDescription,
    AllocationProperties,
    CallError,
    MemoryLocation,
)
from tierstore.cuda.streams import NOTHING, Streams, stream_of
from tierstore.errors import GpuError

_PINNED, _DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0  # constants of cuda.h
_PORTABLE, _MAPPED = 1, 2
_SMALLEST_BLOCK = 64 << 10
_AHEAD = 8
"""Rows that need more memory get one in so many bytes more: of those that they have, or of those that are
free where these are fewer. So few of many plans wait for the driver, and most of the GPU stays free."""


class NoRoomError(GpuError):
    """The GPU has no room for a block."""


def _allocated(streams: Streams, size: int) -> int:
    """Return the address of memory on the GPU. Raises ``NoRoomError``."""
    try:
        return streams.driver.address("cuMemAlloc_v2", size)
    except CallError as refused:
        if refused.code != OUT_OF_MEMORY:
            raise
        raise NoRoomError(f"{_too_little(streams, size)}; lower hbm") from None


def _too_little(streams: Streams, size: int) -> str:
    free, total = streams.driver.memory()
    return (
        f"{format_bytes(size)} of GPU memory are needed, and {format_bytes(free)} of {format_bytes(total)} "
        "are free"
    )


@dataclass
class _Piece:
    begin: int
    size: int
    handle: int


class _Range:
    """Address space on a GPU whose first part has memory."""

    def __init__(self, streams: Streams, device: int, size: int) -> None:
        self._streams = streams
        self._location = MemoryLocation(_DEVICE, device)
        self._properties = AllocationProperties(type=_PINNED, location=self._location)
        self._pieces: list[_Piece] = []
        driver, granularity = streams.driver, ctypes.c_size_t()
        driver.call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), _MINIMUM)
        self._granularity = granularity.value
        self._size = self._rounded(size)
        self.base = driver.address("cuMemAddressReserve", self._size, 0, 0, 0)

    def _rounded(self, size: int) -> int:
        return size + -size % self._granularity

    @property
    def mapped(self) -> int:
        """The bytes from ``base`` on that have memory."""
        return self._pieces[-1].begin + self._pieces[-1].size if self._pieces else 0

    def lacks(self, end: int) -> int:
        """Return how many bytes have to be mapped for those before ``end`` to have memory."""
        return max(0, self._rounded(end) - self.mapped)

    def map(self, size: int) -> None:
        """Give ``size`` more bytes memory. Raises ``AddressSpaceError``; then nothing has changed."""
        driver, begin = self._streams.driver, self.mapped
        try:
            handle = driver.address("cuMemCreate", size, byref(self._properties), 0)
        except CallError as refused:
            if refused.code != OUT_OF_MEMORY:
                raise
            raise AddressSpaceError(_too_little(self._streams, size)) from None
        with ExitStack() as undo:
            undo.callback(driver.call, "cuMemRelease", handle)
            driver.call("cuMemMap", self.base + begin, size, 0, handle, 0)
            undo.callback(driver.call, "cuMemUnmap", self.base + begin, size)
            access = AccessDescription(self._location, _READ_WRITE)
            driver.call("cuMemSetAccess", self.base + begin, size, byref(access), 1)
            undo.pop_all()
        self._pieces.append(_Piece(begin, size, handle))

    def unmap(self, begin: int) -> None:
        """Take the memory of the pieces that begin at ``begin`` or behind it."""
        driver = self._streams.driver
        while self._pieces and self._pieces[-1].begin >= begin:
            piece = self._pieces.pop()
            driver.call("cuMemUnmap", self.base + piece.begin, piece.size)
            driver.call("cuMemRelease", piece.handle)

    def free(self) -> None:
        """Give everything back."""
        self.unmap(0)
        self._streams.driver.call("cuMemAddressFree", self.base, self._size)


class Arena:
    """Memory of rows on a GPU, of which the first ``size`` bytes can be had, and the first ``kept`` of these
    may be there before somebody needs them. Every row is cut at the bytes ``cuts``: its parts are in address
    spaces of their own, which grow and shrink together."""

    def __init__(
        self, streams: Streams, device: int, size: int, row_bytes: int, cuts: Sequence[int], kept: int
    ) -> None:
        self._streams, self._row_bytes, self._kept = streams, row_bytes, kept
        self._committed = 0
        self._unwanted: tuple[int, Sequence[int]] | None = None
        self._parts = [end - begin for begin, end in pairwise((0, *cuts, row_bytes))]
        self._ranges: list[_Range] = []
        with streams.calls(), ExitStack() as undo:
            for part in self._parts:
                made = _Range(streams, device, size // row_bytes * part)
                undo.callback(made.free)
                self._ranges.append(made)
            undo.pop_all()

    @property
    def base(self) -> int:
        """The address of the first part of the first row."""
        return self._ranges[0].base

    @property
    def tail(self) -> int:
        """The address of the last part of the first row."""
        return self._ranges[-1].base

    @property
    def mapped(self) -> int:
        """The bytes of rows that have memory, whether they were committed or not."""
        return min(
            r.mapped * self._row_bytes // part for r, part in zip(self._ranges, self._parts, strict=True)
        )

    def commit(self, size: int) -> None:
        """Give the rows in the first ``size`` bytes memory, except what was discarded.

        Raises ``AddressSpaceError`` and changes nothing if the GPU has not so much.
        """
        with self._streams.lock:
            if size > self._committed:
                self.ensure(size)
                self._committed = size
            self._discard_unwanted()

    def ensure(self, end: int) -> None:
        """Give the rows before byte ``end`` memory, those that were discarded included. Raises as
        :meth:`commit`."""
        with self._streams.lock:
            lacks = self._lacks(end)
            if any(lacks):
                self._grow(lacks)
            if self._unwanted is not None and end > self._unwanted[0]:
                self._unwanted = None

    def _parts_before(self, end: int) -> Iterator[tuple[_Range, int]]:
        """Yield each range and how many of its bytes are of rows before byte ``end``."""
        for found, part in zip(self._ranges, self._parts, strict=True):
            yield found, end // self._row_bytes * part

    def _lacks(self, end: int) -> list[int]:
        """Return how many bytes each range lacks for the rows before byte ``end``."""
        return [found.lacks(part) for found, part in self._parts_before(end)]

    def _grow(self, lacks: Sequence[int]) -> None:
        """Give every range the memory that it lacks, and more if the GPU has so much."""
        with self._streams.calls():
            free = self._streams.driver.memory()[0]
            if sum(lacks) > free:
                raise AddressSpaceError(_too_little(self._streams, sum(lacks)))
            ahead = self._lacks(min(self.mapped + min(self.mapped, free) // _AHEAD, self._kept))
            sizes = [max(pair) for pair in zip(lacks, ahead, strict=True)]
            if sum(lacks) < sum(sizes) <= free:
                with suppress(AddressSpaceError):
                    self._map(sizes)
                    return
            self._map(lacks)

    def _map(self, sizes: Sequence[int]) -> None:
        with ExitStack() as undo:
            for one, size in zip(self._ranges, sizes, strict=True):
                if size:
                    begin = one.mapped
                    one.map(size)
                    undo.callback(one.unmap, begin)
            undo.pop_all()

    def discard(self, begin: int, marks: Sequence[int]) -> None:
        """Give memory of the rows from byte ``begin`` on back, which the operations ``marks`` touch last: now
        if they are done, else at a later call."""
        with self._streams.lock:
            self._unwanted = begin, marks
            self._discard_unwanted()

    def _discard_unwanted(self) -> None:
        if self._unwanted is not None and all(map(self._streams.is_done, self._unwanted[1])):
            with self._streams.calls():
                for found, begin in self._parts_before(self._unwanted[0]):
                    found.unmap(begin)
            self._unwanted = None

    def close(self, marks: Callable[[], Sequence[int]]) -> None:
        """Wait for the last operations, ``marks()``, and give everything back; after a failure nothing can
        be."""
        if not self._streams.is_usable:
            return
        with suppress(GpuError):
            for mark in marks():
                self._streams.synchronize(mark)
            with self._streams.lock, self._streams.calls():
                for found in self._ranges:
                    found.free()


class Block:
    """Pinned memory, which the GPU reads and writes at the same address, and ``device``: as much memory on
    the GPU, 0 if there is none. ``mark``: the last operation that touches the block. A block of no bytes has
    neither."""

    def __init__(self, streams: Streams, size: int, with_device: bool) -> None:
        self.size, self.address, self.device, self.mark = size, 0, 0, NOTHING
        if not size:
            return
        driver = streams.driver
        with streams.calls():
            self.address = driver.handle("cuMemHostAlloc", size, _PORTABLE | _MAPPED)
            if with_device:
                try:
                    self.device = _allocated(streams, size)
                except GpuError:
                    driver.call("cuMemFreeHost", self.address)
                    raise

    def view(self, begin: int, size: int, *, write: bool) -> NDArray[np.uint8]:
        """Return pinned bytes for the host to read, or with ``write`` to write, now."""
        assert 0 <= begin <= begin + size <= self.size
        memory = (ctypes.c_uint8 * size).from_address(self.address + begin)
        return np.frombuffer(memoryview(memory).cast("B"), np.uint8) if size else np.empty(0, np.uint8)

    def free(self, streams: Streams) -> None:
        """Give the memory back, which no operation may use any more."""
        streams.driver.call("cuMemFreeHost", self.address)
        if self.device:
            streams.driver.call("cuMemFree_v2", self.device)


class Scratch:
    """Memory of a GPU that operations of one stream use in turn. What was there is kept when it grows, since
    the driver waits for the whole device before it frees memory."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._addresses: list[int] = []
        self._size = 0

    def of(self, size: int) -> int:
        """Return the address of ``size`` bytes. Raises ``NoRoomError``."""
        if size > self._size:
            size = 1 << (size - 1).bit_length()
            with self._streams.calls():
                self._addresses.append(_allocated(self._streams, size))
            self._size = size
        return self._addresses[-1]

    def close(self) -> None:
        """Give the memory back, which no operation may use any more."""
        with self._streams.calls():
            while self._addresses:
                self._streams.driver.call("cuMemFree_v2", self._addresses.pop())
        self._size = 0


class Blocks:
    """Blocks that are used again when the operations that touch them are done.

    ``max_blocks``: so many are made, and then a caller waits for one; None: no caller ever waits.
    """

    def __init__(self, streams: Streams, *, with_device: bool, max_blocks: int | None = None) -> None:
        self._streams, self._with_device, self._max_blocks = streams, with_device, max_blocks
        self._lock = threading.RLock()  # the garbage collector may end rows, and their blocks, in any call
        self._all: list[Block] = []
        self._free: dict[int, list[Block]] = {}
        """By size, those that were given back first come first."""
        self._given: deque[Block] = deque()

    def take(self, size: int) -> Block:
        """Return a block of ``size`` bytes or more that no operation uses."""
        if not size:
            return Block(self._streams, 0, self._with_device)
        size = max(_SMALLEST_BLOCK, 1 << (size - 1).bit_length())
        with self._lock:
            while self._given:
                given = self._given.popleft()
                self._free.setdefault(given.size, []).append(given)
            free = self._free.get(size, [])
            may_wait = self._max_blocks is not None and len(self._all) >= self._max_blocks
            block = free[0] if free and may_wait else self._done(free)
            if block is not None:
                free.remove(block)
        if block is None:
            block = Block(self._streams, size, self._with_device)
            with self._lock:
                self._all.append(block)
        if self._max_blocks is not None:
            self._streams.synchronize(block.mark)
        return block

    def _done(self, free: Sequence[Block]) -> Block | None:
        """Return a block whose last operation is done, if any is: one that is known to be, for to ask the
        driver takes longer; or else the first of a stream, whose operations end in their order."""
        self._streams.check()
        known = next((block for block in free if not self._streams.unknown([block.mark])), None)
        if known is not None:
            return known
        late_first = sorted(free, key=lambda block: block.mark, reverse=True)
        of_streams = {stream_of(block.mark): block for block in late_first}
        return next((block for block in of_streams.values() if self._streams.is_done(block.mark)), None)

    def give(self, block: Block) -> None:
        """Let others take the block once its last operation is done. The call takes no lock."""
        if block.size:
            self._given.append(block)

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory in all blocks."""
        return sum(block.size for block in self._all)

    def close(self) -> None:
        """Give all memory back; no operation may use any any more."""
        self._free.clear()
        self._given.clear()
        with self._streams.calls():
            while self._all:  # where a call fails, another close() must not free the same again
                self._all.pop().free(self._streams)
