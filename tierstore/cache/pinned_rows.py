"""The rows of a lookup as kernels take them: the slot of each unique row, for as long as the lookup is in
use."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.device import Device, DeviceRows
from tierstore.cache.layout import RowLayout
from tierstore.cache.lookup_order import LookupOrder
from tierstore.cache.stats import Before, GroupStats
from tierstore.threads import Gate


class Owner(Protocol):
    """The part of a tier group that pinned rows use."""

    device: Device
    layout: RowLayout
    order: LookupOrder
    stats: GroupStats

    def wake(self) -> None:
        """Let threads that wait for releases look again."""
        ...


class Rows:
    """Rows of one deduplicated lookup in ``device_rows``: unique row u is at slot ``slots[u]``, position p
    uses ``inverse[p]`` (-1: skipped)."""

    device_rows: DeviceRows
    slots: NDArray[np.int32]

    def __init__(self, group: Owner, batch: _core.Batch) -> None:
        self.group = group
        self.batch = batch

    @property
    def inverse(self) -> NDArray[np.int32]:
        return self.batch.inverse

    @property
    def device_inverse(self) -> NDArray[np.int32]:
        """The inverse as calls of ``device_rows`` take it."""
        return self.batch.inverse

    def copied(self) -> ReadRows:
        """Return a copy of the rows as they are now."""
        data = _core.rows_array(len(self.slots), self.group.layout.row_bytes)
        self.device_rows.copy_out(self.slots, data)
        return ReadRows(self.group, self.batch, data)


class ReadRows(Rows):
    """A private copy of rows, for lookups that change nothing."""

    def __init__(self, group: Owner, batch: _core.Batch, data: NDArray[np.uint8]) -> None:
        super().__init__(group, batch)
        self.data = data
        self.device_rows = group.device.load(data, group.layout.weights)
        self.slots = np.arange(len(data), dtype=np.int32)


class StayingRows(Rows):
    """Rows of a tier that no row ever leaves, for lookups that change nothing: no copy is needed."""

    def __init__(self, group: Owner, batch: _core.Batch, slots: NDArray[np.int32], rows: DeviceRows) -> None:
        super().__init__(group, batch)
        self.slots, self.device_rows = slots, rows


class TierRows(Rows):
    """Rows in the fast tier, which stay at their slots while they are ``held``. ``csr``: the positions of
    every row."""

    csr: tuple[NDArray[np.int32], NDArray[np.int32]] | None

    @property
    @abstractmethod
    def held(self) -> bool: ...

    @abstractmethod
    def wait(self) -> bool:
        """Wait for the rows; return whether they are held (if not, look them up again)."""

    @abstractmethod
    def release(self) -> None:
        """End the lookup. Calling it again does nothing."""


class ResidentRows(TierRows):
    """Rows of a tier that no row ever leaves. Such rows need no pin, so a dropped lookup leaves nothing
    behind."""

    def __init__(self, group: Owner, batch: _core.Batch, found: _core.ResidentRows, rows: DeviceRows) -> None:
        self.group, self.batch = group, batch  # a call of the base would cost every forward call time
        self.slots = found.slots
        self.device_rows = rows
        self._found = found
        self._held = True

    @property
    def csr(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:  # type: ignore[override]
        return self._found.csr_start, self._found.csr_positions

    @property
    def held(self) -> bool:
        return self._held

    def wait(self) -> bool:
        return self._held

    def release(self) -> None:
        self._held = False


class PinnedRows(TierRows):
    """Rows pinned in the fast tier from their plan to :meth:`release`. Filled in by the planning thread.

    ``demand`` is called by a thread that cannot go on before a lookup planned ahead has its rows.
    """

    def __init__(
        self, group: Owner, batch: _core.Batch, seq: int, demand: Callable[[], None] | None = None
    ) -> None:
        super().__init__(group, batch)
        self.slots = np.empty(0, np.int32)
        self.seq = seq
        self.csr = None
        self.index_arrays: Sequence[NDArray[np.generic]] = ()
        """What calls of the device have for this lookup beside the arrays of its rows."""
        self.staged: object = None
        """What the device has of the lookup's arrays."""
        self.before: Before | None = None
        """The group's counters before it planned this lookup ahead."""
        self._demand = demand
        self._ready = Gate()
        self._error: BaseException | None = None
        self._use: _core.Use | None = None  # the rows are pinned until this use is released or dropped
        self._unwanted = False

    @property
    def device_inverse(self) -> NDArray[np.int32]:
        return self.batch.device_inverse  # which is staged

    def place(self, slots: NDArray[np.int32], rows: DeviceRows) -> None:
        """Take the rows' places. Raises what the device raises when it gets their arrays."""
        assert self.csr is not None
        self.staged = self.group.device.stage(slots, self.device_inverse, self.csr, self.index_arrays)
        self.slots, self.device_rows = slots, rows

    def grant(self) -> None:
        """Open :meth:`wait`: the rows are in place and pinned. If the lookup was dropped, release the
        rows."""
        self._use = _core.Use(self.group.order.uses, self.seq, self.slots)
        if self._unwanted:
            self.release()
        self._open()

    def fail(self, error: BaseException) -> None:
        """Make :meth:`wait` raise what planning or fetching raised, once."""
        self._error = error
        self._open()

    def cancel(self) -> None:
        """Open :meth:`wait`: the lookup will not be planned ahead any more."""
        self._open()

    def _open(self) -> None:
        self._demand = None
        self._ready.open()

    def wait(self) -> bool:
        """Wait; return True when the rows are in place, False if the plan was cancelled (look up on demand
        then).

        Raises what planning or fetching raised.
        """
        if not self._ready.is_open:
            begin = time.perf_counter()
            demand = self._demand
            if demand is not None:
                demand()
            self._ready.wait()
            self.group.stats.counters.stall_seconds += time.perf_counter() - begin
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self.before is not None:
            self.before.used = True
        return self.held

    @property
    def held(self) -> bool:
        return self._use is not None and self._use.held

    def release(self) -> None:
        """End the lookup, also before it is planned. Calling it again does nothing; it never waits for a
        plan."""
        self._unwanted = True
        if self._use is not None and self._use.held:
            self._use.release()
            self.group.wake()
