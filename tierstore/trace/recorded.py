"""Recorded traces: an ``.npz`` that is written while training runs (docs/reference/traces.md).

Members: ``tierstore_trace.json`` (as bytes) names the format, the tables and the sampling rate; then for
every chunk of batches ``c`` the arrays ``ids/c`` (all ids, batch after batch, table after table, uint32 where
they fit, else uint64) and ``counts/c`` (uint32, batches by tables: how many ids of each). Chunks are appended
as they fill, so a truncated recording can be read up to its last chunk after ``zip -FF``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

from cache_policies.reuse import sampled
from tierstore.errors import ClosedError, InputError
from tierstore.keys import ID_BITS
from tierstore.sparse import KeyedJaggedTensor
from tierstore.threads import Thread
from tierstore.trace.damage import named_damage
from tierstore.trace.trace import TableIds, Trace, folded

HEADER = "tierstore_trace.json"
VERSION = 1
_CHUNK_IDS = 1 << 21
_NO_IDS = np.empty(0, np.int64)


class TraceRecorder:
    """Writes the ids of every batch to ``path``.

    ``tables`` maps names to rows (0: not known). ``rate`` below 1 keeps that share of the rows, chosen by a
    hash of table and id, with all of their uses (SHARDS): the recorded trace has the full trace's miss
    ratios, at caches ``rate`` times the size. Ids are copied by ``record``; a thread of low priority samples
    and writes. ``compress`` makes the file a fifth to a third smaller, and the thread's work ten times as
    much. The recorder is a context manager.
    """

    def __init__(
        self, path: str | Path, tables: Mapping[str, int], rate: float = 1.0, *, compress: bool = False
    ) -> None:
        if not 0 < rate <= 1:
            raise InputError(f"trace: rate must be above 0 and at most 1, not {rate}")
        if not tables:
            raise InputError("trace: give the tables to record")
        self.tables = tuple(tables)
        self.rate = rate
        self.batches = 0
        self._index = {name: i for i, name in enumerate(self.tables)}
        self._ids: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._held = 0
        self._queue: Queue[tuple[list[np.ndarray], list[np.ndarray]] | None] = Queue(maxsize=4)
        self._error: BaseException | None = None
        if Path(path).exists() and not Path(path).is_file():
            raise InputError(f"trace: {path} is no regular file; give another path")
        method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
        self._file = zipfile.ZipFile(path, "w", method, compresslevel=1)
        header = {"version": VERSION, "tables": dict(tables), "rate": rate}
        self._file.writestr(HEADER, json.dumps(header))
        self._thread: Thread | None = Thread(target=self._write, name="tierstore-trace", daemon=True)
        self._thread.start()

    def record(self, ids: Mapping[str, Any]) -> None:
        """Record one batch: table name → its ids (NumPy array or CPU tensor of integers, any shape)."""
        self._check()
        unknown = set(ids) - set(self._index)
        if unknown:
            raise InputError(f"trace: unknown tables {sorted(unknown)}; there are {list(self.tables)}")
        parts = [np.asarray(ids[name]).reshape(-1) if name in ids else _NO_IDS for name in self.tables]
        for name, part in zip(self.tables, parts, strict=True):
            if part.dtype.kind not in "iu":
                raise InputError(f"trace: ids of table {name!r} must be integers, not {part.dtype}")
            if part.dtype.kind == "i" and part.size and part.min() < 0:
                raise InputError(f"trace: id {part.min()} of table {name!r}; ids must not be negative")
        counts = np.array([part.size for part in parts], np.uint32)
        self._keep(np.concatenate(parts, dtype=np.int64, casting="unsafe"), counts)

    def record_features(self, features: KeyedJaggedTensor) -> None:
        """Record one batch: the ids of the features, which are named as the tables are."""
        names = features.keys()
        if tuple(names) != self.tables:
            self.record({name: features[name].values().cpu().numpy() for name in names})
            return
        self._check()
        values = features.values().cpu().numpy()
        self._keep(values.astype(np.int64), np.array(features.length_per_key(), np.uint32))

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield ``batches`` unchanged and record each one's KeyedJaggedTensor: itself, or its ``sparse``."""
        for batch in batches:
            self.record_features(getattr(batch, "sparse", batch))
            yield batch

    def close(self) -> None:
        """Write the remaining batches; raise the writing thread's error, if any."""
        if self._thread is None:
            return
        self._flush()
        self._queue.put(None)
        self._thread.join()
        self._thread = None
        try:
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            raise self._error

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._thread is None:
            raise ClosedError("trace: the recorder is closed; make a new one")
        if self._error is not None:
            raise self._error

    def _keep(self, ids: np.ndarray, counts: np.ndarray) -> None:
        """Keep the ids of a batch (int64), table after table, ``counts`` of each; the array is not copied."""
        self._ids.append(ids)
        self._counts.append(counts)
        self._held += ids.size
        self.batches += 1
        if self._held >= _CHUNK_IDS:
            self._flush()

    def _flush(self) -> None:
        if self._counts:
            self._queue.put((self._ids, self._counts))
        self._ids, self._counts, self._held = [], [], 0

    def _write(self) -> None:
        if sys.platform == "linux":  # where threads have priorities, take idle time only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        chunk = 0
        while (item := self._queue.get()) is not None:
            if self._error is not None:
                continue  # only to empty the queue: record() raises
            try:
                ids, counts = np.concatenate(item[0]), np.stack(item[1])
                if self.rate < 1:
                    ids, counts = _sampled(ids, counts, self.rate)
                ids = ids.view(np.uint64)
                narrow = not ids.size or int(ids.max()) < 2**32
                self._append(f"ids/{chunk}.npy", ids.astype(np.uint32 if narrow else np.uint64))
                self._append(f"counts/{chunk}.npy", counts)
                chunk += 1
            except BaseException as error:  # handed to record() or close()
                self._error = error

    def _append(self, name: str, array: np.ndarray) -> None:
        with self._file.open(name, "w", force_zip64=True) as member:
            np.lib.format.write_array(member, array, allow_pickle=False)


def _sampled(ids: np.ndarray, counts: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Select the ids of a share of the rows, and their counts; ``counts`` is (batches, tables)."""
    tables = np.arange(counts.shape[1], dtype=np.uint64) << np.uint64(ID_BITS)
    chosen = sampled(folded(ids) | np.repeat(np.tile(tables, len(counts)), counts.reshape(-1)), rate)
    ends = np.cumsum(counts.reshape(-1), dtype=np.int64)
    kept = np.concatenate([[0], np.cumsum(chosen, dtype=np.int64)])
    return ids[chosen], np.diff(kept[ends], prepend=0).astype(np.uint32).reshape(counts.shape)


def open_recorded(path: Path) -> Trace:
    """Open the trace in ``path``; InputError if the file is damaged or of another format."""
    with named_damage(path, " is no complete recorded trace"):
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read(HEADER))
            names = set(archive.namelist())
            tables: dict[str, int] = header["tables"]
            chunks = sum(name.startswith("counts/") for name in names)
            counts = [_read(archive, f"counts/{c}.npy") for c in range(chunks)]
        version = header["version"]
    if version != VERSION:
        raise InputError(f"{path} has trace format {version}; this tierstore reads {VERSION}")
    for array in counts:
        if array.ndim != 2 or array.shape[1] != len(tables):
            raise InputError(f"{path}: counts of shape {array.shape} do not fit {len(tables)} tables")

    def batches() -> Iterator[Sequence[TableIds]]:
        with zipfile.ZipFile(path) as archive:
            for c, count in enumerate(counts):
                yield from _segments(path, _read_ids(path, archive, c), count)

    return Trace(
        str(path),
        tuple(tables),
        batches,
        sum(len(count) for count in counts),
        tuple(int(rows) for rows in tables.values()),
        float(header["rate"]),
    )


def _read(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _read_ids(path: Path, archive: zipfile.ZipFile, chunk: int) -> np.ndarray:
    with named_damage(path, f": chunk {chunk} is damaged"):
        return _read(archive, f"ids/{chunk}.npy")


def _segments(path: Path, ids: np.ndarray, counts: np.ndarray) -> Iterator[list[TableIds]]:
    ends = np.cumsum(counts.reshape(-1).astype(np.int64))
    if ids.size != (ends[-1] if ends.size else 0):
        raise InputError(f"{path}: {ids.size} ids where the counts say {ends[-1] if ends.size else 0}")
    tables = counts.shape[1]
    parts = np.split(ids, ends[:-1])
    for first in range(0, len(parts), tables):
        yield [(table, part) for table, part in enumerate(parts[first : first + tables]) if part.size]
