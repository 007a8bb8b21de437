"""Reading ahead: rows of coming lookups, read from the store many lookups at a time, by a thread of its own.

The store reads the rows of one call in the order of their places, neighbours in one request, so that many
lookups in one call cost a fraction of as many calls (``tierstore bench store``); and planning goes on
meanwhile. What is read ahead is what the store has: a row that is written to the store later is not to be had
here any more, and nobody asks for rows that a memory tier has.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import TierStoreError
from tierstore.store.protocol import RowStore

logger = logging.getLogger("tierstore")

Keys = NDArray[np.uint64]
Flags = NDArray[np.bool_]

_BLOCKS = 2  # one that plans take rows from, and one that is being read


@dataclass(eq=False)
class _Block:
    """Rows of the lookups up to number ``last``; ``valid``: which of them are as in the store."""

    last: int
    keys: Keys  # sorted
    rows: NDArray[np.uint8]
    valid: Flags

    def find(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions in ``keys`` of those that are here, and which rows they are."""
        at = np.searchsorted(self.keys, keys)
        at[at == len(self.keys)] = 0
        here = np.flatnonzero((self.keys[at] == keys) & self.valid[at])
        return here, at[here]


class ReadAhead:
    """Rows of one chain. Its methods are called with ``lock`` held, :meth:`wait` and :meth:`close` without.

    ``resident`` tells which keys some memory tier holds; ``max_bytes`` is what the rows may take.
    """

    def __init__(
        self,
        store: RowStore,
        row_bytes: int,
        max_bytes: int,
        lock: Any,
        resident: Callable[[Keys], Flags],
    ) -> None:
        self._store = store
        self._row_bytes = row_bytes
        self._block_rows = max_bytes // (_BLOCKS * row_bytes)
        self._resident = resident
        self._changed = threading.Condition(lock)
        self._queue: deque[tuple[int, Keys]] = deque()  # lookups to come, of which nothing was read yet
        self._blocks: list[_Block] = []
        self._spare: list[NDArray[np.uint8]] = []
        self._reading: range | None = None  # numbers of the lookups whose rows are being read
        self._written: list[Keys] = []  # since that began
        self._planned = -1
        self._generation = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    # -- what the chain tells -------------------------------------------------------------

    def announce(self, seq: int, keys: Keys) -> None:
        """Lookup ``seq`` will come and ask for ``keys``."""
        if self._closed or not len(keys):
            return
        self._queue.append((seq, keys))
        if self._thread is None:
            # It ends when nothing is announced any more, so it never keeps the tables alive.
            self._thread = threading.Thread(target=self._work, name="tierstore-read-ahead", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def planned(self, seq: int) -> None:
        """Lookup ``seq`` has its rows."""
        self._planned = max(self._planned, seq)
        for block in [block for block in self._blocks if block.last <= seq]:
            self._blocks.remove(block)
            if self._thread is not None:
                self._spare.append(block.rows)
        self._changed.notify_all()

    def written(self, keys: Keys) -> None:
        """The store gets other versions of these rows."""
        if self._reading is not None:
            self._written.append(keys)
        for block in self._blocks:
            block.valid[block.find(keys)[1]] = False

    def forget(self) -> None:
        """Lookups that were announced will not come."""
        self._generation += 1
        self._queue.clear()
        self._blocks.clear()
        self._spare.clear()
        self._changed.notify_all()

    def memory_bytes(self) -> int:
        held = [block.rows.nbytes + 9 * len(block.keys) for block in self._blocks]
        return sum(held) + sum(rows.nbytes for rows in self._spare)

    # -- taking rows ----------------------------------------------------------------------

    def wait(self, seq: int) -> None:
        """Until nothing is being read for lookup ``seq``."""
        with self._changed:
            self._changed.wait_for(lambda: self._reading is None or seq not in self._reading)

    def find(self, keys: Keys) -> list[tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]]:
        """Positions in ``keys`` of rows that are here, an array of rows, and which of its rows they are."""
        found = []
        for block in self._blocks:
            positions, source = block.find(keys)
            if len(positions):
                found.append((positions, block.rows, source))
        return found

    # -- the thread -----------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._queue or self._is_due())
                if self._closed or not self._queue:
                    self._thread = None
                    self._spare.clear()
                    return
                generation = self._generation
                lookups, keys = self._choose()
                if not len(keys):
                    continue
                rows = self._room(len(keys))
                self._reading, self._written = lookups, []
            try:
                found = self._store.read(keys, rows[: len(keys)])
            except TierStoreError as error:
                # Plans will ask again, and tell the user in the forward call.
                logger.debug("no reading ahead: %s", error)
                found = np.zeros(len(keys), bool)
            with self._changed:
                self._reading = None
                if generation == self._generation:
                    block = _Block(lookups.stop - 1, keys, rows, found)
                    if block.last > self._planned:
                        self._blocks.append(block)
                        for written in self._written:
                            found[block.find(written)[1]] = False
                self._written = []
                self._changed.notify_all()

    def _is_due(self) -> bool:
        """The more lookups in one read the better, as long as plans find as many in the block before it."""
        if len(self._blocks) >= _BLOCKS:
            return False
        return not self._blocks or len(self._queue) >= self._blocks[-1].last - self._planned

    def _choose(self) -> tuple[range, Keys]:
        """The next lookups, as many as a block has room for, and their keys that must be read, sorted."""
        first, last, room = -1, -1, self._block_rows
        chosen: list[Keys] = []
        while self._queue:
            seq, keys = self._queue[0]
            if seq > self._planned:
                missing = keys[~self._resident(keys)]
                if len(missing) <= room:
                    room -= len(missing)
                    chosen.append(missing)
                    first, last = (seq if first < 0 else first), seq
                elif chosen:
                    break
            self._queue.popleft()  # planned already, chosen, or more than a block: its plan reads for itself
        if not chosen:
            return range(0), np.empty(0, np.uint64)
        keys = np.unique(np.concatenate(chosen))
        for block in self._blocks:
            keys = np.delete(keys, block.find(keys)[0])
        return range(first, last + 1), keys

    def _room(self, rows: int) -> NDArray[np.uint8]:
        for spare in self._spare:
            if len(spare) >= rows:
                self._spare.remove(spare)
                return spare
        return np.empty((self._block_rows, self._row_bytes), np.uint8)

    def close(self) -> None:
        """Ends the thread; to be called before the store is closed."""
        with self._changed:
            self._closed = True
            self.forget()
            thread = self._thread
        if thread is not None:
            thread.join()
