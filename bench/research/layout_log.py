"""The log of the native store, without bytes: where each row lies, what compaction moves, what reads cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tierstore.rounds import MERGED_READ_BYTES, record_bytes

BLOCK = 4096
_CHUNK = 2 << 20  # bytes that are written together
_MOST_SEGMENT = 64 << 20
_FILE = 1 << 40  # distance of two segments' offsets: no request goes from one to the next

Locations = NDArray[np.int64]
Key = Callable[[NDArray[np.int32]], NDArray[np.int64]]


@dataclass(frozen=True)
class Geometry:
    """Places of records: frames of whole records (csrc/store/format.h)."""

    record: int
    frame: int
    per_frame: int

    @classmethod
    def of(cls, row_bytes: int) -> Geometry:
        record, frame = record_bytes(row_bytes), BLOCK
        while frame < 1 << 20 and frame % record * 50 > frame:
            frame *= 2
        return cls(record, frame, frame // record)

    def offsets(self, slots: Locations) -> Locations:
        return BLOCK + slots // self.per_frame * self.frame + slots % self.per_frame * self.record

    def segment_slots(self, cap: float) -> int:
        """Return the slots of a segment of a store with a cap of so many bytes."""
        most = int(min(_MOST_SEGMENT, max(128 << 10, cap // 128)))
        slots = (most - BLOCK) // self.frame * self.per_frame
        if most == _MOST_SEGMENT:
            slots = (1 << slots.bit_length() - 1) // self.per_frame * self.per_frame
        return slots


@njit  # type: ignore[untyped-decorator]
def merged(begins: Locations, ends: Locations, gap: int) -> tuple[int, int]:
    """Return the requests for records in these blocks, in their order, and the bytes of the requests."""
    requests, size, start, end = 0, 0, 0, 0
    for i in range(len(begins)):
        if requests and begins[i] <= end + gap and ends[i] - start <= MERGED_READ_BYTES:
            size += max(0, ends[i] - end)
            end = max(end, ends[i])
            continue
        requests, start, end = requests + 1, begins[i], ends[i]
        size += end - start
    return requests, size


@dataclass
class Counts:
    requests: int = 0
    bytes: int = 0
    read: int = 0
    written: int = 0
    copied: int = 0
    compacted: int = 0  # bytes of the segments that were copied from


class Log:
    """``rows`` rows, all written once in their order. A location is segment * slots + slot.

    ``cap``: bytes of the store per byte of rows. A commit follows every plan, so that no commit keeps
    superseded rows. ``tolerated``: superseded rows per row that compaction leaves, beside two segments (as
    csrc/store/space.cc has it). ``copy_key``: the order of the rows that compaction copies from a segment
    (None: as they lie). ``copy_stream``: the stream of each copied row.
    """

    def __init__(self, rows: int, geometry: Geometry, cap: float, gap: int) -> None:
        self.geometry, self.gap, self.counts = geometry, gap, Counts()
        size = rows * geometry.record
        self.slots = geometry.segment_slots(cap * size)
        self.tolerated = min(1.0, max(0.25, cap / 2 - 1))
        self.place = np.full(rows, -1, np.int64)
        self.row_at = np.full(0, -1, np.int32)
        self._live = np.zeros(0, np.int64)
        self._sealed = np.zeros(0, bool)
        self._fill: dict[int, tuple[int, int]] = {}  # by stream: open segment, slots in use
        self.moved: list[tuple[NDArray[np.int32], Locations]] = []  # rows copied, and where they lay
        self.copy_key: Key | None = None
        self.copy_stream: Key | None = None
        self.append(np.arange(rows, dtype=np.int32))
        self.counts = Counts()

    @property
    def used(self) -> int:
        """Return the first location behind all segments that ever were."""
        return len(self.row_at)

    def append(self, rows: NDArray[np.int32], stream: int = 0) -> None:
        """Write rows, each once, in this order."""
        self.counts.written += len(rows)
        self._append(rows, stream)

    def _append(self, rows: NDArray[np.int32], stream: int) -> None:
        self._supersede(self.place[rows])
        while len(rows):
            segment, filled = self._fill.get(stream) or (self._new_segment(), 0)
            part, rows = rows[: self.slots - filled], rows[self.slots - filled :]
            at = segment * self.slots + filled + np.arange(len(part))
            self.row_at[at], self.place[part] = part, at
            self._live[segment] += len(part)
            self._fill[stream] = segment, filled + len(part)
            if filled + len(part) == self.slots:
                self._sealed[segment] = True
                del self._fill[stream]

    def _supersede(self, old: Locations) -> None:
        old = old[old >= 0]
        self.row_at[old] = -1
        lost = np.bincount(old // self.slots, minlength=len(self._live))
        self._live -= lost
        self._sealed[(self._live == 0) & (lost > 0)] = False  # removed; open segments are not sealed either

    def _new_segment(self) -> int:
        busy = self._sealed.copy()
        busy[[segment for segment, _ in self._fill.values()]] = True
        if busy.all():
            self.row_at = np.append(self.row_at, np.full(self.slots, -1, np.int32))
            self._live, self._sealed = np.append(self._live, 0), np.append(self._sealed, False)
            return len(busy)
        return int(np.argmin(busy))

    def compact(self) -> None:
        """Copy rows out of the sparsest segments while there are more dead ones than are tolerated."""
        most = self.tolerated * len(self.place) + 2 * self.slots
        while int((self.slots - self._live[self._sealed]).sum()) > most:
            sealed = np.flatnonzero(self._sealed)
            victim = sealed[np.argmin(self._live[sealed])]
            if self._live[victim] > 0.9 * self.slots:
                return
            self._copy(slice(victim * self.slots, (victim + 1) * self.slots))

    def _copy(self, segment: slice) -> None:
        rows = self.row_at[segment]
        rows = rows[rows >= 0]
        self.moved.append((rows, self.place[rows]))
        self.counts.copied += len(rows)
        self.counts.compacted += self.slots // self.geometry.per_frame * self.geometry.frame
        if self.copy_key is not None:
            rows = rows[np.argsort(self.copy_key(rows), kind="stable")]
        streams = np.zeros(len(rows), np.int64) if self.copy_stream is None else self.copy_stream(rows)
        for stream in np.unique(streams).tolist():
            self._append(rows[streams == stream], -1 - stream)

    def read(self, rows: NDArray[np.int32]) -> None:
        """Read rows in one call."""
        self.counts.read += len(rows)
        at = np.sort(self.place[rows])
        segment, slot = at // self.slots, at % self.slots
        in_chunk = _CHUNK // self.geometry.frame * self.geometry.per_frame
        in_file = np.ones(len(at), bool)
        for open_segment, filled in self._fill.values():  # the open chunk is still in memory
            in_file &= (segment != open_segment) | (slot // in_chunk != filled // in_chunk)
        offsets = (segment * _FILE + self.geometry.offsets(slot))[in_file]
        ends = -(-(offsets + self.geometry.record) // BLOCK) * BLOCK
        requests, size = merged(offsets // BLOCK * BLOCK, ends, self.gap)
        self.counts.requests += requests
        self.counts.bytes += size
