"""A GPU as a device for rows (``Device`` of tierstore/cache/device.py)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cuda import lookups
from tierstore.cuda.args import WEIGHTS
from tierstore.cuda.compute import CudaRows, parts_of
from tierstore.cuda.cubins import CubinCache, Cubins
from tierstore.cuda.driver import LIBRARY, Driver
from tierstore.cuda.kernels import Kernels
from tierstore.cuda.lookups import LookupMaker, Made
from tierstore.cuda.memory import Arena, Block, Blocks
from tierstore.cuda.nvrtc import open_nvrtc
from tierstore.cuda.places import Tail
from tierstore.cuda.rows import ANY_LAYOUT, GpuRows, Parts, Slots, Touched
from tierstore.cuda.staged import Constant, Staged
from tierstore.cuda.streams import Stream, Streams
from tierstore.cuda.updates import RowUpdate, RowUpdates, one_operation
from tierstore.cuda.uvm import ManagedArena, PinnedArena, UvmRows
from tierstore.errors import GpuError
from tierstore.row_format import RowFormat

_UNIFIED_ADDRESSING, _MAJOR, _MINOR, _VIRTUAL_MEMORY = 41, 75, 76, 102
_CONCURRENT_MANAGED_ACCESS, _HOST_POINTERS = 89, 91
_STAGING_BLOCKS = 2
MEMORY_UNIT = 64
"""Bytes of a GPU's memory that are read at once."""


@dataclass(frozen=True)
class Libraries:
    """The libraries of NVIDIA, and the folder of compiled kernels; None: those that are found."""

    driver: str = LIBRARY
    nvrtc: Sequence[str] | None = None
    cache: CubinCache | None = None


class _LoadedRows:
    """Memory of rows that came from the host in one copy: a block of index arrays with nothing else in it."""

    def __init__(self, block: Block) -> None:
        self.block = block

    @property
    def base(self) -> int:
        return self.block.device

    @property
    def mapped(self) -> int:
        return self.block.size

    def commit(self, size: int) -> None:
        assert size <= self.block.size

    ensure = commit

    def discard(self, begin: int, marks: Sequence[int]) -> None:
        """Keep the memory."""


AnyRows = TypeVar("AnyRows", bound=GpuRows)


class CudaDevice:
    """GPU number ``index``: rows in its memory, kernels that work on them there.

    ``compute_stream``: returns the handle of the stream in which the calling thread computes, such as torch's
    current one; None: a stream of the device's own. :meth:`close` the device after its last use. A forked
    child cannot use it.

    Raises ``GpuError`` where there is no driver, no such GPU, or one that cannot be used.
    """

    def __init__(
        self,
        index: int = 0,
        compute_stream: Callable[[], int] | None = None,
        libraries: Libraries | None = None,
    ) -> None:
        libraries = Libraries() if libraries is None else libraries
        self._driver = driver = Driver(libraries.driver)
        self.number = driver.open_device(index)
        """The driver's number of the GPU."""
        self.name = f"cuda:{index}"
        for attribute, what in (
            (_UNIFIED_ADDRESSING, "unified addressing"),
            (_VIRTUAL_MEMORY, "virtual memory"),
        ):
            if not self.attribute(attribute):
                raise GpuError(f"GPU {index} lacks {what}, which tierstore needs; use another GPU")
        major, minor = map(self.attribute, (_MAJOR, _MINOR))
        self.streams = Streams(driver, self.number, compute_stream)
        cubins = Cubins(
            10 * major + minor, lambda: open_nvrtc(driver.version // 1000, libraries.nvrtc), libraries.cache
        )
        self._gone: deque[tuple[Block, Touched]] = deque()
        """Loaded rows that are gone. The garbage collector may end them within an operation."""
        self._arenas: list[weakref.finalize] = []
        """Give the memory of allocated rows back, when the rows are gone or the device is closed."""
        self.parts = Parts(
            self.streams,
            Kernels(self.streams, cubins),
            indices=Blocks(self.streams, with_device=True),
            arriving=Blocks(self.streams, with_device=False, max_blocks=_STAGING_BLOCKS),
            leaving=Blocks(self.streams, with_device=False, max_blocks=_STAGING_BLOCKS),
        )
        self._lookups = LookupMaker(self.parts)

    def attribute(self, which: int) -> int:
        """Return an attribute of the GPU (CUdevice_attribute)."""
        return self._driver.number("cuDeviceGetAttribute", which, self.number)

    def prepare(
        self, rows: Collection[tuple[int, str, int]] = (), updated: Collection[tuple[int, str, int]] = ()
    ) -> None:
        """Load the kernels that every row needs, those that look up and update ``rows`` (columns, dtype of
        the weights and kind of the optimizer's step), and those that update ``updated``. So it is known
        whether they compile for this GPU before anything depends on it.

        Raises ``GpuError``.
        """
        self.parts.kernels.load(ANY_LAYOUT, "move_rows")
        for part in parts_of(rows, updated):
            self.parts.kernels.prepare(part)

    def memory(self) -> tuple[int, int]:
        """Return the free bytes of the GPU's memory, and all of its bytes."""
        with self.streams.calls():
            return self.streams.driver.memory()

    def allocate(
        self, slots: int, row_bytes: int, weights: str = "fp32", dim: int = 0, kept: int | None = None
    ) -> CudaRows:
        """Return room for rows. Raises ``tierstore._core.AddressSpaceError``.

        Weights that fill units of memory are kept apart from the state, so that no unit has some of both.
        """
        self.check(slots, row_bytes, weights)
        head = RowFormat(weights).weights_end(dim)
        is_cut = 0 < head < row_bytes and head % MEMORY_UNIT == 0
        cuts, kept = [head] if is_cut else [], slots if kept is None else kept
        arena = Arena(self.streams, self.number, slots * row_bytes, row_bytes, cuts, kept * row_bytes)
        tail = Tail(arena.tail, head) if is_cut else None
        return self.closing(CudaRows(self.parts, arena, slots, row_bytes, weights, tail), arena.close)

    def closing(self, rows: AnyRows, close: Callable[[Callable[[], Sequence[int]]], None]) -> AnyRows:
        """Return ``rows``, whose memory ``close`` gives back: when they are gone or the device is closed."""
        self._arenas = [end for end in self._arenas if end.alive]
        self._arenas.append(weakref.finalize(rows, close, rows.touched.newest))
        self._arenas[-1].atexit = False
        return rows

    def takes(self, rows: object) -> bool:
        """Return whether these rows are the device's, or of the host's memory beside it."""
        return isinstance(rows, GpuRows) and rows.parts is self.parts

    @contextmanager
    def ready_updates(self, updates: Sequence[partial[Slots]]) -> Iterator[RowUpdates]:
        """Make updates ready, and give them to the compute stream as one operation; see ``Device``."""
        ready: list[RowUpdate] = []
        try:
            for update in updates:
                update(ready=ready)
        except BaseException:
            for one in ready:
                one.end()
            raise
        with one_operation(self.streams, ready) as found:
            yield found

    def staging(self, slots: int, row_bytes: int) -> CudaRows:
        """Return room for rows on their way."""
        return self.allocate(slots, row_bytes)

    def uvm(self, kind: str) -> UvmDevice:
        """Return the device for rows in the host's memory that this GPU's kernels work on, too; ``kind``:
        "pinned" or "managed".

        Raises ``GpuError`` where the GPU cannot share managed memory with the host.
        """
        return UvmDevice(self, kind)

    @property
    def makes_from(self) -> int:
        return lookups.MAKES_FROM

    def make_batch(self, segments: Sequence[_core.IdSegment]) -> Made:
        """Deduplicate the ids of a lookup, of a large one on the GPU; see ``Device``."""
        return self._lookups.make(segments)

    def stage(
        self,
        slots: Slots,
        inverse: NDArray[np.int32],
        csr: tuple[NDArray[np.int32], NDArray[np.int32]],
        more: Sequence[NDArray[np.generic]],
        /,
    ) -> Staged:
        """Copy the index arrays of a planned lookup to the GPU, unless they are there; see ``Device``."""
        known, blocks = self.parts.staged.constants, self.parts.indices
        new = [
            Constant(blocks, array)
            for array in more
            if _core.is_shared(array) and not any(constant.has(array) for constant in known)
        ]
        made = self.parts.staged.made_of(inverse)
        staged = Staged(blocks, slots, inverse, csr, more, [*known, *new, *made])
        with self.streams.operation(Stream.INDEX) as upload:
            ahead: list[Constant | Staged] = [*new, staged]  # who waits for the last one waits for all
            for one in ahead:
                one.block.mark = upload.mark
                upload.copy(one.block.device, one.block.address, one.size)
        known += new
        self.parts.staged.add(staged)
        return staged

    def load(self, rows: NDArray[np.uint8], weights: str = "fp32") -> CudaRows:
        """Return a copy of the host array's rows for kernels to work on."""
        self.check(1, rows.shape[1], weights)
        self._give_back()
        block = self.parts.indices.take(max(1, rows.nbytes))
        loaded = CudaRows(self.parts, _LoadedRows(block), max(1, len(rows)), rows.shape[1], weights)
        weakref.finalize(loaded, self._gone.append, (block, loaded.touched)).atexit = False
        loaded.commit(len(rows))
        block.view(0, rows.nbytes, write=True)[:] = rows.reshape(-1)
        with self.streams.operation(Stream.UP) as up:
            block.mark = up.mark
            up.copy(block.device, block.address, rows.nbytes)
        loaded.touched.touch(np.arange(len(rows), dtype=np.int32), block.mark)
        return loaded

    def _give_back(self) -> None:
        """Let others use the blocks of loaded rows that are gone, after the last operations on them."""
        while self._gone:
            block, touched = self._gone.popleft()
            with self.streams.operation(Stream.UP) as up:
                for mark in touched.newest():
                    up.wait_for(mark)
                block.mark = up.mark
            self.parts.indices.give(block)

    def check(self, slots: int, row_bytes: int, weights: str) -> None:
        """Raise ValueError for arrays of rows that cannot be."""
        if slots < 1:
            raise ValueError("rows need at least one slot")
        if row_bytes <= 0 or row_bytes % 16:
            raise ValueError("row_bytes must be a positive multiple of 16")
        if weights not in WEIGHTS:
            raise ValueError(f"kernels do not work on {weights} weights, only on {', '.join(WEIGHTS)}")

    def synchronize(self) -> None:
        """Wait until all that was asked of the device so far is done."""
        self.streams.synchronize_all()

    def close(self) -> None:
        """Wait for the device, and give its memory back; its rows cannot be used any more."""
        if self.streams.is_usable:
            self.streams.synchronize_all()
            for end in self._arenas:
                end()
            self._lookups.close()
            self.parts.kernels.close()
            for blocks in (self.parts.indices, self.parts.arriving, self.parts.leaving):
                blocks.close()
        self.streams.close()


class UvmDevice:
    """The host's memory beside a GPU: rows that its kernels read and write in place, as the host does."""

    def __init__(self, gpu: CudaDevice, kind: str) -> None:
        self._gpu, self._kind, self.name = gpu, kind, gpu.name
        if kind == "managed" and not gpu.attribute(_CONCURRENT_MANAGED_ACCESS):
            raise GpuError(
                f"{gpu.name} cannot share managed memory with the host while it computes; use "
                "uvm_kind='pinned'"
            )
        if kind == "pinned" and not gpu.attribute(_HOST_POINTERS):
            raise GpuError(
                f"{gpu.name} does not reach registered memory at the host's addresses; use uvm_kind='managed'"
            )

    def memory(self) -> tuple[int, int]:
        """Return what the GPU says: how much the host has is not known here."""
        return self._gpu.memory()

    def prepare(
        self, rows: Collection[tuple[int, str, int]] = (), updated: Collection[tuple[int, str, int]] = ()
    ) -> None:
        """Load the GPU's kernels, as :meth:`CudaDevice.prepare` does."""
        self._gpu.prepare(rows, updated)

    def allocate(
        self, slots: int, row_bytes: int, weights: str = "fp32", dim: int = 0, kept: int | None = None
    ) -> UvmRows:
        """Return room for rows, each in one piece. Raises ``tierstore._core.AddressSpaceError``."""
        gpu = self._gpu
        gpu.check(slots, row_bytes, weights)
        size = slots * row_bytes
        arena: PinnedArena | ManagedArena
        if self._kind == "managed":
            arena = ManagedArena(gpu.streams, gpu.number, size)
        else:
            arena = PinnedArena(gpu.streams, size)
        return gpu.closing(UvmRows(gpu.parts, arena, slots, row_bytes, weights), arena.close)

    def load(self, rows: NDArray[np.uint8], weights: str = "fp32") -> CudaRows:
        """Return a copy of the host array's rows on the GPU."""
        return self._gpu.load(rows, weights)

    def takes(self, rows: object) -> bool:
        """Return whether these rows are the GPU's, or of the host's memory beside it."""
        return self._gpu.takes(rows)

    def ready_updates(self, updates: Sequence[partial[Slots]]) -> AbstractContextManager[RowUpdates]:
        """Make updates of the GPU."""
        return self._gpu.ready_updates(updates)

    @property
    def makes_from(self) -> int:
        return self._gpu.makes_from

    def make_batch(self, segments: Sequence[_core.IdSegment]) -> Made:
        """Deduplicate the ids of a lookup as the GPU does."""
        return self._gpu.make_batch(segments)

    def stage(
        self,
        slots: Slots,
        inverse: NDArray[np.int32],
        csr: tuple[NDArray[np.int32], NDArray[np.int32]],
        more: Sequence[NDArray[np.generic]],
        /,
    ) -> Staged:
        """Copy the index arrays of a planned lookup to the GPU."""
        return self._gpu.stage(slots, inverse, csr, more)

    def staging(self, slots: int, row_bytes: int) -> CudaRows:
        """Return room for rows on their way up, on the GPU."""
        return self._gpu.staging(slots, row_bytes)

    def uvm(self, kind: str) -> UvmDevice:
        """Return the device itself."""
        return self

    def close(self) -> None:
        """Do nothing: the memory is given back with the GPU's."""
