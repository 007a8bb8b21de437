"""Defines a tier: one place in the list of places where the rows of a row layout live.

A tier group (:class:`tierstore.cache.group.TierGroup`) has a list of tiers, the fastest first; lookups walk
down the list. There are two kinds:

- An *exclusive* tier owns its rows: a row is in one exclusive tier at most, and leaves it when it moves.
- A *lasting* tier keeps what it was given: a row that moves up leaves a copy there, which is valid unless a
  tier above has the row. Lasting tiers come after all exclusive tiers; the first lasting tier gets the dirty
  rows.

A row is *dirty* when it was updated and no lasting tier has this version.

A tier holds rows in one *form*: float32, as the fast tier does (None), or encoded by a ``Codec``. Rows on
their way say which form they are in, and the list of tiers converts them where it has to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.cache.device import DeviceRows
from tierstore.cache.tiers.codec import Codec, converted

Slots = NDArray[np.int32]
Keys = NDArray[np.uint64]
Flags = NDArray[np.bool_]
RowBytes = NDArray[np.uint8]
"""Rows as bytes, (n, row_bytes of their form), C-contiguous."""
Piece = tuple[NDArray[np.int64], RowBytes, Slots | None]
"""Positions of asked keys (m,), rows, and the index in ``rows`` of each position's row (None: all rows, in
order)."""

NEVER = int(np.iinfo(np.int64).max)
"""The next use of a row that no announced lookup uses."""


class RowsAt(NamedTuple):
    """Float32 rows of a device at ``slots``, where they stay while they are on their way."""

    rows: DeviceRows
    slots: Slots

    def copied(self) -> RowBytes:
        """Return the rows in memory of the host."""
        out = _core.rows_array(len(self.slots), self.rows.row_bytes)
        self.rows.copy_out(self.slots, out)
        return out


@dataclass(frozen=True)
class FoundRows:
    """Copies of the rows that a tier has of n asked keys, valid until its next :meth:`Tier.find`.

    ``here``: (n,), which of the keys it has. ``dirty``: uint8, a flag per row found (None: all are clean).
    ``slots``: the rows' slots, if the tier needs them in ``take``. ``read_ahead``: how many rows were read
    ahead. ``codec``: the rows' form. ``promoted``: the rows found, in the place of pieces, on the device of
    the fast tier.
    """

    here: Flags
    pieces: list[Piece]
    dirty: NDArray[np.uint8] | None = None
    slots: Slots | None = None
    read_ahead: int = 0
    codec: Codec | None = None
    promoted: RowsAt | None = None


@dataclass(frozen=True)
class MovingRows:
    """Rows that leave a tier: keys (n,), rows (n, row_bytes), dirty flags uint8 (n,), the numbers of the
    lookups that use them next, int64 (n,), and the rows' form. ``at``: where the rows still are, in the place
    of ``rows``; only a tier that :meth:`Tier.takes` them gets such."""

    keys: Keys
    rows: RowBytes
    dirty: NDArray[np.uint8]
    next_use: NDArray[np.int64]
    codec: Codec | None = None
    at: RowsAt | None = None

    def part(self, which: Flags | Slots) -> MovingRows:
        """Return the rows that a NumPy index selects."""
        at = None if self.at is None else RowsAt(self.at.rows, self.at.slots[which])
        rows = self.rows[which] if at is None else self.rows
        return MovingRows(self.keys[which], rows, self.dirty[which], self.next_use[which], self.codec, at)

    def copied(self) -> MovingRows:
        """Return the rows in memory of the host."""
        return self if self.at is None else replace(self, rows=self.at.copied(), at=None)

    def source(self) -> tuple[RowBytes, Slots | None]:
        """Return an array of this machine's memory that has the rows, and their indices in it (None: all, in
        order)."""
        if self.at is None:
            return self.rows, None
        assert isinstance(self.at.rows, _core.HostRows)
        return self.at.rows.array, self.at.slots

    def converted(self, codec: Codec | None) -> MovingRows:
        """Return the rows in the form ``codec``."""
        if codec is self.codec:
            return self
        rows = converted(self.keys, self.copied().rows, self.codec, codec)
        return replace(self, rows=rows, codec=codec, at=None)

    @staticmethod
    def joined(parts: Sequence[MovingRows]) -> MovingRows:
        """Return the rows of all ``parts``, which have one form, in order."""
        return MovingRows(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.copied().rows for part in parts]),
            np.concatenate([part.dirty for part in parts]),
            np.concatenate([part.next_use for part in parts]),
            parts[0].codec,
        )


@dataclass(frozen=True)
class TierStats:
    """Sizes of a tier now, in bytes: memory that counts against its budget, buffers for rows on their way,
    and rows that are read ahead, with the bytes that they and the window may take now.

    ``tables``: figures of each table, by the table's index; may be empty.
    """

    memory_bytes: int = 0
    buffer_bytes: int = 0
    tables: Sequence[Mapping[str, object]] = ()
    read_ahead_bytes: int = 0
    read_ahead_limit: int = 0


class Tier(Protocol):
    """Rows of one row layout. The group holds its residency lock during every call but :meth:`wait`,
    :meth:`close` and, of lasting tiers, :meth:`keys`.

    Subclass it: methods with a body here have a default. Unless a method says otherwise, it may raise, and
    has changed nothing then. The call that needed it raises the error, and can be made again.
    """

    name: str
    """The tier's name in ``stats()`` and errors."""
    exclusive: bool
    """Whether the tier is exclusive (True) or lasting (False)."""
    uses_window: bool = False
    """Whether the tier remembers the next use of its rows, so that :meth:`put` passes the next use on with
    rows that leave."""
    codec: Codec | None = None
    """The form in which the tier holds rows: :meth:`find` gives rows in it, and :meth:`put` and ``write`` get
    rows in it."""
    leaving: Codec | None = None
    """The form of the rows that :meth:`flush` gives away."""

    @property
    def window_rows(self) -> float:
        """Distinct rows in the window from which on a longer window brings this tier nothing."""
        return 0.0

    def window_bytes(self, rows: int) -> int:
        """Return the bytes that an automatic window of ``rows`` distinct rows may take of this tier's memory
        for rows read ahead. The call raises nothing."""
        return 0

    def grant_window(self, size: int) -> None:
        """Leave ``size`` bytes of the memory for rows read ahead to the window, until it is forgotten. It
        raises nothing."""
        return

    def set_read_ahead(self, size: int) -> None:
        """Let rows read ahead, and the window's part of their memory, take ``size`` bytes from now on. It
        raises nothing."""
        return

    @property
    def threads(self) -> Sequence[int] | None:
        """The system's numbers of the threads that the tier starts by itself; None before it has started all.
        A thread has the niceness and the processors of the thread that starts it."""
        return ()

    @property
    def policy_seconds(self) -> float:
        """Seconds that the tier's policy has taken so far."""
        return 0.0

    # -- rows ----------------------------------------------------------------------------

    def find(self, keys: Keys) -> FoundRows:
        """Copy the rows of ``keys`` (n,), without repeats, that are here. Nothing changes."""
        ...

    def holds(self, keys: Keys) -> Flags:
        """Return which of ``keys`` are here. Nothing changes."""
        ...

    def promote(self, keys: Keys) -> FoundRows:
        """Return what :meth:`find` does, for rows that move to the fast tier: perhaps ``promoted``, where
        the rows need not pass through memory of the host."""
        return self.find(keys)

    def takes(self, rows: DeviceRows) -> bool:
        """Return whether :meth:`put` takes some of ``rows`` where they are (``MovingRows.at``). It raises
        nothing."""
        return False

    def take(self, found: FoundRows) -> None:
        """Let go of rows that were just found: they move up. Must not fail."""
        return

    def put(self, rows: MovingRows, seq: int, demote: Callable[..., None]) -> None:
        """Take rows that left the tier above while lookup ``seq`` was planned.

        Rows that find no room, and rows that make room, go to ``demote(*MovingRows)`` in one call. Everything
        that can fail, ``demote`` included, comes before the first change: if it raises, an exclusive tier is
        as it was, and a lasting tier may have stored some of the rows. Rows that were just taken out of an
        exclusive tier find room there again, and putting these rows back must not fail.
        """
        ...

    def flush(self, write: Callable[[Keys, RowBytes], None]) -> None:
        """Give every dirty row to ``write`` and mark it clean; it stays here. A row that changes meanwhile is
        dirty again, and so are rows whose ``write`` has raised."""
        return

    def keys(self, table: int | None = None, *, only_dirty: bool = False) -> Iterator[Keys]:
        """Yield the keys of rows that are here, each once, in chunks: of ``table``, or (exclusive tiers) of
        all."""
        ...

    def dirty_rows(self) -> int:
        """Return how many rows here are dirty."""
        return sum(len(keys) for keys in self.keys(only_dirty=True))

    def stats(self) -> TierStats:
        """Return the tier's sizes now."""
        return TierStats()

    # -- the window ------------------------------------------------------------------------

    def announce(self, keys: Keys, next_use: int, now: int) -> Keys:
        """Learn that lookup ``next_use`` is the first announced one that asks for ``keys``; ``now``: the
        newest planned lookup. Return the keys that a lower tier has to learn of. ``NEVER``: the window is
        forgotten, which must not fail. If it raises, the group forgets the window."""
        return keys

    def begin_lookup(self, seq: int) -> None:
        """Learn that lookup ``seq`` leaves the window: it is being planned. If it raises, the lookup
        fails."""
        return

    def wait(self, seq: int) -> None:
        """Wait until nothing is being read for lookup ``seq``. Called without the residency lock; raises what
        reading ahead has failed with, once."""
        return

    def end_lookup(self, seq: int, keys: Keys) -> None:
        """Learn that lookup ``seq`` has its rows; the rows of ``keys`` were missing in the fast tier. If it
        raises, the lookup fails, and these rows leave the fast tier again."""
        return

    def close(self) -> None:
        """End the tier's threads. Further calls do nothing. If it raises, the tier is closed all the same,
        and the group closes the further tiers."""
        return


class LastingTier(Tier, Protocol):
    """A tier that keeps what it is given."""

    def write(self, keys: Keys, rows: RowBytes) -> None:
        """Keep these versions of rows that may stay in the tiers above. If it raises, it may have kept some
        of them."""
        ...
