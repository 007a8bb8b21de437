"""Reads rows of coming lookups into memory before their plans ask for them.

A thread goes round the places of a store's rows, in one direction, again and again. At each place it reads
the rows that some announced lookup asks for and that no exclusive tier has (``csrc/cache/sweep.h``). The
longer a round takes, the more rows lie near one another, and share a request to the device. So a round takes
nearly as many lookups as the window has, or as many as there is room for the rows that wait for their
lookups. Planning goes on meanwhile. Rows that leave memory although the window wants them again soon are
kept as they are written to the store.

Rows here equal the store's rows: a row that is written to the store later is dropped here, and no plan asks
for rows that an exclusive tier has.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.tiers.protocol import NEVER, Flags, Keys, RowBytes, Slots
from tierstore.errors import TierStoreError
from tierstore.store.protocol import RowStore

logger = logging.getLogger("tierstore")

_ROUND = 7 / 8
"""Lookups that a round takes, per lookup of the horizon. The rest is the time that a read may take."""
HORIZON_ROWS = 1.7
"""Rows that the lookups of the horizon lack together, per row that there is room for.

With n lookups in the horizon that lack m rows each, and rounds of r lookups, m·(n - r/2) rows wait for their
lookups on average. That is 0.96 of the room.
"""
_RESERVE = 1 / 16  # part of the room that is left to rows that leave memory and are wanted again
_PARTS = 64  # a round is read in at most so many parts, and more only where a part has very many rows
_MOST_AT_ONCE = 1 << 15  # rows of a part; a plan may have to wait for a part
_MEMORY = 1 / 16  # weight of the newest lookup in the mean of what lookups lack


def bytes_per_row(row_bytes: int) -> float:
    """Return the bytes that a row takes here, its entries in the index and in the sweep included."""
    return row_bytes + _core.HeldRows.BYTES_PER_ROW + _core.Sweep.BYTES_PER_ENTRY


class ReadAhead:
    """Rows of one group. Its methods are called with ``lock`` held, :meth:`wait` and :meth:`close` without.

    ``max_bytes``: what the rows may take, their index included. ``resident`` returns which keys some
    exclusive tier holds. None: the tiers know the next use of their rows, so that rows that they hold are not
    announced.
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
        self.max_rows = max(1, int(max_bytes / bytes_per_row(row_bytes)))
        self._resident = resident
        self._changed = threading.Condition(lock)
        # Rows whose places were not asked yet, with the lookups that ask for them.
        self._incoming: list[tuple[Keys, NDArray[np.int64]]] = []
        self._sweep = _core.Sweep()  # the thread's own; it changes without the lock
        self._entries = 0  # of the sweep, when the thread last looked
        self._rounds = 0.0  # of the sweep, when the thread last looked
        self._due = 0.0  # rounds that should be complete
        self._rows: _core.HeldRows | None = None
        self._reading: int | None = None  # the earliest lookup for which rows are being read
        self._last_announced = self._last_begun = -1
        self._window = 0  # the most lookups that were announced and not begun
        self._lacking = 0.0  # the mean number of rows that a lookup lacks
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    # -- what happens to rows -------------------------------------------------------------

    def announce(self, seq: int, keys: Keys) -> None:
        """Queue ``keys`` for coming lookup ``seq``; no announced lookup before it asks for them."""
        if self._closed or seq <= self._last_begun:
            return
        self._last_announced = max(self._last_announced, seq)
        self._window = max(self._window, self._last_announced - self._last_begun)
        self._queue(keys, np.full(len(keys), seq, np.int64))

    def _queue(self, keys: Keys, next_use: NDArray[np.int64]) -> None:
        if not len(keys):
            return
        self._incoming.append((keys, next_use))
        if self._thread is None:
            # The thread ends when no lookup is announced any more, so it never keeps the tables alive.
            thread = threading.Thread(target=self._work, name="tierstore-read-ahead", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # plans read for themselves
                logger.debug("no reading ahead: %s", error)
                self._incoming.clear()
                return
            self._thread = thread
        self._changed.notify_all()

    def lookup_begun(self, seq: int) -> None:
        """Learn that lookup ``seq`` is being planned: its rows, and rows of earlier lookups, need not be read
        any more."""
        if seq <= self._last_begun:
            return
        steps = (seq - self._last_begun) / max(1.0, _ROUND * self._horizon())
        # The first round is due at once, when the window is complete.
        self._due = min(self._due + steps, self._rounds + 1) if self._due else 1.0
        self._last_begun = seq
        self._changed.notify_all()

    def _horizon(self) -> float:
        """Return how many lookups ahead rows are read: lookups that are announced, and whose rows find
        room."""
        return min(self._window, HORIZON_ROWS * self.max_rows / max(self._lacking, 1.0))

    def rows_overwritten(self, keys: Keys) -> None:
        """Drop these rows: the store gets other versions of them."""
        if self._rows is not None:
            self._rows.discard(keys)

    def keep(self, keys: Keys, rows: RowBytes, next_use: NDArray[np.int64]) -> None:
        """Keep copies of rows that leave memory and that announced lookups use; the store has these
        versions."""
        if self._closed:
            return
        wanted = np.flatnonzero((next_use > self._last_begun) & (next_use < NEVER))
        if not len(wanted):
            return
        # Of later lookups the sweep comes by in time.
        soon = next_use[wanted] <= self._last_begun + self._horizon()
        kept = wanted[soon]
        held = self._held()
        # Policies that know the next use evict last the rows that are used first.
        past, kept = np.split(kept, [max(0, len(kept) - held.room)])
        for later in (past, wanted[~soon]):
            self._queue(keys[later], next_use[later])
        if len(kept):
            _core.HostRows.view(held.rows).copy_in(held.add(keys[kept]), rows, kept.astype(np.int32))

    def _held(self) -> _core.HeldRows:
        if self._rows is None:
            self._rows = _core.HeldRows(self.max_rows, self._row_bytes)
        return self._rows

    def forget(self) -> None:
        """Drop all rows and the queue: the announced lookups will not come."""
        self._incoming.clear()
        self._sweep = _core.Sweep()
        self._entries, self._rounds, self._due = 0, 0.0, 0.0
        self._rows = None
        self._last_announced, self._window = self._last_begun, 0
        self._changed.notify_all()

    def memory_bytes(self) -> int:
        """Return the bytes that the rows here take."""
        held = 0 if self._rows is None else len(self._rows)
        each = self._row_bytes + _core.HeldRows.BYTES_PER_ROW
        return int(each * held) + self._entries * _core.Sweep.BYTES_PER_ENTRY

    # -- taking rows ----------------------------------------------------------------------

    def wait(self, seq: int) -> None:
        """Wait until nothing is being read for lookup ``seq``. Raises what the thread has failed with,
        once."""
        with self._changed:
            self._changed.wait_for(lambda: self._reading is None or seq < self._reading)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def find(self, keys: Keys) -> tuple[Slots, RowBytes] | None:
        """Return the slot of each key's row, -1 where it is not here, and the slots' rows. None: there is no
        row here."""
        rows = self._rows
        return None if rows is None or not len(rows) else (rows.find(keys), rows.rows)

    def lookup_filled(self, keys: Keys) -> None:
        """Drop the rows of ``keys``, which a lookup lacked: they are in the first tier now."""
        if self._rows is not None:
            self._rows.discard(keys)
        self._lacking += (len(keys) - self._lacking) * (_MEMORY if self._lacking else 1.0)
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
            self._thread = None
            if failure is not None or self._reading is not None:
                self._reading = None
                self.forget()
            self._failure = failure or self._failure
            self._changed.notify_all()

    def _read_next(self) -> bool:
        """Read the next part of a round when it is due. Return False when no lookup is announced any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or bool(self._incoming) or self._is_due())
            if self._is_over():
                return False
            incoming, self._incoming, sweep = self._incoming, [], self._sweep
        for keys, next_use in incoming:
            sweep.add(keys, self._store.places(keys), next_use)
        with self._changed:
            if sweep is not self._sweep:
                return True  # the window was forgotten
            self._note()
            if not self._is_due():
                return True
            rows = self._held()
            keys, slots = self._choose(rows)
            self._note()
        if not len(keys):
            return True
        found = self._store.read(keys, rows.rows, slots)
        with self._changed:
            self._reading = None
            rows.finish(slots, found)
            self._changed.notify_all()
        return True

    def _is_over(self) -> bool:
        return self._closed or (self._last_announced <= self._last_begun and not self._incoming)

    def _note(self) -> None:
        self._entries, self._rounds = len(self._sweep), self._sweep.rounds

    def _room(self) -> int:
        room = self.max_rows if self._rows is None else self._rows.room
        return room - int(self.max_rows * _RESERVE)

    def _is_due(self) -> bool:
        """Return whether to read now: a part of a round is due, and there is room for its rows."""
        is_due = self._due - self._rounds >= 1 / _PARTS
        return is_due and self._room() >= min(self._entries, max(1, self.max_rows // _PARTS))

    def _choose(self, rows: _core.HeldRows) -> tuple[Keys, Slots]:
        """Go on in the round. Return the keys to read, and slots for their rows."""
        if not self._lacking:  # no lookup was planned yet
            self._lacking = self._entries / max(1, self._window)
        first, last = self._last_begun + 1, self._last_begun + math.ceil(self._horizon())
        limit = min(self._room(), _MOST_AT_ONCE)
        keys, earliest = self._sweep.next(self._due - self._rounds, limit, first, last)
        if self._resident is not None and len(keys):
            keys = keys[~self._resident(keys)]
        keys, slots = rows.begin(keys)
        if len(keys):
            self._reading = earliest
        return keys, slots

    def close(self) -> None:
        """End the thread. Call it before the store is closed."""
        with self._changed:
            self._closed = True
            self.forget()
            thread = self._thread
        if thread is not None:
            thread.join()
