"""How many bytes reading ahead takes with ``TierConfig(read_ahead="auto")``, chosen while training.

A longer round brings more rows per request, so reading ahead takes the most that it may, or less where the
drives would have next to nothing less to do. A memory tier could have the bytes instead, and miss fewer rows.
But only its user can give it bytes. So where the drives would have least to do if a memory tier had some of
the bytes, the log says so. How many rows a batch lacks is counted, and the live curves say how many fewer it
would lack with more memory. All of that depends on the batches alone, so a training chooses the same sizes
whenever it is run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cache_policies.live import LiveCurves
from tierstore import _core
from tierstore.config import format_bytes
from tierstore.rounds import FILE_BYTES, Ahead, FloatArray

logger = logging.getLogger("tierstore")

_FIRST, _EVERY = 64, 1024  # lookups: sizes are chosen after the first, twice, four times … and every so many
_POINTS = 40  # sizes per curve


@dataclass(frozen=True)
class Bytes:
    """Bytes that a choice depends on. ``max_bytes``: the most that reading ahead may take. ``slot``: of one
    slot more of a memory tier. ``held``: of a row that is read ahead, its index included. ``record``: of a
    row in the store."""

    max_bytes: int
    slot: float
    held: float
    record: int


@dataclass(frozen=True)
class KnownAhead:
    """What a prefetch tells of its window: ``length`` in batches (None: automatic), ``batch_bytes`` of a
    batch, and the bytes that are the window's ``own``."""

    length: int | None
    batch_bytes: float
    own: float


class SizedGroup(Protocol):
    """The part of a tier group that is looked at."""

    name: str
    window: _core.Window
    curves: LiveCurves


class ReadAheadSize:
    """Chooses for one group. ``tables``: index and number of rows of those that share ``slots`` slots of
    memory tiers."""

    def __init__(self, tables: Sequence[tuple[int, int]], slots: int, sizes: Bytes) -> None:
        self._tables, self.slots, self._bytes = tables, slots, sizes
        self.now = sizes.max_bytes
        """Bytes that reading ahead may take now."""
        self.known: KnownAhead | None = None
        self.split: int | None = None
        """Bytes with which the drives would have least to do if a memory tier had the rest of the most."""
        self._lookups = 0
        self._next = _FIRST
        self._since = np.zeros(2)  # lookups since the last choice, and the rows that they lacked

    def lookup_done(self, group: SizedGroup, lacked: int) -> bool:
        """Learn that a lookup has got ``lacked`` rows from the store. Return whether ``now`` has changed."""
        self._lookups += 1
        self._since += 1, lacked
        if self._lookups < self._next:
            return False
        self._next += min(self._lookups, _EVERY)
        lacking, before = float(self._since[1] / self._since[0]), self.now
        self._since[:] = 0
        if self.known is None or lacking <= 0 or group.window.lookups < 2:
            return False
        self.now, split = self._choose(group, self.known, lacking)
        if self.now != before:
            logger.info(
                "%s: rows read ahead may take %s from now on (before: %s; at most %s): a batch lacks %.0f "
                "rows, and with more the drives would have next to nothing less to do",
                group.name, *map(format_bytes, (self.now, before, self._bytes.max_bytes)), lacking,
            )  # fmt: skip
        if split != self.split and split < self.now:
            logger.info(
                "%s: the drives would have less to do if rows read ahead had %s and a memory tier %s more: "
                "give the tier (hbm or uvm) these bytes, and read_ahead the others",
                group.name, *map(format_bytes, (split, self._bytes.max_bytes - split)),
            )  # fmt: skip
        self.split = split
        return self.now != before

    def _choose(self, group: SizedGroup, known: KnownAhead, lacking: float) -> tuple[int, int]:
        """Return the bytes to take, and those that would save the drives most if a memory tier had the
        rest."""
        sizes, every = self._bytes, sum(rows for _, rows in self._tables)
        unique = sum(group.curves.per_batch(index)[0] for index, _ in self._tables)
        lookups, distinct = group.window.lookups, group.window.distinct_rows
        ahead = Ahead(
            batch_bytes=known.batch_bytes,
            unique=np.array([unique]),
            unique_of_many=np.array([max(unique, distinct)]),
            rows=np.array([max(every, unique)]),
            held_bytes=np.array([sizes.held]),
            read_ahead=sizes.max_bytes,
            many=lookups,
            own=known.own,
        )
        rows, misses = joint_curve(group.curves, self._tables)

        def lacked(more: float) -> float:
            now, then = np.interp([self.slots, self.slots + more / sizes.slot], rows, misses)
            return lacking * float(then / now) if now > 0 else lacking

        stored = sizes.record, FILE_BYTES * sizes.record * every
        least = ahead.best(known.length, lambda _: lacking, stored)
        return least, ahead.best(known.length, lacked, stored, self.split)


def joint_curve(curves: LiveCurves, tables: Sequence[tuple[int, int]]) -> tuple[FloatArray, FloatArray]:
    """Return sizes, in rows, and the misses per batch of tables that share a memory of that size.

    The tables keep their rows for about as many batches each. A table that keeps c rows asks for m(c) other
    rows per batch, so c grows by m(c) per batch (Denning and Schwartz, "Properties of the working-set model",
    CACM 1972). So sizes are added up that are reached in the same number of batches.
    """
    each = [_of_table(curves, index, rows) for index, rows in tables]
    times = np.unique(np.concatenate([time for time, _, _ in each]))
    sizes = sum((np.interp(times, time, size) for time, size, _ in each), np.zeros(len(times)))
    misses = sum((np.interp(times, time, missed) for time, _, missed in each), np.zeros(len(times)))
    return sizes, misses


def _of_table(curves: LiveCurves, index: int, rows: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return numbers of batches, and the rows that a table alone keeps and misses then."""
    unique, _ = curves.per_batch(index)
    sizes = np.unique(np.append(0, np.geomspace(1, max(1, rows), _POINTS).round()))
    missed = unique * curves.curve(index).unique_miss_ratio(sizes.astype(np.int64))
    times = np.diff(sizes) / np.maximum((missed[1:] + missed[:-1]) / 2, 1e-9)
    return np.append(0.0, np.cumsum(times)), sizes, missed
