"""Lookups that a GPU deduplicates: it removes repeated ids, and finds the positions of every row.

The host gets what it plans with: the unique keys, and where the positions of each begin. The inverse and the
positions stay in memory of the GPU, where kernels read them, until the host asks for them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cuda.kernels import Kernels
from tierstore.cuda.memory import Blocks, NoRoomError, Scratch
from tierstore.cuda.rows import ANY_LAYOUT, Parts
from tierstore.cuda.sorting import Room, Step
from tierstore.cuda.staged import MadeArrays
from tierstore.cuda.streams import Operation, Stream, Streams

MAKES_FROM = 1 << 16
"""A lookup of so many ids is made on the GPU: from there on the host's threads share one, too."""
MOST_BYTES = 256 << 20
"""Bytes of the GPU that the lookups made on it take together; the arrays of further ones leave it."""
_MOST_KEYS = (1 << 32) - 1
_MOST_IDS = (1 << 31) - 1
Made = tuple[_core.Batch, int, int, int]
"""What ``_core.make_batch`` returns."""


class GpuBatch(_core.Batch):
    """A lookup of which the GPU has ``made`` the inverse and the positions, the arrays of both; None: they
    have left the GPU, and the arrays are the host's."""

    def __init__(
        self,
        unique: NDArray[np.uint64],
        inverse: NDArray[np.int32],
        csr_positions: NDArray[np.int32],
        csr_start: NDArray[np.int32],
        made: MadeArrays | None,
    ) -> None:
        super().__init__(unique)
        self._inverse, self._csr, self._made = inverse, (csr_start, csr_positions), made

    @property
    def inverse(self) -> NDArray[np.int32]:
        self.bring()
        return self._inverse

    @property
    def device_inverse(self) -> NDArray[np.int32]:
        return self._inverse

    def transposed(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return self._csr

    def bring(self) -> None:
        """Let the host have the inverse and the positions: wait for the GPU, unless they are here."""
        if self._made is not None:
            self._made.bring()


class _Keys:
    """The numbers that the GPU sorts instead of ids: those of a table follow those of the table before."""

    def __init__(self, segments: Sequence[_core.IdSegment]) -> None:
        self._segments = segments
        self.n = sum(count for _, count, *_ in segments)
        bounds = {table: bound for *_, table, bound, _ in segments}
        ends = np.cumsum([0, *bounds.values()]).tolist()
        self._bases = dict(zip(bounds, ends, strict=False))
        self.skipped: int = ends[-1]

    @property
    def can_be_sorted(self) -> bool:
        """Whether the numbers have 32 bits, and the block of a lookup has room for what the GPU needs."""
        return self.skipped <= _MOST_KEYS and len(self._bases) <= self.n <= _MOST_IDS

    def room(self, base: int) -> Room:
        return Room(base, self.n, self.skipped, len(self._bases))

    def write(self, room: NDArray[np.uint8]) -> tuple[int, int, int]:
        """Write what the GPU needs. Return the first bad id as ``make_batch`` does."""
        of_tables = [array for array, _ in self.room(0).arrays[1:3]]
        for begin, numbers in zip(of_tables, (self._bases.values(), self._bases), strict=True):
            room[begin:].view(np.uint32)[: len(self._bases)] = list(numbers)
        bases = [self._bases[table] for *_, table, _, _ in self._segments]
        return _core.sort_keys(list(self._segments), bases, self.skipped, room[: 4 * self.n].view(np.uint32))


class LookupMaker:
    """Makes lookups on a GPU, one at a time."""

    def __init__(self, parts: Parts) -> None:
        self._streams: Streams = parts.streams
        self._kernels: Kernels = parts.kernels
        self._blocks: Blocks = parts.indices
        self._staged = parts.staged
        self._scratch = Scratch(parts.streams)
        self._lock = threading.Lock()
        self._on_gpu: weakref.WeakSet[MadeArrays] = weakref.WeakSet()

    def make(self, segments: Sequence[_core.IdSegment]) -> Made:
        """Deduplicate the ids of a lookup as ``_core.make_batch`` does: on the GPU where that pays and where
        the GPU has room for it."""
        made = None
        if sum(count for _, count, *_ in segments) >= MAKES_FROM:
            keys = _Keys(segments)
            made = self._made(keys) if keys.can_be_sorted else None
        return _core.make_batch(list(segments)) if made is None else made

    def _made(self, keys: _Keys) -> Made | None:
        try:
            arrays = MadeArrays(self._streams, self._blocks, keys.n)
            bad = keys.write(arrays.on_its_way(keys.room(0).copied, write=True))
            if bad[0] >= 0:
                return _core.Batch(np.empty(0, np.uint64)), *bad
            with self._lock:
                batch = self._sorted(keys, arrays)
        except NoRoomError:
            return None
        return None if batch is None else (batch, *bad)

    def _sorted(self, keys: _Keys, arrays: MadeArrays) -> GpuBatch | None:
        """Return the lookup; None where no position uses a row."""
        room = keys.room(self._scratch.of(keys.room(0).size))
        steps = list(room.steps(*arrays.addresses))
        for name, *_ in steps:
            self._kernels.load(ANY_LAYOUT, name)
        with self._operation(arrays) as sorting:
            sorting.copy(room.base, arrays.block.address, room.copied)
            self._launch(sorting, steps[:-2])
            sorting.copy(arrays.block.address, room.totals, 8)
        with self._operation(arrays) as last:  # of what the host waits for
            self._launch(last, steps[-2:-1])
        self._streams.synchronize(sorting.mark)
        num_unique, used = arrays.on_its_way(8).view(np.int32).tolist()
        if num_unique:
            with self._operation(arrays) as last:
                last.copy(arrays.block.address, room.unique, 8 * num_unique)
                arrays.copy_starts(last, num_unique + 1)
        with self._operation(arrays) as rest:
            self._launch(rest, steps[-1:])
        if not num_unique:
            return None
        self._streams.synchronize(last.mark)
        return self._batch(arrays, num_unique, used)

    @contextmanager
    def _operation(self, arrays: MadeArrays) -> Iterator[Operation]:
        with self._streams.operation(Stream.SORT) as sort:
            arrays.block.mark = sort.mark
            yield sort

    def _launch(self, operation: Operation, steps: Sequence[Step]) -> None:
        for name, args, threads in steps:
            self._kernels.launch(operation, ANY_LAYOUT, name, args, threads)

    def _batch(self, arrays: MadeArrays, num_unique: int, used: int) -> GpuBatch:
        unique = arrays.on_its_way(8 * num_unique).view(np.uint64)
        found = arrays.of_host(num_unique, used)
        taken = sum(one.block.size for one in self._on_gpu)
        if taken + arrays.block.size <= MOST_BYTES:
            self._on_gpu.add(arrays)
            self._staged.add_made(arrays, found)
            return GpuBatch(unique, *found, arrays)
        batch = _core.Batch(unique)  # before other arrays come there
        arrays.bring()
        inverse, positions, csr_start = found
        return GpuBatch(batch.unique, _copied(inverse), _copied(positions), csr_start, None)

    def close(self) -> None:
        """Give the memory back."""
        self._scratch.close()


def _copied(array: NDArray[np.int32]) -> NDArray[np.int32]:
    copy = np.empty_like(array)
    _core.copy_bytes(array, copy.view(np.uint8))
    return copy
