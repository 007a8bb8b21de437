"""Reads rows of coming lookups into memory before their plans ask for them.

Threads go round the places of a store's rows in a fixed order, again and again: one chooses the next part of
the round while the other reads. At each place they read the rows that some announced lookup asks for and that
no exclusive tier has (``csrc/cache/sweep.h``). The longer a round takes, the more rows lie near one another,
and share a request to the device. So a round takes nearly as many lookups as the window has, or as many as
there is room for the rows that wait for their lookups. Planning goes on meanwhile; a plan waits for a round
that has not come by all of its rows yet, since a read for one plan alone would take the device much longer.
Rows that leave memory although the window wants them again soon are kept as they are written to the store.

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
from tierstore.cache.at_exit import wait_at_exit
from tierstore.cache.tiers.horizon import Horizon
from tierstore.cache.tiers.protocol import NEVER, Flags, Keys, RowBytes, Slots
from tierstore.cache.tiers.sizes import MAX_SLOTS
from tierstore.errors import ConfigError, TierStoreError
from tierstore.rounds import ENTRIES, WINDOW_ROWS
from tierstore.store.protocol import RowStore
from tierstore.threads import Thread

logger = logging.getLogger("tierstore")

_RESERVE = 1 / 16  # part of the room that is left to rows that leave memory and are wanted again
_THREADS = 2  # one chooses the next part while the other reads
_PARTS = 64  # a round is read in at most so many parts, and more only where a part has very many rows
_MOST_AT_ONCE = 1 << 14  # rows of a part; a plan may have to wait for a part
_EARLY = 1 / 8  # of a round: while the room allows, a round goes on so much before it is due
_ROOMY = 1 / 8  # of the rows that may be here: so many must be free for that
_LEFT_TO_PLANS = 1 / 256  # of a round: a plan reads so little itself


def bytes_per_row(row_bytes: int) -> float:
    """Return the bytes that a row takes here, its entries in the index and in the sweep included."""
    return row_bytes + _core.HeldRows.BYTES_PER_ROW + ENTRIES * _core.Sweep.BYTES_PER_ENTRY


@dataclass(frozen=True)
class _Part:
    """Rows that are read together into ``slots`` of ``rows``, for lookups from ``earliest`` on.

    ``rounds_before``: the rounds when the part was chosen.
    """

    keys: Keys
    rows: _core.HeldRows
    slots: Slots
    earliest: int
    rounds_before: float


class ReadAhead:
    """Rows of one group. The caller of a method holds ``lock``; the caller of :meth:`wait` and :meth:`close`
    does not.

    ``max_bytes``: the most that the rows may ever take, their index and the bytes that :meth:`grant_window`
    leaves to the window included. ``resident`` returns which keys some exclusive tier holds: tiers that do
    not know the next use of their rows, or lookups that were not announced, may have brought rows in.
    """

    def __init__(
        self,
        store: RowStore,
        row_bytes: int,
        max_bytes: int,
        lock: threading.RLock,
        resident: Callable[[Keys], Flags],
    ) -> None:
        self._store = store
        self._row_bytes = row_bytes
        self.max_bytes = max_bytes
        """Bytes that the rows and what is granted to the window may take now."""
        self._granted = 0
        self._capacity = self._rows_of(max_bytes)
        self.max_rows = self._capacity
        """Rows that may be here now. Rows beyond it stay: no more are read until there is room."""
        self._resident = resident
        self._changed = threading.Condition(lock)
        # Rows whose places were not asked yet, with the lookups that ask for them.
        self._incoming: list[tuple[Keys, NDArray[np.int64]]] = []
        self._sweep = _core.Sweep()  # of the thread that has _choosing; it changes without the lock
        self._entries = 0  # of the sweep, when a thread last looked
        self._rounds = 0.0  # of the sweep, when a thread last looked
        self._waits = False  # whether a plan waits for rows
        self._rows: _core.HeldRows | None = None
        self._taken: Keys | None = None  # keys that were looked for last, to be taken
        # Parts of this sweep that are being read, by thread, in the order of the round.
        self._reading: dict[threading.Thread, _Part] = {}
        self._horizon = Horizon()
        self._closed = False
        self._threads: set[threading.Thread] = set()
        self._choosing = threading.Lock()  # taken before the residency lock
        self._failure: BaseException | None = None

    # -- memory ---------------------------------------------------------------------------

    def _rows_of(self, size: int) -> int:
        rows = size / bytes_per_row(self._row_bytes) * (1 + 1e-12)  # bytes for n rows give n rows
        return min(MAX_SLOTS, max(1, int(rows)))

    @property
    def window_rows(self) -> float:
        """Distinct rows in the window from which on a longer window brings nothing."""
        return WINDOW_ROWS * self._rows_of(self.max_bytes)

    def window_bytes(self, rows: int) -> int:
        """Return the bytes that a window of ``rows`` distinct rows may take: what the rows that it asks for
        at once leave of them, at most half."""
        asked = rows / WINDOW_ROWS * bytes_per_row(self._row_bytes)
        return max(0, min(self.max_bytes // 2, int(self.max_bytes - asked)))

    def grant_window(self, size: int) -> None:
        """Leave ``size`` bytes, at most half, to the window until the next call or :meth:`forget`."""
        self._granted = size
        self.max_rows = self._rows_of(self.max_bytes - min(size, self.max_bytes // 2))

    def set_bytes(self, size: int) -> None:
        """Let the rows and what is granted to the window take ``size`` bytes from now on. Rows that are here
        stay."""
        self.max_bytes = size
        self.grant_window(self._granted)

    def memory_bytes(self) -> int:
        """Return the bytes that the rows here take."""
        held = 0 if self._rows is None else len(self._rows)
        each = self._row_bytes + _core.HeldRows.BYTES_PER_ROW
        return int(each * held + self._entries * _core.Sweep.BYTES_PER_ENTRY)

    @property
    def threads(self) -> list[int] | None:
        """The system's numbers of the threads that read; None while none runs."""
        threads = list(self._threads)  # at once: they leave by themselves
        return [thread.native_id for thread in threads if thread.native_id is not None] or None

    # -- what happens to rows -------------------------------------------------------------

    def announce(self, seq: int, keys: Keys) -> None:
        """Queue ``keys`` for coming lookup ``seq``; no announced lookup before it asks for them."""
        if self._closed or seq <= self._horizon.last_begun:
            return
        self._horizon.announce(seq, len(keys))
        self._queue(keys, np.full(len(keys), seq, np.int64))

    def _queue(self, keys: Keys, next_use: NDArray[np.int64]) -> None:
        if not len(keys):
            return
        self._incoming.append((keys, next_use))
        self._start_threads()
        self._changed.notify_all()

    def _start_threads(self) -> None:
        # The threads end when no lookup is announced any more, so they never keep the tables alive.
        while len(self._threads) < _THREADS:
            thread = Thread(target=self._work, name="tierstore-read-ahead", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:  # plans read for themselves
                    logger.debug("no reading ahead: %s", error)
                    self._incoming.clear()
                return
            self._threads.add(thread)
            wait_at_exit(thread)

    def lookup_begun(self, seq: int) -> None:
        """Learn that lookup ``seq`` is being planned: its rows, and rows of earlier lookups, need not be read
        any more."""
        horizon = self._horizon
        if seq <= horizon.last_begun:
            return
        if horizon.lookup_begun(seq, self._rounds, self._room(), self.max_rows):
            self._changed.notify_all()

    def rows_overwritten(self, keys: Keys) -> None:
        """Drop these rows: the store gets other versions of them."""
        if self._rows is not None:
            self._rows.discard(keys)

    def keep(self, keys: Keys, rows: RowBytes, slots: Slots | None, next_use: NDArray[np.int64]) -> None:
        """Keep copies of rows that leave memory and that announced lookups use; the store has these
        versions. ``slots``: the index in ``rows`` of each key's row (None: all, in order)."""
        if self._closed:
            return
        wanted = np.flatnonzero((next_use > self._horizon.last_begun) & (next_use < NEVER))
        if not len(wanted):
            return
        # A round comes by the rows of later lookups in time.
        soon = next_use[wanted] <= self._horizon.end
        kept = wanted[soon]
        held = self._held()
        # Policies that know the next use evict last the rows that are used first.
        past, kept = np.split(kept, [max(0, len(kept) - max(0, self.max_rows - len(held)))])
        for later in (past, wanted[~soon]):
            self._queue(keys[later], next_use[later])
        if len(kept):
            source = kept.astype(np.int32) if slots is None else slots[kept]
            _core.HostRows.view(held.rows).copy_in(held.add(keys[kept]), rows, source)

    def _held(self) -> _core.HeldRows:
        """Return the rows; ``ConfigError`` when the system refuses the address space."""
        if self._rows is None:
            try:
                self._rows = _core.HeldRows(self._capacity, self._row_bytes)
            except _core.AddressSpaceError as refused:
                raise ConfigError(
                    f"no room for {self._capacity} rows read ahead of {self._row_bytes} bytes: {refused}. "
                    "Lower read_ahead, or raise the process's limit (ulimit -v)"
                ) from None
        return self._rows

    def forget(self) -> None:
        """Drop all rows and the queue: the announced lookups will not come."""
        self._incoming.clear()
        self._sweep = _core.Sweep()
        self._reading.clear()
        self._entries, self._rounds = 0, 0.0
        self._rows = self._taken = None
        self.grant_window(0)
        self._horizon.forget()
        self._changed.notify_all()

    # -- taking rows ----------------------------------------------------------------------

    def wait(self, seq: int) -> None:
        """Wait until the rows of lookup ``seq`` are here, as far as they are read ahead. Raises what the
        thread has failed with, once."""
        with self._changed:
            if self._is_awaited():
                self._horizon.due = max(self._horizon.due, self._horizon.until)
                self._waits = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._comes(seq))
                self._waits = False
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _is_awaited(self) -> bool:
        """Return whether the newest lookup's plan will wait for a round."""
        return self._horizon.until - self._rounds_here() > _LEFT_TO_PLANS

    def _comes(self, seq: int) -> bool:
        """Return whether rows of lookup ``seq`` are being read, or will be without a plan before it."""
        if self._horizon.until <= self._rounds_here() or not self._threads:
            return False
        return self._has_room() or any(part.earliest <= seq for part in self._reading.values())

    def _rounds_here(self) -> float:
        """Return the rounds whose rows are here."""
        return next((part.rounds_before for part in self._reading.values()), self._rounds)

    def find(self, keys: Keys) -> tuple[Slots, RowBytes] | None:
        """Return the slot of each key's row, -1 where it is not here, and the slots' rows. None: there is no
        row here."""
        rows = self._rows
        return None if rows is None or not len(rows) else (rows.find(keys), rows.rows)

    def take(self, keys: Keys) -> tuple[Slots, RowBytes] | None:
        """Return what :meth:`find` does. The rows are not here any more, but their memory is theirs until the
        next :meth:`lookup_filled` or :meth:`take`."""
        rows = self._rows
        self._taken = None if rows is None or not len(rows) else keys
        return None if rows is None or self._taken is None else (rows.take(keys), rows.rows)

    def lookup_filled(self, keys: Keys, stored: int) -> None:
        """Drop the rows of ``keys``, which a lookup lacked: they are in the fast tier now. The store had
        ``stored`` of them."""
        if self._rows is not None:
            self._rows.release()
            if keys is not self._taken:  # a tier above had some of them
                self._rows.discard(keys)
        self._taken = None
        self._horizon.lookup_filled(stored)
        self._changed.notify_all()

    # -- the threads ----------------------------------------------------------------------

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
        else:
            return
        with self._changed:
            self._threads.discard(threading.current_thread())
            self.forget()
            self._failure = failure or self._failure

    def _read_next(self) -> bool:
        """Read the next part of a round when it is due. Return False when no lookup is announced any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or bool(self._incoming) or self._is_due())
            if self._is_over():
                self._threads.discard(threading.current_thread())  # the next announcement starts another one
                self._changed.notify_all()
                return False
        with self._choosing:
            part = self._next_part()
        if part is None:
            return True
        found = self._store.read(part.keys, part.rows.rows, part.slots)
        with self._changed:
            self._reading.pop(threading.current_thread(), None)
            part.rows.finish(part.slots, found)
            self._changed.notify_all()
        return True

    def _next_part(self) -> _Part | None:
        """Add the rows that were queued, and go on in the round. Return what to read, or None."""
        with self._changed:
            incoming, self._incoming, sweep = self._incoming, [], self._sweep
        for keys, next_use in incoming:
            sweep.add(keys, self._store.places(keys), next_use)
        with self._changed:
            if sweep is not self._sweep:
                return None  # the window was forgotten
            self._note()
            if self._incoming or not self._is_due():
                return None
            part = self._choose(self._held())
            self._note()
            if not len(part.keys):
                return None
            self._reading[threading.current_thread()] = part
            return part

    def _is_over(self) -> bool:
        all_begun = self._horizon.last_announced <= self._horizon.last_begun and not self._is_awaited()
        return self._closed or (all_begun and not self._incoming)

    def _note(self) -> None:
        self._entries, self._rounds = len(self._sweep), self._sweep.rounds
        self._changed.notify_all()  # a plan may have waited for that, or find that there is no room now

    def _room(self) -> int:
        here = 0 if self._rows is None else len(self._rows)
        return self.max_rows - here - int(self.max_rows * _RESERVE)

    def _is_due(self) -> bool:
        """Return whether to read now: a part of a round is due, and there is room for its rows."""
        return self._way() > 0 and self._has_room()

    def _way(self) -> float:
        """Return the part of a round to go now: what is due, or a little of what will be due soon."""
        left = self._horizon.due - self._rounds
        if left > 0 and (self._waits or left >= 1 / _PARTS):
            return left
        roomy = self._room() >= self.max_rows * _ROOMY and self._horizon.due > 0
        return 1 / _PARTS if roomy and left + _EARLY >= 1 / _PARTS else 0.0

    def _has_room(self) -> bool:
        return self._room() >= min(self._entries, max(1, self.max_rows // _PARTS))

    def _choose(self, rows: _core.HeldRows) -> _Part:
        horizon, rounds_before = self._horizon, self._rounds
        first = horizon.last_begun + (not (self._waits or self._is_awaited()))
        limit = min(self._room(), _MOST_AT_ONCE)
        keys, earliest = self._sweep.next(self._way(), limit, first, horizon.end)
        if len(keys):
            keys = keys[~self._resident(keys)]
        keys, slots = rows.begin(keys)
        return _Part(keys, rows, slots, earliest, rounds_before)

    def close(self) -> None:
        """End the threads. Call it before the store is closed."""
        with self._changed:
            self._closed = True
            self.forget()
            threads = list(self._threads)
        for thread in threads:
            thread.join()
