"""What a lookup gives to the kernels: where each unique row is, for as long as the lookup is in use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.device import DeviceRows
from tierstore.cache.stats import Before
from tierstore.cache.uninterrupted import Gate

if TYPE_CHECKING:
    from tierstore.cache.group import TierGroup


class Rows:
    """Rows of one deduplicated lookup in ``device_rows``: unique row u is at slot ``slots[u]``, position p
    uses ``inverse[p]`` (-1: skipped)."""

    device_rows: DeviceRows

    def __init__(self, group: TierGroup, batch: Any) -> None:
        self.group = group
        self.batch = batch
        self.slots: NDArray[np.int32] = np.empty(0, np.int32)

    @property
    def inverse(self) -> NDArray[np.int32]:
        return self.batch.inverse

    def copied(self) -> ReadRows:
        """The rows as they are now."""
        data = _core.rows_array(len(self.slots), self.group.layout.row_bytes)
        self.device_rows.copy_out(self.slots, data)
        return ReadRows(self.group, self.batch, data)


class ReadRows(Rows):
    """A private copy of rows, for lookups that change nothing."""

    def __init__(self, group: TierGroup, batch: Any, data: NDArray[np.uint8]) -> None:
        super().__init__(group, batch)
        self.data = data
        self.device_rows = group.fast.plan.device.load(data)
        self.slots = np.arange(len(data), dtype=np.int32)


class PinnedRows(Rows):
    """Rows pinned in the fast tier from their plan to :meth:`release`. Filled in by the planning thread.

    ``demand`` is called by a thread that cannot go on before a lookup planned ahead has its rows.
    """

    def __init__(
        self, group: TierGroup, batch: Any, seq: int, demand: Callable[[], None] | None = None
    ) -> None:
        super().__init__(group, batch)
        self.seq = seq
        self.csr: tuple[NDArray[Any], NDArray[np.int32]] | None = None
        self.before: Before | None = None
        """What its group had counted before it planned this ahead."""
        self._demand = demand
        self._ready = Gate()
        self._error: BaseException | None = None
        self._use: Any = None  # the rows are pinned until it is released or dropped
        self._unwanted = False

    def grant(self) -> None:
        """The rows are in place and pinned; if nobody wants them any more, they are released at once."""
        self._use = _core.Use(self.group.order.uses, self.seq, self.slots)
        if self._unwanted:
            self.release()
        self._open()

    def fail(self, error: BaseException) -> None:
        """Planning or fetching raised: :meth:`wait` raises it, once."""
        self._error = error
        self._open()

    def cancel(self) -> None:
        """The lookup will not be planned ahead any more."""
        self._open()

    def _open(self) -> None:
        self._demand = None
        self._ready.open()

    def wait(self) -> bool:
        """Returns True when the rows are in place, False if the plan was cancelled (look up on demand then).

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
        """Ends the lookup, also before it is planned. Calling it again does nothing; it never waits for a
        plan."""
        self._unwanted = True
        if self.held:
            self._use.release()
            self.group.wake()
