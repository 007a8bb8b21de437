"""Reads of a whole native store, in ``tierstore bench store``: scan, export and verify beside the device."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.keys import make_keys
from tierstore.store import DirectoryStore, StoredTable, open_store, verify

from ._drive import Device

_BATCH = 50_000
_CAP = 1 << 44


class WholeStore:
    """A store of ``rows`` random ids in ``path``, and what it takes to read all of it.

    ``bytes_per_s`` counts the rows; ``vs_device`` is of the files' bytes, and of a sequential read right
    before.
    """

    def __init__(self, path: Path, device: Device, rows: int, row_bytes: int) -> None:
        self.path, self.device = path, device
        self.random = np.random.default_rng(3)
        self.table = StoredTable("bench", 0, 4 * rows, row_bytes // 4, row_bytes)
        self.ids = self.random.permutation(4 * rows)[:rows]
        self.values = self.random.integers(0, 256, (_BATCH, row_bytes), dtype=np.uint8)
        self.figures: dict[str, float] = {}

    def measure(self) -> dict[str, float]:
        """Measure with all rows live, with half of them superseded once, compacted, and beside a writer."""
        with self.open() as store:
            self.overwrite(store, self.ids)
        self.read_all("")
        with self.open() as store:
            self.overwrite(store, self.random.permutation(self.ids)[: len(self.ids) // 2])
        self.read_all("half_superseded.")
        with self.open() as store:
            store.compact()
            store.commit(b"")
        self.read_all("compacted.")
        with self.open() as store, self.writer(store):
            self.scan("beside_writer.", store)
        return self.figures

    def open(self, read_only: bool = False) -> DirectoryStore:
        return open_store(self.path, "native", [self.table], _CAP, read_only=read_only)

    def overwrite(self, store: DirectoryStore, ids: NDArray[np.int64]) -> None:
        for first in range(0, len(ids), _BATCH):
            keys = make_keys(0, ids[first : first + _BATCH])
            store.write(keys, self.values[: len(keys)])
        store.commit(b"")

    @contextmanager
    def writer(self, store: DirectoryStore) -> Iterator[None]:
        """Overwrite random rows as fast as it goes, and commit after each tenth of the rows."""
        stop, written = threading.Event(), [0]

        def change() -> None:
            random = np.random.default_rng(4)
            while not (written[0] and stop.is_set()):  # a short scan ends before the first rows are written
                some = np.unique(random.choice(self.ids, max(1, len(self.ids) // 10)))
                self.overwrite(store, some)
                written[0] += len(some)

        with ThreadPoolExecutor(1) as pool:
            start, job = time.perf_counter(), pool.submit(change)
            try:
                yield
            finally:
                stop.set()
            job.result()
            seconds = time.perf_counter() - start
        self.figures["beside_writer.written_bytes_per_s"] = written[0] * self.table.row_bytes / seconds

    def read_all(self, state: str) -> None:
        target = self.path.with_name("exported")
        with self.open(read_only=True) as store:
            self.scan(state, store)
            self.timed(f"{state}export", lambda: store.export(target))
        shutil.rmtree(target)
        self.timed(f"{state}verify", lambda: verify(self.path))

    def scan(self, state: str, store: DirectoryStore) -> None:
        self.timed(f"{state}scan", lambda: sum(len(keys) for keys, _ in store.scan()))

    def timed(self, name: str, read: Callable[[], object]) -> None:
        files = sum(file.stat().st_size for file in (self.path / "native").glob("*.seg"))
        device = self.device.sequential_reads()
        start = time.perf_counter()
        read()
        seconds = time.perf_counter() - start
        self.figures[f"{name}.bytes_per_s"] = len(self.ids) * self.table.row_bytes / seconds
        self.figures[f"{name}.vs_device"] = files / seconds / device
