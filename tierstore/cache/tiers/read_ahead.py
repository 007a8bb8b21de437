"""Rows of coming lookups, in memory before their plans ask for them.

Rows that no exclusive tier has are read from the store many lookups at a time, by a thread of its own: the
store reads the rows of one call in the order of their places, neighbours in one request, so that many lookups
in one call cost a fraction of as many calls (``tierstore bench store``), and planning goes on meanwhile.
Rows that leave memory although the window wants them again are kept as they are written to the store.

What is here is what the store has: a row that is written to the store later is dropped here, and nobody asks
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

_BLOCKS = 2  # of rows that were read: one that plans take rows from, and one that is being filled
_KEEP_SHARE = 0.4  # of all rows, that may be kept ones; as far as there are none, blocks are larger


@dataclass(eq=False)
class _Block:
    """Rows read for the lookups up to number ``last``."""

    last: int
    rows: _core.HeldRows


class ReadAhead:
    """Rows of one group. Its methods are called with ``lock`` held, :meth:`wait` and :meth:`close` without.

    ``max_bytes`` is what the rows may take, their index included. ``resident`` tells which keys some
    exclusive tier holds. None: the tiers know the next use of their rows, so that their rows are not
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
        # Lookups to come, in order, of which nothing was read yet.
        self._queue: dict[int, list[Keys]] = {}
        self._blocks: list[_Block] = []
        self._filling: _core.HeldRows | None = None  # the rows of the block that is being filled
        self._kept: _core.HeldRows | None = None
        self._keep_rows = 0  # how many were to be kept at most
        self._reading: range | None = None  # numbers of the lookups whose rows are being read
        self._written: list[Keys] = []  # since that began
        self._begun = -1
        self._generation = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    # -- what happens to rows -------------------------------------------------------------

    def announce(self, seq: int, keys: Keys) -> None:
        """Queue ``keys`` for coming lookup ``seq``; no announced lookup before it asks for them."""
        if self._closed or seq <= self._begun:
            return
        self._queue[seq] = [keys]
        if len(keys):
            self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            # It ends when nothing is announced any more, so it never keeps the tables alive.
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
        """Drop lookup ``seq`` and all before it from the queue: it is being planned."""
        self._begun = max(self._begun, seq)
        while self._queue and (first := next(iter(self._queue))) <= self._begun:
            del self._queue[first]
        self._changed.notify_all()

    def rows_overwritten(self, keys: Keys) -> None:
        """Drop these rows: the store gets other versions of them."""
        if self._reading is not None:
            self._written.append(keys)
        for rows in self._all():
            rows.discard(keys)

    def keep(self, keys: Keys, rows: RowBytes, next_use: NDArray[np.int64]) -> None:
        """Keep copies of rows that announced lookups use: the rows were just written to the store."""
        if self._closed:
            return
        wanted = self._wanted(next_use)
        most = int(self._max_rows * _KEEP_SHARE)
        held = 0 if self._kept is None else len(self._kept)
        self._keep_rows = max(self._keep_rows, min(most, held + len(wanted)))
        # Policies that know the next use evict last what is wanted first.
        room = max(0, min(most - held, self._free()))
        past, wanted = np.split(wanted, [max(0, len(wanted) - room)])
        self._read_again(keys[past], next_use[past])
        if not len(wanted):
            return
        if self._kept is None:
            self._kept = _core.HeldRows(most, self._row_bytes)
        slots = self._kept.add(keys[wanted])
        source = wanted.astype(np.int32)
        _core.HostRows.view(self._kept.rows(most)).copy_in(slots, rows, source)

    def rows_evicted(self, keys: Keys, next_use: NDArray[np.int64]) -> None:
        """Queue clean rows again that have left memory before they are used."""
        wanted = self._wanted(next_use)
        self._read_again(keys[wanted], next_use[wanted])

    def _wanted(self, next_use: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.flatnonzero((next_use > self._begun) & (next_use < NEVER))

    def _read_again(self, keys: Keys, next_use: NDArray[np.int64]) -> None:
        """Queue rows that were in memory when their next lookups were announced."""
        if self._resident is not None or not len(keys):
            return  # it is asked again before it is read
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
        """Return for how many rows there is room in all."""
        held = sum(block.rows.capacity for block in self._blocks)
        held += 0 if self._filling is None else self._filling.capacity
        return self._max_rows - held - (0 if self._kept is None else len(self._kept))

    def _all(self) -> list[_core.HeldRows]:
        """Return what holds rows that can be taken."""
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
            self._queue.clear()  # empty, unless something has failed: plans read for themselves then
            self._changed.notify_all()

    def _read_next(self) -> bool:
        """Read rows of the next lookups when it is time to; return False when nothing is announced any
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
            self._reading, self._written = lookups, []
        slots = rows.add(keys)  # from 0 on
        found = self._store.read(keys, rows.rows(len(keys)))
        rows.remove(slots[~found])
        with self._changed:
            self._reading = self._filling = None
            for written in self._written:
                rows.discard(written)
            block = _Block(lookups.stop - 1, rows)
            if generation == self._generation and block.last >= self._begun:
                self._blocks.append(block)
            self._written = []
            self._changed.notify_all()
        return True

    def _is_due(self) -> bool:
        """Return whether to read now: the more lookups in one read the better, as long as plans find as many
        in the block before it."""
        if len(self._blocks) >= _BLOCKS:
            return False
        return not self._blocks or len(self._queue) >= self._blocks[-1].last - self._begun

    def _choose(self) -> tuple[range, Keys]:
        """Return the next lookups, as many as a block has room for, and their keys that must be read."""
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
            del self._queue[seq]  # chosen, or more than a block: its plan reads for itself
        if not chosen:
            return range(0), np.empty(0, np.uint64)
        # A key is in the window until its lookup has begun, so none should come twice; the index of a block
        # relies on it.
        keys = np.unique(np.concatenate(chosen))
        for rows in self._all():
            keys = keys[rows.find(keys) < 0]
        return range(first, last + 1), keys

    def close(self) -> None:
        """End the thread; to be called before the store is closed."""
        with self._changed:
            self._closed = True
            self.forget()
            thread = self._thread
        if thread is not None:
            thread.join()
