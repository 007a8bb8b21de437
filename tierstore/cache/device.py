"""Devices own rows, as tiers own slots: a device stores rows, moves them, and computes on them.

Nothing above a device knows the address of a row. ``HostDevice`` is this machine's memory and processor;
``CudaDevice`` of tierstore/cuda/device.py is a GPU. ``TierConfig.device`` names the one that an engine opens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tierstore._core import (
    Bags,
    Batch,
    HostRows,
    InitialValues,
    LookupArgs,
    RowCodec,
    UpdateArgs,
    UpdateRounding,
    build_csr,
    make_batch,
)
from tierstore.cache.tiers.sizes import memory_limit
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

    from tierstore._core import IdSegment

# Devices, what their calls take, and what makes it out of ids.
__all__ = [
    "HOST",
    "OPENERS",
    "Bags",
    "Device",
    "DeviceRows",
    "HostDevice",
    "HostUpdates",
    "InitialValues",
    "LookupArgs",
    "ReadyUpdates",
    "RowCodec",
    "UpdateArgs",
    "UpdateRounding",
    "build_csr",
    "make_batch",
    "open_device",
]

Slots = NDArray[np.int32]
ComputedRows = tuple[int, str, int]
"""Of rows: the columns, the dtype of the weights, and the kind of their optimizer's step."""


class DeviceRows(Protocol):
    """Rows of one layout, each ``row_bytes`` bytes: weights of the table's dtype, zeros up to a multiple of
    4 bytes, float32 optimizer state, zero padding.

    Rows are addressed by slot. ``slots``, ``source`` and ``target`` are int32 (n,); written slots do not
    repeat. Host arrays of rows are uint8 (n, row_bytes). An address points to a float32 tensor on the device;
    0 means none. Arguments that do not fit raise ValueError, and then nothing has changed. Calls come from
    several threads; no two of them use one slot at once, unless both only read the row.

    A call may return before the device has done it. What later calls do with the same rows follows it, a call
    that gives something to the host returns when the host has it, and arguments of the host are the caller's
    again when a call returns.
    """

    @property
    def row_bytes(self) -> int: ...

    def commit(self, slots: int) -> None:
        """Take the memory of the first ``slots`` slots, which stays where it is when more is taken.

        Raises ``tierstore._core.AddressSpaceError`` when there is no memory; then earlier slots stay usable.
        """
        ...

    def discard(self, first: int) -> None:
        """Give back memory of the slots from ``first`` on; they may be written again."""
        ...

    def move(self, source: Slots, target: Slots) -> None:
        """Copy the row at ``source[i]`` to ``target[i]`` for all i; no slot is in both."""
        ...

    def initialise(self, values: InitialValues, slots: Slots | None, keys: NDArray[np.uint64]) -> None:
        """Write the initial row of ``keys[i]`` to ``slots[i]``, or to slot i if ``slots`` is None."""
        ...

    def copy_out(self, slots: Slots, out: NDArray[np.uint8]) -> None:
        """Copy the row at ``slots[i]`` to ``out[i]`` for all i."""
        ...

    def copy_in(self, slots: Slots, rows: NDArray[np.uint8], source: Slots | None = None) -> None:
        """Copy ``rows[i]``, or ``rows[source[i]]``, to ``slots[i]`` for all i."""
        ...

    def copy_rows(self, slots: Slots, rows: Self, source: Slots) -> None:
        """Copy the row at ``source[i]`` of other rows, which are as long, to ``slots[i]`` for all i.
        :meth:`Device.takes` says of which rows."""
        ...

    def encode(
        self, codec: RowCodec, keys: NDArray[np.uint64], out: NDArray[np.uint8], slots: Slots | None = None
    ) -> int:
        """Write the row of ``keys[i]``, which is at ``slots[i]`` (None: slot i), to ``out[i]`` as
        csrc/kernels/row_format.h says, ``codec.row_bytes`` bytes each.

        Returns the first i whose row has no form in int8 (it decodes to NaN), or -1.
        """
        ...

    def decode(
        self,
        codec: RowCodec,
        rows: NDArray[np.uint8],
        slots: Slots | None = None,
        source: Slots | None = None,
    ) -> None:
        """Write the row that encoded row ``source[i]`` (None: i) stands for to ``slots[i]`` (None: slot
        i)."""
        ...

    def lookup_pooled(
        self, args: LookupArgs, bags: Bags, out_addr: int, weights_addr: int = 0, argmax_addr: int = 0
    ) -> None:
        """Pool the weights of rows over ``bags`` as csrc/kernels/lookup.h says."""
        ...

    def lookup_rows(self, args: LookupArgs, out_addr: int, out_stride: int) -> None:
        """Write the weights of position p's row to float ``p * out_stride`` of the output."""
        ...

    def weight_grads(self, args: LookupArgs, bags: Bags, grad_addr: int, out_addr: int) -> None:
        """Write the derivative by the weight of each position."""
        ...

    def update_pooled(
        self,
        args: UpdateArgs,
        bags: Bags,
        grad_addr: int,
        weights_addr: int = 0,
        argmax_addr: int = 0,
        rounding: UpdateRounding | None = None,
    ) -> Slots:
        """Make one optimizer step by the gradient of the pooled output, as csrc/kernels/update.h says.

        ``rounding``: of weights that are not float32, None: to the nearest value.
        Returns the indices (ascending) in ``args.slots`` of rows that were left alone because their gradient
        is not finite. With ``args.squares`` no row is read or written, and slots may repeat.
        """
        ...

    def update_rows(
        self, args: UpdateArgs, grad_addr: int, grad_stride: int, rounding: UpdateRounding | None = None
    ) -> Slots:
        """Make one optimizer step by gradients that lie ``grad_stride`` floats apart, one for each position.

        Returns what :meth:`update_pooled` returns.
        """
        ...


class ReadyUpdates(Protocol):
    """Updates that are ready to be made: ``calls`` has a call of native functions alone for each. Python runs
    no signal handler between two such calls that a native function makes."""

    @property
    def calls(self) -> Sequence[Callable[[], object]]: ...

    def unchanged(self, made: Sequence[object]) -> list[Slots]:
        """Return the rows that each update leaves as they are; ``made``: what the calls have returned."""
        ...


class Device(Protocol):
    """A place for rows of any layout."""

    @property
    def name(self) -> str:
        """Return torch's name of the device, such as "cpu" or "cuda:1": where tensors must be."""
        ...

    def memory(self) -> tuple[int, int]:
        """Return the bytes that rows could take now, and that they could take if nothing else did."""
        ...

    def prepare(self, rows: Collection[ComputedRows] = (), updated: Collection[ComputedRows] = ()) -> None:
        """Make ready whatever computes on such rows, so that no later call fails for the lack of it.

        ``updated``: rows that are updated, and that nobody looks up. Raises ``GpuError``.
        """
        ...

    def allocate(
        self, slots: int, row_bytes: int, weights: str = "fp32", dim: int = 0, kept: int | None = None
    ) -> DeviceRows:
        """Return room for ``slots`` rows with ``weights`` of this dtype, none of which has memory yet.

        ``dim``: the columns of every row, for a device that arranges rows by them; 0: not known. ``kept``:
        how many slots, from the first on, may get memory before they are committed; None: all.

        Raises ``tierstore._core.AddressSpaceError``.
        """
        ...

    def load(self, rows: NDArray[np.uint8], weights: str = "fp32") -> DeviceRows:
        """Return the host array's rows for kernels to work on, row i at slot i; the memory may be shared."""
        ...

    def ready_updates(self, updates: Sequence[partial[Slots]]) -> AbstractContextManager[ReadyUpdates]:
        """Make updates ready, which are calls of ``update_pooled`` and ``update_rows`` of the device's rows.

        All that may fail or take long comes first. The caller makes the calls inside of the ``with`` block,
        in their order, and asks which rows they left :meth:`~ReadyUpdates.unchanged` behind it.
        """
        ...

    @property
    def makes_from(self) -> int:
        """Return how many ids a lookup has at least that the device itself deduplicates."""
        ...

    def make_batch(self, segments: Sequence[IdSegment]) -> tuple[Batch, int, int, int]:
        """Deduplicate the ids of a lookup, as ``_core.make_batch`` does. The batch may leave to the device
        what only its calls need: the host asks for it by ``Batch.inverse`` and ``Batch.bring``."""
        ...

    def stage(
        self,
        slots: Slots,
        inverse: NDArray[np.int32],
        csr: tuple[NDArray[np.int32], NDArray[np.int32]],
        more: Sequence[NDArray[np.generic]],
        /,
    ) -> object:
        """Give the device the index arrays of a planned lookup ahead: ``slots`` and the positions ``csr`` of
        its unique rows, ``inverse``, and ``more`` arrays that its calls will have. None of them changes while
        the caller has what is returned."""
        ...

    def takes(self, rows: DeviceRows) -> bool:
        """Return whether ``copy_rows`` of the device's rows takes these."""
        ...

    def uvm(self, kind: str) -> Device:
        """Return the device for rows of ``uvm``: of the host's memory, as ``TierConfig.uvm_kind`` says."""
        ...

    def staging(self, slots: int, row_bytes: int) -> DeviceRows | None:
        """Return room for rows on their way to ``hbm``, which takes them from there; None where they pass
        through arrays of the host."""
        ...

    def close(self) -> None:
        """Give the device's own memory back; its rows cannot be used any more. Calling it again does
        nothing."""
        ...


@dataclass(frozen=True)
class HostUpdates:
    """Updates of rows in this machine's memory, whose methods are native."""

    calls: Sequence[partial[Slots]]

    def unchanged(self, made: Sequence[object]) -> list[Slots]:
        return [rows for rows in made if isinstance(rows, np.ndarray)]


@dataclass(frozen=True)
class HostDevice:
    """Rows in this machine's memory: in huge pages, taken as slots are committed; a forked child has none."""

    @property
    def name(self) -> str:
        return "cpu"

    def memory(self) -> tuple[int, int]:
        limit = memory_limit()
        return limit, limit

    def prepare(self, rows: Collection[ComputedRows] = (), updated: Collection[ComputedRows] = ()) -> None:
        """Do nothing."""

    def allocate(
        self, slots: int, row_bytes: int, weights: str = "fp32", dim: int = 0, kept: int | None = None
    ) -> DeviceRows:
        return HostRows(slots, row_bytes, weights)

    def load(self, rows: NDArray[np.uint8], weights: str = "fp32") -> DeviceRows:
        return HostRows.view(rows, weights)

    def ready_updates(self, updates: Sequence[partial[Slots]]) -> AbstractContextManager[ReadyUpdates]:
        return nullcontext(HostUpdates(updates))

    @property
    def makes_from(self) -> int:
        return sys.maxsize

    def make_batch(self, segments: Sequence[IdSegment]) -> tuple[Batch, int, int, int]:
        return make_batch(list(segments))

    def stage(self, *arrays: object) -> object:
        return None

    def takes(self, rows: DeviceRows) -> bool:
        return isinstance(rows, HostRows)

    def uvm(self, kind: str) -> Device:
        return self

    def staging(self, slots: int, row_bytes: int) -> DeviceRows | None:
        return None

    def close(self) -> None:
        """Do nothing: every array of rows gives its own memory back."""


HOST = HostDevice()
OPENERS: dict[str, Callable[[int | None], Device]] = {"cpu": lambda index: HOST}
"""Opens a device, by the kind in its name. It gets the number in the name, None if there is none. Add a kind
of device by an entry."""


def open_device(name: str | None) -> Device:
    """Return the device that ``TierConfig.device`` names; its user closes it.

    Raises ``GpuError`` where a GPU, its driver or the compiler of its kernels is missing or cannot be used;
    ``ConfigError`` for a kind that nothing opens.
    """
    kind, _, number = (name or HOST.name).partition(":")
    if kind not in OPENERS:
        raise ConfigError(
            f"device is {name!r}, but what is imported opens {', '.join(OPENERS)} alone; import "
            "tierstore.modules, which opens GPUs"
        )
    return OPENERS[kind](int(number) if number else None)
