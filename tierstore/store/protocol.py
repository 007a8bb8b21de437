"""The contract between memory tiers and the bottom tier: what a row store of any engine does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import ConfigError
from tierstore.keys import MAX_ID, MAX_TABLE
from tierstore.row_format import RowFormat


@dataclass(frozen=True)
class StoredTable:
    """What a store must know of a table. All fields are part of the identity of a store directory.

    ``optimizer`` and ``init`` hold plain JSON values (str, int, float, bool, None, and lists or dicts of
    them) that identify the optimizer's state layout and the rule of the initial values. Learning rate and
    other numbers that may change during training do not belong there.
    """

    name: str
    index: int
    """Position of the table in keys, 0 ≤ index < 65 536; unique within a store."""
    num_embeddings: int
    embedding_dim: int
    row_bytes: int
    """Bytes of one record: weights, optimizer state and padding; a multiple of 16."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    init: Mapping[str, Any] = field(default_factory=dict)
    weight_dtype: str = "fp32"
    """How a record holds weights and state: dtypes of :class:`tierstore.row_format.RowFormat`."""
    state_dtype: str = "fp32"

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a table needs a name")
        if not 0 <= self.index <= MAX_TABLE:
            raise ConfigError(f"table {self.name!r}: index {self.index} is not in [0, {MAX_TABLE}]")
        whole = isinstance(self.num_embeddings, int)
        if not whole or not 1 <= self.num_embeddings <= MAX_ID + 1:
            raise ConfigError(
                f"table {self.name!r}: num_embeddings {self.num_embeddings!r} is not an integer in [1, 2**48]"
            )
        if self.embedding_dim < 1:
            raise ConfigError(f"table {self.name!r}: embedding_dim {self.embedding_dim} must be at least 1")
        if self.row_bytes % 16 or self.row_bytes < self.format.row_bytes(self.embedding_dim, 0):
            raise ConfigError(
                f"table {self.name!r}: row_bytes {self.row_bytes} must be a multiple of 16 that holds "
                f"{self.embedding_dim} {self.weight_dtype} weights"
            )

    @property
    def format(self) -> RowFormat:
        """Return the dtypes of a record."""
        return RowFormat(self.weight_dtype, self.state_dtype)

    def to_dict(self) -> dict[str, object]:
        """Return the fields as files keep them: without the dtypes of float32 rows."""
        described: dict[str, object] = asdict(self)
        if self.format.is_wide:
            del described["weight_dtype"], described["state_dtype"]
        return described


@dataclass(frozen=True)
class StoreStats:
    """Counters of one open store. The ``read_`` and ``written_`` counters begin at 0 when it is opened."""

    engine: str
    rows: int
    """Rows stored, committed or not, each once. Engines that cannot count cheaply estimate the number."""
    disk_bytes: int
    """Bytes that the engine's files occupy."""
    live_bytes: int
    """Bytes of the newest versions of all rows: rows times their row_bytes."""
    index_bytes: int
    """Memory that the engine holds for its index, buffers and caches, as far as the engine can tell."""
    read_rows: int
    """Rows found and returned by read()."""
    read_bytes: int
    """Bytes requested from the device; some engines count the bytes of the rows that they returned."""
    read_requests: int
    """Requests to the device; some engines count the keys that they looked up."""
    written_rows: int
    """Rows given to write()."""
    written_bytes: int
    """Bytes sent to the device, compaction included; some engines count the bytes of the rows."""
    io: str
    """How bytes are moved: "uring", "pread", "rocksdb", "mmap", "memory"."""


NOWHERE = int(np.iinfo(np.uint64).max)
"""The place of a row that is not stored."""

CommitId = int
"""The number of a commit: from 1 on, growing."""


RowBatch = tuple[NDArray[np.uint64], NDArray[np.uint8]]
"""Keys, uint64 (n,), and their rows, uint8 (n, row_bytes)."""


@dataclass(frozen=True)
class CommitInfo:
    """One kept commit."""

    id: CommitId
    tag: str
    """The commit's name for people; "" for none."""
    unix_nanoseconds: int
    """The time at which it was made."""
    meta: bytes


@runtime_checkable
class RowStore(Protocol):
    """Rows by key below the memory tiers.

    All keys of one call belong to tables of one row size. Calls come from one thread at a time, which may
    change; ``read`` and ``places`` of two other threads may run beside a call. ``close()`` may come from any
    thread at any time. After ``close()`` every method but ``close()`` raises ``ClosedError``. Errors of the
    device are ``StoreIOError`` or ``StoreFullError``, damaged data is ``StoreCorruptError``; each leaves the
    store usable, or closed; wrong bytes never return.
    """

    engine: str

    def read(
        self, keys: NDArray[np.uint64], out: NDArray[np.uint8], slots: NDArray[np.int32] | None = None
    ) -> NDArray[np.bool_]:
        """Copy the newest version of each row into ``out`` and tell which rows there are.

        ``keys`` is uint64 (n,) without repeats; ``out`` is uint8 (n, row_bytes), C-contiguous, writable.
        With ``slots``, int32 (n,) without repeats, row i goes to ``out[slots[i]]``, and ``out`` may have any
        number of rows. Returns bool (n,). Rows of ``out`` whose key is not stored have no defined content.
        """
        ...

    def places(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return numbers, uint64 (n,), in whose order the engine reads rows best; ``NOWHERE`` for rows that
        are certainly not stored.

        Rows whose places are near one another cost little together. A place is a hint: it changes when the
        row is written, and at other times.
        """
        ...

    def write(
        self, keys: NDArray[np.uint64], rows: NDArray[np.uint8], slots: NDArray[np.int32] | None = None
    ) -> None:
        """Store ``rows``, uint8 (n, row_bytes), under ``keys``, uint64 (n,) without repeats.

        With ``slots``, int32 (n,), row i is ``rows[slots[i]]``, and ``rows`` may have any number of rows.
        The newest version wins. :meth:`read` sees it at once; the next :meth:`commit` makes it durable. The
        arrays are free for reuse when the call returns.
        """
        ...

    def keys(self, table: int) -> Iterator[NDArray[np.uint64]]:
        """Yield the keys of all stored rows of ``table`` in chunks, each key once, in any order.

        The store must not be written to while the iterator is in use.
        """
        ...

    def count(self, table: int) -> int:
        """Return the number of stored rows of ``table``."""
        ...

    def scan(self, tables: Sequence[int] | None = None) -> Iterator[RowBatch]:
        """Yield all stored rows of ``tables`` (None: of all tables) in the order that the engine reads best.

        A batch is keys, uint64 (n,), and their rows, uint8 (n, row_bytes); batches have some megabytes, and
        rows of any tables of one row size. Each row that is stored at the call comes once, in a version
        that was the newest at some time during the scan. A row that is first stored later comes once or not
        at all. The store may be written to meanwhile, and several scans may be in use.
        """
        ...

    def reserve(self, table: int, rows: int) -> None:
        """Prepare an empty store for this many rows of ``table``, which are about to be written; a hint."""
        ...

    def commit(self, meta: bytes = b"", tag: str | None = None) -> CommitId:
        """Make everything written so far durable, together with ``meta``, and return the commit's number.

        A commit survives a crash whole or not at all: reopening gives the last commit, and nothing written
        after it. A ``tag`` has at most 100 printable ASCII characters without "/". A commit with a tag can be
        opened by the tag, and is kept until it is dropped. A commit without a tag goes when
        ``StoreOptions.keep`` newer commits are there.
        """
        ...

    def commits(self) -> list[CommitInfo]:
        """Return the kept commits, oldest first."""
        ...

    def drop_commit(self, id: CommitId) -> None:
        """Drop a kept commit and win back its space. Raises ``InputError`` for the newest or an unknown
        commit."""
        ...

    def compact(self) -> None:
        """Win back the space of superseded rows, as far as kept commits allow it. The call takes long."""
        ...

    def meta(self) -> bytes:
        """Return ``meta`` of the last commit; ``b""`` before the first."""
        ...

    def stats(self) -> StoreStats:
        """Return counts of rows, bytes and requests."""
        ...

    def close(self) -> None:
        """Release all resources, without a commit. A second call does nothing."""
        ...
