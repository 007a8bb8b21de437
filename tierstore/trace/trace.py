"""Defines a trace: the rows of the tables that every batch uses, in order."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cache_policies.disk_cache import compiled
from cache_policies.hashing import mix
from tierstore.data.dataset import Batch
from tierstore.errors import InputError
from tierstore.keys import ID_BITS, MAX_ID, MAX_TABLE

#: The ids that one batch looks up in one table: (table index, int64 or uint64 ids in order, repeats
#: included).
TableIds = tuple[int, np.ndarray]
_MAPPED_ROWS = 1 << 22  # rows of a mapped file that are read before its pages are given back


@dataclass(frozen=True)
class Trace:
    """Batches of ids, read anew by every call of ``batches``.

    ``tables`` are names; ``num_embeddings`` rows per table where known (0 if not). ``num_batches`` is None
    where it is not known before reading. ``rate`` is the share of rows that was recorded (sampled by a hash
    of the key). ``training``: the examples themselves, as a training gets them, where there are any.
    """

    name: str
    tables: tuple[str, ...]
    batches: Callable[[], Iterator[Sequence[TableIds]]]
    num_batches: int | None = None
    num_embeddings: tuple[int, ...] = ()
    rate: float = 1.0
    training: Callable[[], Iterator[Batch]] | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.tables) <= MAX_TABLE + 1:
            raise InputError(f"{self.name}: a trace has 1 to {MAX_TABLE + 1} tables, not {len(self.tables)}")

    def key_batches(self, tables: Sequence[int] | None = None) -> Iterator[np.ndarray]:
        """Yield the uint64 keys (``table << 48 | id``) of each batch; of ``tables`` only, if given.

        Ids of 2^48 and more (hashes, in foreign traces) are hashed to 48 bits. InputError for negative ids.
        """
        chosen = range(len(self.tables)) if tables is None else tables
        for segments in self.batches():
            parts = [self._keys(table, ids) for table, ids in segments if table in chosen]
            yield np.concatenate(parts) if parts else np.empty(0, np.uint64)

    def id_batches(self) -> Iterator[list[np.ndarray]]:
        """Yield the ids of each batch by table (int64, as ``key_batches`` has them), empty where a table has
        none."""
        for segments in self.batches():
            found = [np.empty(0, np.int64) for _ in self.tables]
            for table, ids in segments:
                keys = self._keys(table, ids) & np.uint64(MAX_ID)
                found[table] = np.concatenate([found[table], keys.astype(np.int64)])
            yield found

    def _keys(self, table: int, ids: np.ndarray) -> np.ndarray:
        if ids.dtype.kind == "i" and ids.size and ids.min() < 0:
            raise InputError(
                f"{self.name}: id {ids.min()} of table {self.tables[table]!r}; ids must not be negative, so "
                "write hashes as unsigned integers"
            )
        return folded(ids) | np.uint64(table << ID_BITS)


def folded(ids: np.ndarray) -> np.ndarray:
    """Return ids as uint64 below 2^48: those of 2^48 and more are hashed. An int64 is taken for its bits."""
    ids = ids.astype(np.uint64)
    wide = ids > np.uint64(MAX_ID)
    if wide.any():
        ids[wide] = _hashed(ids[wide])
    return ids


@compiled
def _hashed(ids: np.ndarray) -> np.ndarray:
    out = np.empty_like(ids)
    for i in range(ids.size):
        out[i] = mix(ids[i]) >> np.uint64(64 - ID_BITS)
    return out


def in_batches(ids: Sequence[np.ndarray], batch_size: int) -> Callable[[], Iterator[list[TableIds]]]:
    """Cut columns of equal length, one per table, into batches of ``batch_size`` rows."""

    kept = max(1, _MAPPED_ROWS // batch_size) * batch_size

    def batches() -> Iterator[list[TableIds]]:
        for first in range(0, len(ids[0]), batch_size):
            if first and not first % kept:
                _forget_pages(ids)
            yield [
                (table, np.asarray(column[first : first + batch_size])) for table, column in enumerate(ids)
            ]

    return batches


def in_bags(
    columns: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int
) -> Callable[[], Iterator[list[TableIds]]]:
    """Cut columns into batches of ``batch_size`` examples. A column, one per table, has the ids of all
    examples, and where the ids of each example begin, (examples + 1,)."""
    examples = len(columns[0][1]) - 1

    def batches() -> Iterator[list[TableIds]]:
        for begin in range(0, examples, batch_size):
            end = min(begin + batch_size, examples)
            yield [(table, ids[ends[begin] : ends[end]]) for table, (ids, ends) in enumerate(columns)]

    return batches


def _forget_pages(columns: Sequence[np.ndarray]) -> None:
    """Forget pages of mapped files, which would count as memory of this process for as long as it runs."""
    for column in columns:
        if isinstance(column, np.memmap):
            column._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"batch size must be at least 1, not {batch_size}")
