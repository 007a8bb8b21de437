"""Reads rows of coming lookups into memory before their plans ask for them.

A thread reads rows that no exclusive tier has from the store, many lookups in one call. The store reads the
rows of a call in the order of their places, neighbours in one request, so that one call costs a fraction of a
call per lookup (``tierstore bench store``). Planning goes on meanwhile. Rows that leave memory although the
window wants them again are kept as they are written to the store.

Rows here equal the store's rows: a row that is written to the store later is dropped here, and no plan asks
for rows that an exclusive tier has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.tiers.protocol import NEVER, Flags, Keys, Piece, RowBytes
from tierstore.errors import TierStoreError
from tierstore.store.protocol import RowStore

logger = logging.getLogger("tierstore")

_BLOCKS = 2  # one that plans take rows from, and one that is being filled
_KEEP_SHARE = 0.4  # kept rows' share of all rows; blocks use the part that kept rows do not take


@dataclass(eq=False)
class _Block:
    """Rows read for the lookups up to number ``last``."""

    last: int
    rows: _core.HeldRows


class ReadAhead:
    """Rows of one group. Its methods are called with ``lock`` held, :meth:`wait` and :meth:`close` without.

    ``max_bytes``: what the rows may take, their index included. ``resident`` returns which keys some
    exclusive tier holds. If it is None, the tiers know the next use of their rows: their rows are not
    announced, and :meth:`rows_evicted` names rows that leave before they are used.
    """

    def __init__(
        self,
        store: RowStore,
        row_bytes: int,
        max_bytes: int,
        lock: threading.RLock,
        resident: Callable[[Keys], Flags] | None,
    ) -> None:
        self._store = store
        self._row_bytes = row_bytes
        self._max_rows = int(max_bytes / (row_bytes + _core.HeldRows.BYTES_PER_ROW))
        self._resident = resident
        self._changed = threading.Condition(lock)
        # Coming lookups, in order, whose rows were not read yet.
        self._queue: dict[int, list[Keys]] = {}
        self._blocks: list[_Block] = []
        self._filling: _core.HeldRows | None = None  # the rows of the block that is being filled
        self._kept: _core.HeldRows | None = None
        self._keep_rows = 0  # the largest number of rows that were to be kept
        self._reading: range | None = None  # numbers of the lookups whose rows are being read
        self._overwritten: list[Keys] = []  # keys written to the store since that read began
        self._last_begun = -1
        self._generation = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    # -- what happens to rows -------------------------------------------------------------

    def announce(self, seq: int, keys: Keys) -> None:
        """Queue ``keys`` for coming lookup ``seq``; no announced lookup before it asks for them."""
        if self._closed or seq <= self._last_begun:
            return
        self._queue[seq] = [keys]
        if len(keys):
            self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            # The thread ends when no lookup is announced any more, so it never keeps the tables alive.
            thread = threading.Thread(target=self._work, name="tierstore-read-ahead", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # plans read for themselves
                logger.debug("no reading ahead: %s", error)
                self._queue.clear()
                return
            self._thread = thread
        self._changed.notify_all()

    def lookup_begun(self, seq: int) -> None:
        """Drop lookup ``seq``, which is being planned, and all earlier lookups from the queue."""
        self._last_begun = max(self._last_begun, seq)
        while self._queue and (first := next(iter(self._queue))) <= self._last_begun:
            del self._queue[first]
        self._changed.notify_all()

    def rows_overwritten(self, keys: Keys) -> None:
        """Drop these rows: the store gets other versions of them."""
        if self._reading is not None:
            self._overwritten.append(keys)
        for rows in self._all():
            rows.discard(keys)

    def keep(self, keys: Keys, rows: RowBytes, next_use: NDArray[np.int64]) -> None:
        """Keep copies of rows that announced lookups use: the rows were just written to the store."""
        if self._closed:
            return
        wanted = self._wanted(next_use)
        maximum = int(self._max_rows * _KEEP_SHARE)
        held = 0 if self._kept is None else len(self._kept)
        self._keep_rows = max(self._keep_rows, min(maximum, held + len(wanted)))
        # Policies that know the next use evict last the rows that are used first.
        room = max(0, min(maximum - held, self._free()))
        past, wanted = np.split(wanted, [max(0, len(wanted) - room)])
        self._read_again(keys[past], next_use[past])
        if not len(wanted):
            return
        if self._kept is None:
            self._kept = _core.HeldRows(maximum, self._row_bytes)
        slots = self._kept.add(keys[wanted])
        source = wanted.astype(np.int32)
        _core.HostRows.view(self._kept.rows(maximum)).copy_in(slots, rows, source)

    def rows_evicted(self, keys: Keys, next_use: NDArray[np.int64]) -> None:
        """Queue clean rows again that have left memory before they are used."""
        wanted = self._wanted(next_use)
        self._read_again(keys[wanted], next_use[wanted])

    def _wanted(self, next_use: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.flatnonzero((next_use > self._last_begun) & (next_use < NEVER))

    def _read_again(self, keys: Keys, next_use: NDArray[np.int64]) -> None:
        """Queue rows that were in memory when their next lookups were announced."""
        if self._resident is not None or not len(keys):
            return  # ``resident`` is asked again before a lookup's rows are read
        for seq in np.unique(next_use).tolist():
            if seq in self._queue:
                self._queue[seq].append(keys[next_use == seq])
                self._wake()

    def forget(self) -> None:
        """Drop all rows and the queue: the announced lookups will not come."""
        self._generation += 1
        self._queue.clear()
        self._blocks.clear()
        self._kept, self._keep_rows = None, 0
        self._changed.notify_all()

    def memory_bytes(self) -> int:
        each = self._row_bytes + _core.HeldRows.BYTES_PER_ROW
        return int(each * (self._max_rows - self._free()))

    def _free(self) -> int:
        """Return the number of further rows that there is room for."""
        held = sum(block.rows.capacity for block in self._blocks)
        held += 0 if self._filling is None else self._filling.capacity
        return self._max_rows - held - (0 if self._kept is None else len(self._kept))

    def _all(self) -> list[_core.HeldRows]:
        """Return the holders of rows that plans can take."""
        return [block.rows for block in self._blocks] + ([] if self._kept is None else [self._kept])

    # -- taking rows ----------------------------------------------------------------------

    def wait(self, seq: int) -> None:
        """Wait until nothing is being read for lookup ``seq``. Raises what the thread has failed with,
        once."""
        with self._changed:
            self._changed.wait_for(lambda: self._reading is None or seq not in self._reading)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def find(self, keys: Keys) -> list[Piece]:
        """Return the rows of ``keys`` that are here, in place."""
        found: list[Piece] = []
        for rows in self._all():
            slots = rows.find(keys)
            here = np.flatnonzero(slots >= 0)
            if len(here):
                found.append((here, rows.rows(rows.capacity), slots[here]))
        return found

    def lookup_filled(self, seq: int, keys: Keys) -> None:
        """Drop rows of ``keys``, and blocks up to lookup ``seq``: the rows are in the first tier now."""
        if self._kept is not None:
            self._kept.discard(keys)
        self._blocks = [block for block in self._blocks if block.last > seq]
        self._changed.notify_all()

    # -- the thread -----------------------------------------------------------------------

    def _work(self) -> None:
        failure: BaseException | None = None
        try:
            while self._read_next():
                pass
        except (TierStoreError, MemoryError) as error:
            # Plans will ask again, and tell the user in the forward call.
            logger.debug("no reading ahead: %s", error)
        except BaseException as error:
            failure = error
        with self._changed:
            self._reading = self._filling = None
            self._failure = failure or self._failure
            self._thread = None
            self._queue.clear()  # it has entries only after a failure: plans then read for themselves
            self._changed.notify_all()

    def _read_next(self) -> bool:
        """Read rows of the next lookups when a read is due; return False when no lookup is announced any
        more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._queue or self._is_due())
            if self._closed or not self._queue:
                return False
            generation = self._generation
            lookups, keys = self._choose()
            if not len(keys):
                return True
            rows = self._filling = _core.HeldRows(len(keys), self._row_bytes)
            self._reading, self._overwritten = lookups, []
        slots = rows.add(keys)  # slots from 0 on
        found = self._store.read(keys, rows.rows(len(keys)))
        rows.remove(slots[~found])
        with self._changed:
            self._reading = self._filling = None
            for written in self._overwritten:
                rows.discard(written)
            block = _Block(lookups.stop - 1, rows)
            if generation == self._generation and block.last >= self._last_begun:
                self._blocks.append(block)
            self._overwritten = []
            self._changed.notify_all()
        return True

    def _is_due(self) -> bool:
        """Return whether to read now. More lookups in one read are better, as long as plans have as many left
        in the block before it."""
        if len(self._blocks) >= _BLOCKS:
            return False
        return not self._blocks or len(self._queue) >= self._blocks[-1].last - self._last_begun

    def _choose(self) -> tuple[range, Keys]:
        """Return the next lookups, as many as a block has room for, and the keys to read for them."""
        first, last = -1, -1
        room = min((self._max_rows - self._keep_rows) // _BLOCKS, self._free())
        chosen: list[Keys] = []
        while self._queue:
            seq = next(iter(self._queue))
            missing = np.concatenate(self._queue[seq])
            if self._resident is not None:
                missing = missing[~self._resident(missing)]
            if len(missing) <= room:
                room -= len(missing)
                chosen.append(missing)
                first, last = (seq if first < 0 else first), seq
            elif chosen:
                break
            del self._queue[seq]  # it is chosen, or larger than a block: then its plan reads for itself
        if not chosen:
            return range(0), np.empty(0, np.uint64)
        # A key is in the window until its lookup has begun, so none should come twice; the index of a block
        # relies on it.
        keys = np.unique(np.concatenate(chosen))
        for rows in self._all():
            keys = keys[rows.find(keys) < 0]
        return range(first, last + 1), keys

    def close(self) -> None:
        """End the thread. Call it before the store is closed."""
        with self._changed:
            self._closed = True
            self.forget()
            thread = self._thread
        if thread is not None:
            thread.join()
