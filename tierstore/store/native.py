"""The ``native`` engine: our own log-structured store (csrc/store), made for embedding rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore import _core
from tierstore.config import INDEX_NAMES
from tierstore.errors import ConfigError, InputError
from tierstore.store.base import RowSizes, check_commit
from tierstore.store.commits import check_droppable, find_commit
from tierstore.store.protocol import CommitId, CommitInfo, RowBatch, StoredTable, StoreStats
from tierstore.store.registry import StoreOptions

_KEYS_PER_CHUNK = 1 << 16


@dataclass(frozen=True)
class NativeLimits:
    """Bounds of the core, at most as here. Tests make the bounds small, to reach them."""

    chunk_bytes: int = 2 << 20
    """Bytes that are written at once; at least a frame of rows."""
    locations: int = (1 << 40) - 3
    """The largest number of row versions of one size."""
    slot_bits: int = 0
    """Bits of a location that number the slot of a segment, at least."""
    small_segment_bytes: int = 64 << 20
    """The size that segments take with the cap alone. Larger ones also need as much in use."""
    keys_at_once: int = 1 << 24
    """Keys of one call of ``read`` that are sorted by place together."""
    replay_rows: int = 1 << 27
    """Rows that are written, or a quarter of all rows, until a commit saves the index."""
    manifest_bytes: int = 1 << 30
    range_bits: int = 16
    """Ids of a dense range of the index: 2 to this power, 6 at least."""


@dataclass(frozen=True)
class NativeConfig:
    """Options of the native store. ``StoreOptions`` gives the first two; other defaults suit most users."""

    cap_bytes: int
    """Hard cap on the bytes of all its files."""
    io: str = "auto"
    """"uring" (io_uring), "pread" (threads), or "auto": io_uring where the kernel allows it."""
    keep: int = 1
    """Commits without a tag to keep; a new commit drops the oldest beyond that. Rows of a kept commit stay on
    disk."""
    at: int | str = 0
    """Commit to open at, by number or tag; 0 for the last commit."""
    read_only: bool = False
    """Change nothing on disk; writing is an error."""
    queue_depth: int = 128
    """Reads in flight on each device with "uring"; "pread" has at most 32 threads for each."""
    direct: bool = True
    """Bypass the page cache where the file system can."""
    segment_bytes: int = 0
    """The most bytes of a segment file. 0 chooses by the cap, from 128 KiB to 64 MiB, and to 1 GiB in a store
    that has more than 8 GiB in use."""
    write_buffer_bytes: int = 16 << 20
    """Bytes of memory in which rows wait to be written, for each device, besides a buffer of 2 MiB per open
    segment."""

    snapshot_min_rows: int = 1 << 17
    """The smallest number of rows for which the index is saved beside the data; smaller stores open fast
    without it."""
    index: str = "auto"
    """How the index finds rows: "hash", "compact" (ranges of ids of which many are stored take an array in
    place of hash entries), or "auto": compact for tables of 65,536 stored rows or more."""
    limits: NativeLimits | None = None
    """None: the limits of the core."""

    def __post_init__(self) -> None:
        if self.io not in ("auto", "uring", "pread"):
            raise ConfigError(f"io is {self.io!r}; it must be 'auto', 'uring' or 'pread'")
        if self.index not in INDEX_NAMES:
            raise ConfigError(f"index is {self.index!r}; it must be 'auto', 'hash' or 'compact'")
        if self.keep < 1:
            raise ConfigError(f"keep is {self.keep}; a store keeps at least its last commit")
        if not 1 <= self.queue_depth <= 1024:
            raise ConfigError(f"queue_depth is {self.queue_depth}; it must be from 1 to 1024")
        for name in ("cap_bytes", "segment_bytes", "write_buffer_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")


def files_of(path: Path, further: Sequence[Path]) -> _core.Env:
    """Return the Env of a store in ``path`` that is spread over ``further`` folders, too."""
    if not further:
        return _core.posix_env(str(path))
    folders = [str(path), *(str(folder.absolute()) for folder in further)]
    return _core.StripedEnv([(_core.posix_env(folder), folder) for folder in folders])


def reads_per_second(path: Path, block_bytes: int, in_flight: int, seconds: float) -> float:
    """Measure random direct reads of ``block_bytes`` from a file, ``in_flight`` at a time, for ``seconds``.

    The store reads in the same way. Raises ``OSError``.
    """
    return _core.probe_reads(str(path), block_bytes, in_flight, seconds)


class NativeStore:
    """A :class:`~tierstore.store.protocol.RowStore` over segments of records and an index in memory.

    ``path`` is a folder of its own that exists and is locked by the caller; ``options.further`` are such
    folders on further devices. Opening gives the last commit (or ``config.at``); rows written after it are
    gone. Calls may come from any thread. Calls exclude one another, except ``read``, which runs beside all
    calls. ``close`` interrupts calls. ``env`` is a test double of the file system.
    """

    engine = "native"
    spreads = True

    def __init__(
        self,
        path: Path,
        tables: Sequence[StoredTable],
        options: StoreOptions | None = None,
        config: NativeConfig | None = None,
        env: _core.Env | None = None,
    ) -> None:
        if config is None:
            if options is None:
                raise ConfigError("NativeStore needs options or a config")
            config = NativeConfig(
                options.ssd_bytes,
                options.io,
                options.keep,
                options.at,
                options.read_only,
                index=options.index,
            )
        self._files: _core.Env | None = None
        if env is None:
            path = path.absolute()  # the Env looks up names in the folder long after this
            env = self._files = files_of(path, () if options is None else options.further)
        if config.read_only:
            env = _core.ReadOnlyEnv(env)
        if config.at:
            kept = [CommitInfo(*fields) for fields in _core.kept_commits(str(path), env)]
            config = replace(config, at=find_commit(kept, config.at, path).id)
        self._path = path
        self._sizes = RowSizes(tables)
        row_sizes = [(spec.index, spec.row_bytes) for spec in tables]
        self._core = _core.NativeStore(str(path), config, row_sizes, env)

    def read(
        self, keys: NDArray[np.uint64], out: NDArray[np.uint8], slots: NDArray[np.int32] | None = None
    ) -> NDArray[np.bool_]:
        self._sizes.check(keys, out, "out", slots)
        if not out.flags.writeable:
            raise InputError("out must be writable")
        return self._core.read(keys, out, slots)

    def places(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the rows' locations, which follow one another in the segments' files."""
        self._sizes.check_keys(keys)
        return self._core.places(keys)

    def write(
        self, keys: NDArray[np.uint64], rows: NDArray[np.uint8], slots: NDArray[np.int32] | None = None
    ) -> None:
        self._sizes.check(keys, rows, "rows", slots)
        self._core.write(keys, rows, slots)

    def keys(self, table: int) -> Iterator[NDArray[np.uint64]]:
        self._sizes.of_table(table)
        return self._list_keys(table)

    def count(self, table: int) -> int:
        self._sizes.of_table(table)
        return self._core.count(table)

    def scan(self, tables: Sequence[int] | None = None) -> Iterator[RowBatch]:
        """Yield rows in the order of the segments' files; rows that are first stored later do not come."""
        return self._scan(self._core.scan(self._sizes.chosen(tables)))

    def reserve(self, table: int, rows: int) -> None:
        self._core.reserve(table, self._sizes.of_table(table), rows)

    def commit(self, meta: bytes = b"", tag: str | None = None) -> CommitId:
        check_commit(meta, tag)
        return self._core.commit(meta, tag or "")

    def commits(self) -> list[CommitInfo]:
        return [CommitInfo(*fields) for fields in self._core.commits()]

    def drop_commit(self, id: CommitId) -> None:
        check_droppable(self.commits(), id, self._path)
        self._core.drop_commit(id)

    def compact(self) -> None:
        """Win back the space of superseded rows, as far as kept commits and the cap allow it."""
        self._core.compact()

    def set_cap(self, cap_bytes: int) -> None:
        """Set the cap on the bytes of all files. A store that was full goes on under a higher cap."""
        self._core.set_cap(cap_bytes)

    def meta(self) -> bytes:
        return self._core.meta()

    def counters(self) -> _core.StoreCounters:
        """Return all counters of the core, also the counters that :class:`StoreStats` lacks."""
        return self._core.stats()

    def stats(self) -> StoreStats:
        counters = self._core.stats()
        return StoreStats(
            engine=self.engine,
            rows=counters["rows"],
            disk_bytes=counters["disk_bytes"],
            live_bytes=counters["live_bytes"],
            index_bytes=counters["index_bytes"] + counters["buffer_bytes"],
            read_rows=counters["read_rows"],
            read_bytes=counters["read_bytes"],
            read_requests=counters["read_requests"],
            written_rows=counters["written_rows"],
            written_bytes=counters["written_bytes"],
            io=counters["io"],
        )

    def close(self) -> None:
        self._core.close()
        if self._files is not None:
            self._files.close()

    def __enter__(self) -> NativeStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _list_keys(self, table: int) -> Iterator[NDArray[np.uint64]]:
        keys, more = _core.NativeKeys(table), True
        while more:
            chunk, more = self._core.next_keys(keys, _KEYS_PER_CHUNK)
            if len(chunk):
                yield chunk

    def _scan(self, scan: _core.NativeScan) -> Iterator[RowBatch]:
        while batches := self._core.next_rows(scan):
            yield from batches
