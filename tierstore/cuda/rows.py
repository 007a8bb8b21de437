"""Rows in the memory of a GPU: how they come in, move and leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tierstore._core import HostRows, InitialValues, RowCodec, SlotMarks
from tierstore.cuda.args import WEIGHTS, InitRowsArgs, MoveRowsArgs
from tierstore.cuda.cubins import Part
from tierstore.cuda.kernels import Kernels
from tierstore.cuda.memory import Block, Blocks
from tierstore.cuda.places import Memory, Places, Tail
from tierstore.cuda.staged import Indices, Staged, StagedLookups
from tierstore.cuda.streams import NOTHING, Operation, Stream, Streams
from tierstore.row_format import WIDE, RowFormat

Slots = NDArray[np.int32]
RowBytes = NDArray[np.uint8]
ANY_LAYOUT = Part()
STAGING_BYTES = 4 << 20
"""Bytes of rows on their way in one direction; two such blocks take turns."""


@dataclass(frozen=True)
class Parts:
    """The parts of a device that its rows use."""

    streams: Streams
    kernels: Kernels
    indices: Blocks
    """Index arrays of operations; nobody waits for them."""
    arriving: Blocks
    """Rows on their way up."""
    leaving: Blocks
    """Rows on their way down."""
    staged: StagedLookups = field(default_factory=StagedLookups)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class Touched:
    """The last operation that touched each slot of some rows, at most ``slots`` of them."""

    def __init__(self, streams: Streams, slots: int) -> None:
        self._streams = streams
        self._marks = SlotMarks(slots)

    def grow(self, slots: int) -> None:
        """Have at least so many slots."""
        self._marks.grow(slots)

    def touch(self, slots: Slots, mark: int) -> list[int]:
        """Let ``mark`` be the last operation on ``slots``, and return the ones that were, of each stream, as
        far as they are not known to be done. Raises ValueError for a slot that has no memory."""
        with self._streams.lock:
            return self._streams.unknown(self._marks.touch(slots, mark))

    def hand_over(self, slots: Slots, operation: Operation) -> None:
        """Let ``operation`` be the last one on ``slots``, and know the ones that were. Raises as
        :meth:`touch`."""
        operation.before.extend(map(self._marks.touch, (slots,), (operation.mark,)))  # in one native step

    def last(self, slots: Slots) -> list[int]:
        """Return the last operations on ``slots``, as :meth:`touch` does."""
        return self.touch(slots, NOTHING)

    def newest(self, first: int = 0) -> list[int]:
        """Return the last operations on slots from ``first`` on."""
        with self._streams.lock:
            return self._streams.unknown(self._marks.newest(first))


class Departure:
    """Rows that are being copied out. :meth:`arrive` waits for them; what follows on the GPU need not."""

    def __init__(self, parts: Parts, block: Block, shape: tuple[int, int]) -> None:
        self._parts, self._block, self._shape = parts, block, shape

    def arrive(self) -> RowBytes:
        """Wait for the rows and return them, in memory that :meth:`end` gives back."""
        self._parts.streams.synchronize(self._block.mark)
        n, row_bytes = self._shape
        return self._block.view(0, n * row_bytes, write=False).reshape(n, row_bytes)

    def end(self) -> None:
        """Give the memory of the copies back."""
        self._parts.leaving.give(self._block)


class GpuRows:
    """``DeviceRows`` of tierstore/cache/device.py without the kernels that compute.

    Rows are written by operations in UP, read for the host by operations in DOWN, and used by operations in
    COMPUTE. An operation waits for the last one that touched one of its rows, in whichever stream that is.
    """

    arrival = Stream.UP
    """The stream in which rows of other arrays come here."""

    def __init__(
        self,
        parts: Parts,
        memory: Memory,
        slots: int,
        row_bytes: int,
        weights: str = WIDE.weights,
        tail: Tail | None = None,
    ) -> None:
        self.row_bytes = row_bytes
        self.weights = weights
        self.parts, self._memory, self._slots = parts, memory, slots
        self._format = RowFormat(weights)
        self._places = Places(memory.base, row_bytes, tail)
        self._has_discarded = False
        self.touched = Touched(parts.streams, slots)

    def rows_args(self, dim: int) -> Structure:
        """Return the kernels' argument for the rows, of ``dim`` columns."""
        return self._places.of_kernels(self._format.weights_end(dim))

    # -- memory -----------------------------------------------------------------------------------

    def commit(self, slots: int) -> None:
        """Take the memory of the first ``slots`` slots."""
        _require(slots <= self._slots, "there are not so many slots")
        with self.parts.streams.lock:
            self._memory.commit(slots * self.row_bytes)
            self.touched.grow(slots)

    def discard(self, first: int) -> None:
        """Give back memory of the slots from ``first`` on."""
        with self.parts.streams.lock:
            self._has_discarded = True
            self._memory.discard(first * self.row_bytes, self.touched.newest(first))

    @contextmanager
    def operation(self, stream: Stream, slots: Sequence[Slots], indices: Indices) -> Iterator[Operation]:
        """Give ``stream`` an operation on the rows at ``slots``, which uses ``indices``."""
        with self.parts.streams.operation(stream) as operation:
            for some in slots:
                self.use(operation, some, indices)
            yield operation

    def use(self, operation: Operation, slots: Slots, indices: Indices) -> None:
        """Let the operation, which works on the rows at ``slots`` and uses ``indices``, follow the last ones
        on both."""
        indices.use(operation)
        self._touch(operation, slots)

    def upload(self, indices: Indices) -> None:
        """Copy ``indices`` to the GPU beside what computes there."""
        if not indices.size:
            return
        with self.parts.streams.operation(Stream.INDEX) as upload:
            indices.block.mark = upload.mark
            upload.copy(indices.block.device, indices.block.address, indices.size)

    def _touch(self, operation: Operation, slots: Slots) -> None:
        """Let the operation follow the last ones on ``slots``."""
        self.touched.hand_over(slots, operation)
        self._ensure(slots)
        operation.wait()

    def _ensure(self, slots: Slots) -> None:
        if self._has_discarded and len(slots):
            self._memory.ensure((int(slots.max()) + 1) * self.row_bytes)

    def indices(
        self,
        *arrays: NDArray[np.generic] | None,
        scratch: Sequence[int] = (),
        staged: Staged | None = None,
    ) -> Indices:
        """Return the arrays for one operation: in pinned memory, unless they are ``staged``."""
        return Indices(self.parts.indices, arrays, scratch, staged)

    @contextmanager
    def _moving(
        self, stream: Stream, slots: Sequence[Slots], *more: NDArray[np.generic] | None
    ) -> Iterator[tuple[Operation, Indices]]:
        """Give ``stream`` an operation that begins by copying ``slots`` and ``more`` to the GPU."""
        with self.indices(*slots, *more) as indices, self.operation(stream, slots, indices) as operation:
            operation.copy(indices.block.device, indices.block.address, indices.size)
            yield operation, indices

    # -- moves ------------------------------------------------------------------------------------

    def move(self, source: Slots, target: Slots) -> None:
        """Copy the row at ``source[i]`` to ``target[i]``; no slot is in both."""
        _require(len(source) == len(target), "source and target differ in length")
        if not len(source):
            return
        self.parts.kernels.load(ANY_LAYOUT, "move_rows")
        with self._moving(Stream.UP, [source, target]) as (up, indices):
            from_rows, to_rows = indices.addresses
            self._launch_move(up, (self._places, from_rows), (self._places, to_rows), len(source))

    def copy_rows(self, slots: Slots, rows: GpuRows, source: Slots) -> None:
        """Copy the row at ``source[i]`` of other rows of the device to ``slots[i]``."""
        _require(len(source) == len(slots), "source and slots differ in length")
        _require(rows.row_bytes == self.row_bytes, "the other rows are not as long")
        tails = [places.tail.head_bytes for places in (self._places, rows._places) if places.tail is not None]
        _require(len(set(tails)) < 2, "the other rows do not have as many weights")
        if not len(slots):
            return
        self.parts.kernels.load(ANY_LAYOUT, "move_rows")
        with (
            self.indices(slots, source) as indices,
            self.operation(self.arrival, [slots], indices) as arrival,
        ):
            rows._touch(arrival, source)
            arrival.copy(indices.block.device, indices.block.address, indices.size)
            to_rows, from_rows = indices.addresses
            self._launch_move(arrival, (rows._places, from_rows), (self._places, to_rows), len(slots))

    def _launch_move(
        self,
        operation: Operation,
        source: tuple[Places, int | None],
        target: tuple[Places, int | None],
        n: int,
    ) -> None:
        words, tail = self.row_bytes // 16, source[0].tail or target[0].tail
        head_bytes = self.row_bytes if tail is None else tail.head_bytes
        rows = (places.of_moves(head_bytes, slots) for places, slots in (source, target))
        args = MoveRowsArgs(*rows, n, words, head_bytes // 16)
        self.parts.kernels.launch(operation, ANY_LAYOUT, "move_rows", args, n * words)

    def initialise(self, values: InitialValues, slots: Slots | None, keys: NDArray[np.uint64]) -> None:
        """Write the initial rows of ``keys`` to ``slots``; None: to the first slots."""
        if slots is None:
            slots = np.arange(len(keys), dtype=np.int32)
        _require(len(slots) == len(keys), "slots and keys differ in length")
        self._require_room(values.dim, values.state_floats)
        if not len(keys):
            return
        _require(int(keys.max() >> np.uint64(48)) < len(values.kinds), "a key's table has no entry in kinds")
        self.parts.kernels.load(ANY_LAYOUT, "init_rows")
        tables = values.kinds, values.first, values.second, values.seeds, values.columns
        with self._moving(Stream.UP, [slots], keys, *tables) as (up, indices):
            at, keys_at, *tables_at = indices.addresses
            behind = (self.row_bytes - self._format.weights_end(values.dim)) // 4
            args = InitRowsArgs(
                *(self.rows_args(values.dim), at, keys_at, len(keys), values.dim, values.state_floats),
                *(behind, values.state_value, WEIGHTS[self.weights], *tables_at),
            )
            words = (values.dim + 6) // 4 + (behind + 3) // 4
            self.parts.kernels.launch(up, ANY_LAYOUT, "init_rows", args, len(keys) * words)

    def _require_room(self, dim: int, state_floats: int = 0) -> None:
        _require(
            self._format.row_bytes(dim, state_floats) <= self.row_bytes,
            "row_bytes is smaller than the weights and optimizer state of a row",
        )
        tail = self._places.tail
        is_cut = tail is None or tail.head_bytes == self._format.weights_end(dim)
        _require(is_cut, "the rows have another number of columns")

    def _require_wide(self) -> None:
        _require(self.weights == WIDE.weights, "only rows with float32 weights have other forms")

    # -- rows of the host ---------------------------------------------------------------------------

    def _steps(self, n: int) -> Iterator[slice]:
        step = max(1, STAGING_BYTES // self.row_bytes)
        return (slice(begin, min(begin + step, n)) for begin in range(0, n, step))

    def copy_in(self, slots: Slots, rows: RowBytes, source: Slots | None = None) -> None:
        """Copy ``rows[i]``, or ``rows[source[i]]``, to ``slots[i]``."""
        _require(source is None or len(source) == len(slots), "source and slots differ in length")
        self._require_shape(rows, 0 if source is not None else len(slots))
        for part in self._steps(len(slots)):
            some, of = (rows[part], None) if source is None else (rows, source[part])
            at = _first(part.stop - part.start)
            self._send(slots[part], partial(_copy_in, at, some, of))

    def _require_shape(self, rows: RowBytes, n: int) -> None:
        _require(
            rows.ndim == 2 and rows.shape[1] == self.row_bytes and len(rows) >= n,
            "the other rows must have the shape (n, row_bytes)",
        )

    def _send(self, slots: Slots, fill: Callable[[HostRows], None]) -> None:
        """Write what ``fill`` writes to rows of the host, no more than fit a block, to ``slots``."""
        self.parts.kernels.load(ANY_LAYOUT, "move_rows")
        n, block = len(slots), self.parts.arriving.take(max(STAGING_BYTES, self.row_bytes))
        try:
            fill(HostRows.view(block.view(0, n * self.row_bytes, write=True).reshape(n, self.row_bytes)))
            with self._moving(Stream.UP, [slots]) as (up, indices):
                block.mark = up.mark
                # The kernel reads each word of pinned memory once, so a copy to the GPU would gain nothing.
                target = self._places, indices.addresses[0]
                self._launch_move(up, (Places(block.address, self.row_bytes), None), target, n)
        finally:
            self.parts.arriving.give(block)

    def start_copy_out(self, slots: Slots) -> Departure:
        """Begin to copy the rows at ``slots``, no more than fit a block; the slots may be written again."""
        self.parts.kernels.load(ANY_LAYOUT, "move_rows")
        block = self.parts.leaving.take(max(STAGING_BYTES, self.row_bytes))
        departure = Departure(self.parts, block, (len(slots), self.row_bytes))
        try:
            with self._moving(Stream.DOWN, [slots]) as (down, indices):
                block.mark = down.mark
                source = self._places, indices.addresses[0]
                self._launch_move(down, source, (Places(block.address, self.row_bytes), None), len(slots))
        except BaseException:
            departure.end()
            raise
        return departure

    def _departures(self, slots: Slots) -> Iterator[tuple[slice, RowBytes]]:
        """Yield the rows at ``slots`` in parts: while the host has one, the next is on its way."""
        waiting: list[tuple[slice, Departure]] = []
        try:
            for part in self._steps(len(slots)):
                waiting.append((part, self.start_copy_out(slots[part])))
                if len(waiting) == 2:
                    yield waiting[0][0], waiting[0][1].arrive()
                    waiting.pop(0)[1].end()
            for part, departure in waiting:
                yield part, departure.arrive()
        finally:
            for _, departure in waiting:
                departure.end()

    def copy_out(self, slots: Slots, out: RowBytes) -> None:
        """Copy the row at ``slots[i]`` to ``out[i]``; wait for it."""
        self._require_shape(out, len(slots))
        for part, rows in self._departures(slots):
            out[part] = rows

    def encode(
        self, codec: RowCodec, keys: NDArray[np.uint64], out: RowBytes, slots: Slots | None = None
    ) -> int:
        """Write the rows of ``keys`` to ``out``, encoded by the host."""
        self._require_wide()
        lost = -1
        at = _first(len(keys)) if slots is None else slots
        for part, rows in self._departures(at):
            first = HostRows.view(rows).encode(codec, keys[part], out[part])
            lost = part.start + first if lost < 0 <= first else lost
        return lost

    def decode(
        self, codec: RowCodec, rows: RowBytes, slots: Slots | None = None, source: Slots | None = None
    ) -> None:
        """Write the rows that encoded rows stand for to ``slots``, decoded by the host."""
        self._require_wide()
        n = len(slots) if slots is not None else len(rows if source is None else source)
        at = _first(n) if slots is None else slots
        for part in self._steps(n):
            some, of = (rows[part], None) if source is None else (rows, source[part])
            self._send(at[part], partial(_decode, codec, some, of))


def _first(n: int) -> Slots:
    return np.arange(n, dtype=np.int32)


def _copy_in(slots: Slots, rows: RowBytes, source: Slots | None, near: HostRows) -> None:
    near.copy_in(slots, rows, source)


def _decode(codec: RowCodec, rows: RowBytes, source: Slots | None, near: HostRows) -> None:
    near.decode(codec, rows, source=source)
