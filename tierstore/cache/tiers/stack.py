"""Walks down a list of tiers: finds rows, and demotes the rows that leave a tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from tierstore.cache.tiers.codec import Codec, converted
from tierstore.cache.tiers.protocol import (
    NEVER,
    Flags,
    FoundRows,
    Keys,
    LastingTier,
    MovingRows,
    RowBytes,
    Tier,
)
from tierstore.errors import TierFullError


class TierStack:
    """The tiers of a group, the fastest first; see :mod:`tierstore.cache.tiers.protocol` for their order.

    The caller of a method holds the group's residency lock, except for :meth:`wait` and :meth:`close`.
    """

    def __init__(self, name: str, tiers: Sequence[Tier]) -> None:
        self.name = name
        self.tiers = list(tiers)
        self.lower = self.tiers[1:]
        self.exclusive = [tier for tier in tiers if tier.exclusive]
        lasting = self.tiers[len(self.exclusive) :]
        if [tier.exclusive for tier in lasting] != [False] * len(lasting):
            raise ValueError(f"{name}: an exclusive tier is below a lasting one: {[t.name for t in tiers]}")
        self.lasting: list[LastingTier] = lasting  # type: ignore[assignment]  # what is not exclusive lasts

    def find(self, keys: Keys) -> Iterator[FoundRows]:
        """Yield, tier by tier, the rows of ``keys`` that it has and no tier before it has. A tier is asked
        when its turn comes."""
        for tier in self.tiers:
            found = tier.find(keys)
            yield found
            keys = keys[~found.here]

    def window_rows(self) -> float:
        """Return the distinct rows in the window from which on a longer window brings no tier anything."""
        return max(tier.window_rows for tier in self.tiers)

    def threads(self) -> list[int] | None:
        """Return the threads that the tiers start by themselves; None before all are started."""
        of_tiers = [tier.threads for tier in self.tiers]
        if any(threads is None for threads in of_tiers):
            return None
        return [thread for threads in of_tiers if threads is not None for thread in threads]

    def window_bytes(self, rows: int) -> int:
        """Return the bytes that an automatic window of ``rows`` distinct rows may take of the memory for rows
        read ahead."""
        return sum(tier.window_bytes(rows) for tier in self.tiers)

    def grant_window(self, size: int) -> None:
        """Leave ``size`` bytes of the memory for rows read ahead to the window, until it is forgotten."""
        for tier in self.tiers:
            tier.grant_window(size)

    def set_read_ahead(self, size: int) -> None:
        """Let rows read ahead, and the window's part of their memory, take ``size`` bytes from now on."""
        for tier in self.tiers:
            tier.set_read_ahead(size)

    # -- rows that move ------------------------------------------------------------------------

    def collect(self, missing: Keys) -> list[FoundRows]:
        """Return the rows of ``missing`` that each tier under the first has; the rows leave exclusive
        tiers."""
        every = []
        for tier in self.lower:
            every.append(tier.promote(missing))
            missing = missing[~every[-1].here]
        for tier, found in zip(self.lower, every, strict=True):
            tier.take(found)  # take comes last, since nothing can fail any more
        return every

    def restore(self, every: Sequence[FoundRows], missing: Keys, seq: int) -> None:
        """Put collected rows back; exclusive tiers have room, since the rows were just taken out of them."""
        for level, found in enumerate(every, start=1):
            if self.tiers[level].exclusive and found.here.any():
                assert found.dirty is not None
                rows = found.pieces[0][1] if found.promoted is None else found.promoted.copied()
                never = np.full(len(rows), NEVER)
                moving = MovingRows(missing[found.here], rows, found.dirty, never, found.codec)
                self.demote(level, seq, moving)
            missing = missing[~found.here]

    def demote(self, level: int, seq: int, *parts: MovingRows) -> None:
        """Hand rows, which have left the tiers above and are in no other tier, to tier number ``level``.

        Raises ``TierFullError`` if the list ends here and a row was updated.
        """
        if level == len(self.tiers):
            if any(part.dirty.any() for part in parts):
                raise self._full()
            return  # rows that were never updated have their initial values
        tier = self.tiers[level]
        parts = tuple(
            (part if part.at is None or tier.takes(part.at.rows) else part.copied()).converted(tier.codec)
            for part in parts
        )
        # Of two calls the second could fail, and rows of the first be in two exclusive tiers.
        if tier.exclusive and len(parts) > 1:
            parts = (MovingRows.joined(parts),)
        for part in parts:
            tier.put(part, seq, partial(self.demote, level + 1, seq))

    def _full(self) -> TierFullError:
        names = " or ".join(tier.name for tier in self.tiers)
        return TierFullError(
            f"{self.name}: the memory tiers are full and there is no store below; raise {names}, or set ssd"
        )

    def flush(self) -> None:
        """Write every dirty row to the first lasting tier; rows stay where they are."""
        lasting = self.lasting[0]
        for tier in self.exclusive:
            tier.flush(partial(_write, lasting, tier.leaving))

    # -- rows that stay -------------------------------------------------------------------------

    def resident(self, keys: Keys) -> Flags:
        """Return which of ``keys`` an exclusive tier has."""
        return resident(self.exclusive, keys)

    def resident_keys(self, table: int) -> Keys:
        """Return the keys of ``table`` that an exclusive tier has, each once."""
        parts = [keys for tier in self.exclusive for keys in tier.keys(table)]
        return np.concatenate([np.empty(0, np.uint64), *parts])

    def dirty_rows(self) -> int:
        """Return how many rows no lasting tier has in their version."""
        return sum(tier.dirty_rows() for tier in self.exclusive)

    # -- the window ------------------------------------------------------------------------------

    def announce(self, keys: Keys, next_use: int, now: int) -> None:
        """Tell the tiers which lookup uses ``keys`` next; a tier passes on the keys that a lower tier has to
        learn of."""
        for tier in self.tiers:
            keys = tier.announce(keys, next_use, now)

    def forget(self, keys: Keys, now: int) -> None:
        """Tell the tiers that no lookup is announced any more, and that ``keys`` were of such lookups: all
        tiers, also if one of them raises."""
        failure: BaseException | None = None
        for tier in self.tiers:
            try:
                keys = tier.announce(keys, NEVER, now)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def begin_lookup(self, seq: int) -> None:
        """Tell the tiers that lookup ``seq`` is being planned."""
        for tier in self.lower:
            tier.begin_lookup(seq)

    def wait(self, seq: int) -> None:
        """Wait until no tier is reading for lookup ``seq``."""
        for tier in self.lower:
            tier.wait(seq)

    def end_lookup(self, seq: int, keys: Keys) -> None:
        """Tell the tiers that lookup ``seq`` has its rows, of which ``keys`` were missing in the first."""
        for tier in self.lower:
            tier.end_lookup(seq, keys)

    def close(self) -> None:
        """End the threads of the tiers: of all, also if one of them raises."""
        with ExitStack() as closing:
            for tier in reversed(self.tiers):
                closing.callback(tier.close)


def _write(tier: LastingTier, form: Codec | None, keys: Keys, rows: RowBytes) -> None:
    """Write rows, which are in the form ``form``."""
    tier.write(keys, converted(keys, rows, form, tier.codec))


def resident(tiers: Sequence[Tier], keys: Keys) -> Flags:
    """Return which of ``keys`` one of ``tiers`` has."""
    here = np.zeros(len(keys), bool)
    for tier in tiers:
        left = np.flatnonzero(~here)
        here[left] = tier.holds(keys[left])
    return here
