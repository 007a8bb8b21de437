"""``tierstore bench store``: engines side by side on random rows, and the device itself in the same run."""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import ConfigError
from tierstore.keys import make_keys
from tierstore.store import DirectoryStore, StoredTable, engine_names, open_store

from ._checks import check_disk, check_engines, check_memory, device_file
from ._drive import Device, Drives
from ._folder import folder, temporary_folders
from ._phases import Phase, forget, moved_bytes, settle
from ._ratios import ratios
from ._scans import WholeStore

SUMMARY = "rows/s of the row store engines, and of the device"
_CAP = 1 << 44
_ID_SPREAD = 4  # as in a sparsely touched table
_FULL, _FULL_ROWS = 0.75, 1_000_000  # rows of the store in which reads are measured beside compaction
_FEW = 64  # rows of a read whose latency is measured
_THREADED = ("rocksdb", "lmdb")  # their reads block, so their plain calls have one in flight

_MOST_IDS = 1 << 48

Keys = NDArray[np.uint64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=float, default=5e6, help="rows to load (default: 5e6)")
    parser.add_argument("--row-bytes", type=int, default=272, help="multiple of 16 (default: 272)")
    parser.add_argument("--batch", type=int, default=10_000, help="rows per call (default: 10000)")
    parser.add_argument("--window", type=int, default=32, help="batches read together (default: 32)")
    parser.add_argument("--seconds", type=float, default=2, help="seconds of each phase (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is reported (default: 3)")
    parser.add_argument(
        "--engines",
        default=",".join(engine_names()),
        help="engines (default: all); native:hash and native:compact have that form of index",
    )
    parser.add_argument(
        "--id-spread",
        type=int,
        default=_ID_SPREAD,
        help=f"ids come from a range of so many times the rows (default: {_ID_SPREAD})",
    )
    parser.add_argument("--read-threads", type=int, default=16, help="threads for engines whose reads block")
    parser.add_argument(
        "--dir",
        type=folder,
        nargs="+",
        help="folder on the device to measure; of several, each on a device of its own, native uses all, the "
        "figures of the device are sums, and whole reads of a store are left out (default: a temporary one)",
    )
    parser.add_argument(
        "--device-file", default="1GiB", help="size of the file on which the device alone is measured"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")


def run(args: argparse.Namespace) -> int:
    rows, engines, size = int(args.rows), args.engines.split(","), _checked(args)
    figures: dict[str, float] = {"rows": rows, "row_bytes": args.row_bytes, "batch": args.batch}
    samples: dict[str, list[float]] = {}

    def add(prefix: str, values: dict[str, float]) -> None:
        for key, value in values.items():
            samples.setdefault(f"{prefix}.{key}", []).append(value)

    with temporary_folders(args.dir) as folders:
        devices = [Device(folder / "device", size, args.seconds) for folder in folders]
        device = Drives(devices)
        benches = {
            name: EngineBench(
                name,
                [folder / name for folder in (folders if name.startswith("native") else folders[:1])],
                rows,
                args,
            )
            for name in engines
        }
        for name, bench in benches.items():
            add("device", device.measure())
            add(name, bench.load())
        for _ in range(args.rounds):  # interleaved, so that a busy minute does not hit one engine only
            for name, bench in benches.items():
                add("device", device.measure())
                add(name, bench.round())
        add("device", device.measure())
        if "native" in benches and len(folders) == 1:
            add("native", benches["native"].reads_beside_compaction())
            add("native", WholeStore(folders[0] / "whole", devices[0], rows, args.row_bytes).measure())
    figures |= {key: float(np.median(values)) for key, values in samples.items()}
    figures |= ratios(figures, engines)
    for key, value in figures.items():
        print(f"{key:<40} {value:>14,.3f}" if value < 100 else f"{key:<40} {value:>14,.0f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


def _checked(args: argparse.Namespace) -> int:
    """Return the bytes of the device's file. Raises ConfigError for options that cannot be."""
    for name in args.engines.split(","):
        engine, colon, index = name.partition(":")
        check_engines([engine])
        if colon and (engine != "native" or index not in ("hash", "compact")):
            raise ConfigError(f"--engines: there is no {name!r}; there are native:hash and native:compact")
    if not 1 <= args.rows <= _MOST_IDS // args.id_spread:
        raise ConfigError(f"--rows times --id-spread must be from 1 to {_MOST_IDS:,}, the ids of a table")
    if args.row_bytes % 16:
        raise ConfigError(f"--row-bytes is {args.row_bytes}; it must be a multiple of 16")
    check_memory(8 * args.rows * args.id_spread, "a permutation of the ids", "--rows, --id-spread")
    batch = args.batch * args.row_bytes
    check_memory(args.window * batch, "a window of batches", "--window, --batch, --row-bytes")
    check_disk(args.rows * args.row_bytes, args.dir, "each store", "--rows, --row-bytes")
    return device_file(args.device_file, "--device-file", args.dir)


class EngineBench:
    """One engine's store of random ids, and the phases that are measured on it."""

    def __init__(self, engine: str, paths: list[Path], rows: int, args: argparse.Namespace) -> None:
        self.engine, _, self.index = engine.partition(":")
        self.paths, self.args = paths, args
        self.random = np.random.default_rng(1)
        self.ids = self.random.permutation(rows * args.id_spread)[:rows]
        self.table = StoredTable("bench", 0, rows * args.id_spread, args.row_bytes // 4, args.row_bytes)
        self.values = self.random.integers(0, 256, (args.batch, args.row_bytes), dtype=np.uint8)

    def load(self) -> dict[str, float]:
        """Load all rows in random order, then commit once."""
        with self.open() as store:
            phase = Phase(self.args.row_bytes)
            for first in range(0, len(self.ids), self.args.batch):
                keys = make_keys(0, self.ids[first : first + self.args.batch])
                with phase.call(len(keys)):
                    store.write(keys, self.values[: len(keys)])
            written = time.perf_counter()
            store.commit(b"")
            commit = time.perf_counter() - written
            figures = phase.figures("load", moved="written")
            settle()
            store.commit(b"")  # this commit keeps the compaction's work
            store.read(self.keys(), np.empty_like(self.values))  # native: measures its device, once
            stats = store.stats()
            disk = stats.disk_bytes
        return figures | {
            "load.commit_s": commit,
            "load.index_bytes_per_row": stats.index_bytes / len(self.ids),
            "load.disk_bytes_per_live_byte": disk / (len(self.ids) * self.args.row_bytes),
        }

    def round(self) -> dict[str, float]:
        """Run each phase once, on a store of which nothing is in the page cache when it is opened."""
        figures = {}
        if self.engine in _THREADED:
            forget(self.paths)
            with self.open(self.args.read_threads) as store:
                settle()
                figures |= self.reads(store, "read_threads", 1)
        forget(self.paths)
        start = time.perf_counter()
        with self.open() as store:
            figures["reopen_s"] = time.perf_counter() - start
            settle()
            figures |= self.reads(store, "read", 1)
            figures |= self.reads(store, "read_window", self.args.window)
            figures |= self.overwrites(store)
            figures |= self.mix(store)
            if self.engine == "native":  # other engines take one call at a time
                figures |= self.reads_beside_writes(store)
            figures |= self.commit_of_changes(store)
        return figures

    def open(self, read_threads: int = 1) -> DirectoryStore:
        return open_store(
            self.paths,
            self.engine,
            [self.table],
            _CAP,
            read_threads=read_threads,
            index=self.index or "auto",
        )

    def keys(self, batches: int = 1) -> Keys:
        """Draw the keys of that many batches, without repeats as far as there are rows."""
        count = min(batches * self.args.batch, len(self.ids))
        return make_keys(0, self.random.choice(self.ids, count, replace=False))

    def reads(self, store: DirectoryStore, name: str, batches: int) -> dict[str, float]:
        phase = Phase(self.args.row_bytes)
        out = np.empty((min(batches * self.args.batch, len(self.ids)), self.args.row_bytes), np.uint8)
        while phase.seconds < self.args.seconds:
            keys = self.keys(batches)
            with phase.call(len(keys)):
                store.read(keys, out)
        return phase.figures(name, moved="read")

    def overwrites(self, store: DirectoryStore) -> dict[str, float]:
        """Overwrite rows at random; the bytes of the commit at the end count as written."""
        phase = Phase(self.args.row_bytes)
        coming = [self.keys() for _ in range(16)]
        while phase.seconds < self.args.seconds:
            keys = coming[phase.calls % 16]
            with phase.call(len(keys)):
                store.write(keys, self.values[: len(keys)])
        figures = phase.figures("overwrite")
        store.commit(b"")
        return figures | {"write_amplification": phase.written / phase.useful}

    def mix(self, store: DirectoryStore) -> dict[str, float]:
        """Read a batch, overwrite a batch, and so on."""
        phase = Phase(self.args.row_bytes)
        out = np.empty_like(self.values)
        while phase.seconds < self.args.seconds:
            keys, others = self.keys(), self.keys()
            with phase.call(len(keys)):
                store.read(keys, out[: len(keys)])
            with phase.call(len(others)):
                store.write(others, self.values[: len(others)])
        return phase.figures("mix")

    def reads_beside_writes(self, store: DirectoryStore) -> dict[str, float]:
        """Read while another thread overwrites as many rows and commits all the time.

        The work that these writes make the engine do in the background goes on meanwhile.
        """
        stop, turns = threading.Event(), threading.Semaphore(0)

        def change() -> None:
            count = 0
            while turns.acquire() and not stop.is_set():
                keys = np.unique(make_keys(0, random.choice(self.ids, len(self.values), replace=True)))
                store.write(keys, self.values[: len(keys)])
                count += 1
                if count % 16 == 0:
                    store.commit(b"")

        random = np.random.default_rng(2)
        coming = [self.keys() for _ in range(16)]
        phase = Phase(self.args.row_bytes)
        out = np.empty_like(self.values)
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(change)
            try:
                while phase.seconds < self.args.seconds and not job.done():
                    keys = coming[phase.calls % 16]
                    turns.release()
                    with phase.call(len(keys)):
                        store.read(keys, out[: len(keys)])
            finally:
                stop.set()
                turns.release()
            job.result()
        return phase.figures("read_beside_writes")

    def reads_beside_compaction(self) -> dict[str, float]:
        """Read another store that is 75 % full, first alone, then beside compaction that never ends.

        In the second phase a thread overwrites as fast as it can, and commits after every 2 % of the rows.
        """
        ids = self.ids[:_FULL_ROWS]
        cap = int(len(ids) * (self.args.row_bytes + 16) * 1.05 / _FULL)  # headers, ends of blocks, footers
        cap = max(cap, 16 << 20)  # a smaller store has too few segments
        folder = tempfile.TemporaryDirectory(dir=self.paths[0].parent)
        with folder, open_store(Path(folder.name) / "full", self.engine, [self.table], cap) as store:
            self.overwrite_all(store, ids)
            quiet = self.reads_of(store, ids, "read_when_full")
            quiet |= self.reads_of(store, ids, "read_few_when_full", _FEW)
            written, stop = [0], threading.Event()

            def change() -> None:
                random = np.random.default_rng(2)
                while not stop.is_set():
                    some = np.unique(random.choice(ids, max(1, len(ids) // 50)))
                    self.overwrite_all(store, some)
                    written[0] += len(some)

            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(change)
                start = time.perf_counter()
                try:
                    time.sleep(self.args.seconds)  # until what was free is used up
                    before, start = written[0], time.perf_counter()
                    beside = self.reads_of(store, ids, "read_beside_compaction")
                    while written[0] == before and not job.done():  # a commit may take longer than the reads
                        time.sleep(1e-3)
                    speed = (written[0] - before) / (time.perf_counter() - start)
                    beside |= self.reads_of(store, ids, "read_few_beside_compaction", _FEW)
                finally:
                    stop.set()
                job.result()
        return quiet | beside | {"read_beside_compaction.overwritten_rows_per_s": speed}

    def overwrite_all(self, store: DirectoryStore, ids: NDArray[np.int64]) -> None:
        for first in range(0, len(ids), self.args.batch):
            keys = make_keys(0, ids[first : first + self.args.batch])
            store.write(keys, self.values[: len(keys)])
        store.commit(b"")

    def reads_of(
        self, store: DirectoryStore, ids: NDArray[np.int64], name: str, batch: int = 0
    ) -> dict[str, float]:
        phase = Phase(self.args.row_bytes)
        out = np.empty_like(self.values)
        count = min(len(ids), batch or self.args.batch, self.args.batch)
        while phase.seconds < self.args.seconds:
            keys = np.unique(make_keys(0, ids[self.random.integers(0, len(ids), count)]))
            with phase.call(len(keys)):
                store.read(keys, out[: len(keys)])
        return phase.figures(name)

    def commit_of_changes(self, store: DirectoryStore) -> dict[str, float]:
        """Commit after 1 % of the rows have changed."""
        store.commit(b"")
        settle()
        count = max(1, len(self.ids) // 100)
        keys = make_keys(0, self.random.choice(self.ids, count, replace=False))
        _, before = moved_bytes()
        store.write(keys, np.resize(self.values, (count, self.args.row_bytes)))
        start = time.perf_counter()
        store.commit(b"")
        seconds = time.perf_counter() - start
        written = moved_bytes()[1] - before
        return {
            "commit_1pct_s": seconds,
            "commit_1pct.moved_per_changed_byte": written / (count * self.args.row_bytes),
        }
