"""Index arrays of operations on a GPU, and those of planned lookups, which are there before the lookup runs.

The thread that plans a lookup stages them, so that the training thread of a prefetch copies nothing.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cuda.memory import Block, Blocks
from tierstore.cuda.streams import Operation, Stream, Streams

AnyArray = NDArray[np.generic]
HostArrays = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""The inverse, the positions of every row, and where those of each row begin."""
REDUCE_POSITIONS = 256
"""Gradients of a row that one group of threads adds (csrc/cuda/update.cuh)."""
LONG_POSITIONS = 32
"""Rows with more are updated first."""
_ALIGNMENT = 256


class HotRows:
    """Rows with many positions, whose gradients are added in pieces (csrc/cuda/update.cuh).

    ``rows``: these ``count`` rows, the number of all rows, and then ``num_long`` rows that have fewer
    positions than these, and that are updated before the rest.
    """

    def __init__(self, csr_start: NDArray[np.int32]) -> None:
        hot, long, self.first_piece = _core.long_rows(csr_start, LONG_POSITIONS, REDUCE_POSITIONS)
        self.rows = np.concatenate([hot, np.array([len(csr_start) - 1], np.int32), long])
        self.count, self.num_long, self.pieces = len(hot), len(long), int(self.first_piece[-1])


class Constant:
    """Numbers that never change and that many lookups share: the offsets of bags with one id each."""

    def __init__(self, blocks: Blocks, array: AnyArray) -> None:
        self._array, self._address = array, array.ctypes.data
        self.block = blocks.take(array.nbytes)
        fill(self.block, [array], [0, array.nbytes])

    @property
    def size(self) -> int:
        """Bytes that have to be copied to the GPU."""
        return self._array.nbytes

    def has(self, array: AnyArray) -> bool:
        """Return whether an array is the first of these numbers."""
        return array.ctypes.data == self._address and array.nbytes <= self._array.nbytes

    def address_of(self, array: AnyArray) -> int | None:
        """Return where the GPU has an array; None if these are other numbers."""
        return self.block.device if self.has(array) else None


class MadeArrays:
    """The index arrays of a lookup of ``n`` ids that the GPU makes, in a block: the inverse, the positions,
    and where those of each row begin. The first two come to the host when it asks; while the lookup is made,
    what the host gives and gets is in their place, on its way.
    """

    def __init__(self, streams: Streams, blocks: Blocks, n: int) -> None:
        self._streams, self._n = streams, n
        self._begins = places([], [4 * n, 4 * n, 4 * (n + 1)])
        self.block = blocks.take(self._begins[-1])
        self._end = weakref.finalize(self, blocks.give, self.block)
        self._end.atexit = False
        self._lock = threading.Lock()
        self._is_here = False
        self._known: dict[tuple[int, int], int] = {}

    @property
    def addresses(self) -> list[int]:
        """Where the GPU has each array."""
        return [self.block.device + begin for begin in self._begins[:3]]

    def on_its_way(self, size: int, *, write: bool = False) -> NDArray[np.uint8]:
        """Return bytes that come and go, from the block's address on, for the host to read or write."""
        return self.block.view(0, size, write=write)

    def copy_starts(self, operation: Operation, count: int) -> None:
        """Let the operation bring the host where the positions of rows begin."""
        at = self._begins[2]
        operation.copy(self.block.address + at, self.block.device + at, 4 * count)

    def of_host(self, num_unique: int, used: int) -> HostArrays:
        """Return the inverse and the ``used`` positions, which the host may read after :meth:`bring`, and
        where those of each row begin."""
        starts = self.block.view(self._begins[2], 4 * (num_unique + 1), write=False).view(np.int32).copy()
        found = self._array(0, self._n), self._array(1, used), starts
        self._known = dict(zip(map(_identity, found), self.addresses, strict=True))
        return found

    def address_of(self, array: AnyArray) -> int | None:
        """Return where the GPU has an array of :meth:`of_host`; None for another one."""
        return self._known.get(_identity(array))

    def _array(self, number: int, count: int) -> NDArray[np.int32]:
        memory = (ctypes.c_int32 * count).from_address(self.block.address + self._begins[number])
        memory.block_of = self  # type: ignore[attr-defined]  # whose block is not used again before
        return np.frombuffer(memoryview(memory).cast("B"), np.int32)

    def bring(self) -> None:
        """Let the host have the inverse and the positions: wait for the GPU, unless they are here."""
        with self._lock:
            if self._is_here:
                return
            size = self._begins[2]
            try:
                with self._streams.operation(Stream.SORT) as sort:
                    sort.copy(self.block.address, self.block.device, size)
                self._streams.synchronize(sort.mark)
            except BaseException:
                self._end.detach()  # the copy may be under way, and the block's mark says nothing of it
                raise
            self.on_its_way(size)
            self._is_here = True


class Staged:
    """Arrays in one block, one after the other: ``slots``, ``inverse``, the positions ``csr`` of every row,
    its :class:`HotRows`, and ``more``, but for those that ``known`` has on the GPU. The arrays must not
    change while this lives.

    The block is given back when nobody has the object any more.
    """

    def __init__(
        self,
        blocks: Blocks,
        slots: NDArray[np.int32],
        inverse: NDArray[np.int32],
        csr: tuple[NDArray[np.int32], NDArray[np.int32]],
        more: Sequence[AnyArray],
        known: Sequence[Constant | MadeArrays],
    ) -> None:
        self.slots, self.inverse, self.csr = slots, inverse, csr
        self.hot = HotRows(csr[0])
        self._kept = more, known
        arrays: list[AnyArray] = [slots, inverse, *csr, self.hot.rows, self.hot.first_piece, *more]
        self._addresses = {
            _identity(array): address
            for array in arrays
            for one in known
            if (address := one.address_of(array)) is not None
        }
        own = [array for array in arrays if _identity(array) not in self._addresses]
        begins = places(own)
        self.size = begins[-1]
        """Bytes that have to be copied to the GPU."""
        self.block = blocks.take(max(1, self.size))
        weakref.finalize(self, blocks.give, self.block).atexit = False
        self._blocks = [self.block, *(one.block for one in known if isinstance(one, MadeArrays))]
        fill(self.block, own, begins)
        self._addresses |= {
            _identity(array): self.block.device + begin
            for array, begin in zip(own, begins, strict=False)
            if array.nbytes
        }

    def address_of(self, array: AnyArray) -> int | None:
        """Return where the GPU finds an array; None for one that was not staged."""
        return self._addresses.get(_identity(array))

    def has(self, *arrays: AnyArray) -> bool:
        """Return whether all of these arrays were staged."""
        return all(self.address_of(array) is not None for array in arrays)

    def use(self, operation: Operation) -> None:
        """Let the operation, which reads the arrays, follow the last one on them."""
        for block in self._blocks:
            operation.before.append((block.mark,))
            block.mark = operation.mark


class Indices:
    """Arrays in a block, one after the other, for the kernels of one operation.

    ``addresses``: where the GPU finds each array, None for one that is None. Arrays that are ``staged`` stay
    where they are. Behind the others is room of ``scratch`` bytes each, not initialised, whose addresses
    follow.
    """

    def __init__(
        self,
        blocks: Blocks,
        arrays: Sequence[AnyArray | None],
        scratch: Sequence[int] = (),
        staged: Staged | None = None,
    ) -> None:
        there = [None if a is None or staged is None else staged.address_of(a) for a in arrays]
        own = [None if at is not None else array for at, array in zip(there, arrays, strict=True)]
        begins = places(own, scratch)
        self._blocks, self._staged = blocks, staged
        self.begins = begins
        self.size: int = begins[len(arrays)]
        """Bytes that have to be copied to the GPU."""
        self.block = blocks.take(begins[-1])  # of no bytes where all that a lookup needs is staged
        fill(self.block, own, begins)
        here = self.block.device
        self.addresses = [
            at if at is not None else None if array is None else here + begin
            for at, array, begin in zip(there, own, begins, strict=False)
        ] + [here + begin for begin in begins[len(arrays) : -1]]

    def use(self, operation: Operation) -> None:
        """Let the operation, which uses the arrays, follow the last one on them."""
        operation.before.append((self.block.mark,))
        self.block.mark = operation.mark
        if self._staged is not None:
            self._staged.use(operation)

    def __enter__(self) -> Indices:
        return self

    def __exit__(self, *error: object) -> None:
        """Let others use the block once the operation is done."""
        self._blocks.give(self.block)


class StagedLookups:
    """What is staged now, by the slots of its rows, and the constants that are on the GPU."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.constants: list[Constant] = []
        self._found: weakref.WeakValueDictionary[tuple[int, int], Staged] = weakref.WeakValueDictionary()
        self._made: weakref.WeakValueDictionary[tuple[int, int], MadeArrays] = weakref.WeakValueDictionary()

    def add(self, staged: Staged) -> None:
        """Let :meth:`of` find it as long as somebody has it."""
        with self._lock:
            self._found[_identity(staged.slots)] = staged

    def add_made(self, made: MadeArrays, arrays: HostArrays) -> None:
        """Let :meth:`made_of` find what the GPU has made, by the inverse among the host's ``arrays``."""
        with self._lock:
            self._made[_identity(arrays[0])] = made

    def made_of(self, inverse: NDArray[np.int32]) -> list[MadeArrays]:
        """Return what has made this inverse on the GPU, if anything has."""
        found = self._made.get(_identity(inverse))
        return [] if found is None else [found]

    def of(self, slots: NDArray[np.int32]) -> Staged | None:
        """Return what was staged with these slots; None if nothing was."""
        return self._found.get(_identity(slots)) if len(slots) else None


def places(arrays: Sequence[AnyArray | None], scratch: Sequence[int] = ()) -> list[int]:
    """Return where each array begins in a block, then where room of ``scratch`` bytes each begins, and where
    all of that ends."""
    sizes = [0 if array is None else array.nbytes for array in arrays]
    return np.cumsum([0, *(size + -size % _ALIGNMENT for size in (*sizes, *scratch))]).tolist()


def fill(block: Block, arrays: Sequence[AnyArray | None], begins: Sequence[int]) -> None:
    """Copy arrays to their places in a block, by the threads of the kernels."""
    room = block.view(0, begins[len(arrays)], write=True)
    for array, begin in zip(arrays, begins, strict=False):
        if array is not None and array.nbytes:
            _core.copy_bytes(np.ascontiguousarray(array), room[begin : begin + array.nbytes])


def _identity(array: AnyArray) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes
