"""``tierstore bench store``: engines side by side on random rows, and the device itself in the same run."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.config import parse_bytes
from tierstore.keys import make_keys
from tierstore.store import DirectoryStore, TableSpec, engine_names, open_store

SUMMARY = "rows/s of the row store engines, and of the device"
_PAGE = 4096
_CAP = 1 << 44
_ID_SPREAD = 4  # ids come from a range this many times the rows, as in a sparsely touched table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=float, default=2e6, help="rows to load (default: 2e6)")
    parser.add_argument("--row-bytes", type=int, default=272, help="multiple of 16 (default: 272)")
    parser.add_argument("--batch", type=int, default=10_000, help="rows per call (default: 10000)")
    parser.add_argument("--seconds", type=float, default=3, help="of each phase and round (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="the median of them is reported (default: 3)")
    parser.add_argument("--engines", default=",".join(engine_names()), help="default: all")
    parser.add_argument(
        "--read-threads", type=int, default=16, help="of engines whose reads block (default: 16)"
    )
    parser.add_argument(
        "--dir", type=Path, help="folder on the device to measure (default: the temporary one)"
    )
    parser.add_argument(
        "--device-file", default="1GiB", help="size of the file that tells the device's own reads"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")


def run(args: argparse.Namespace) -> int:
    rows, engines = int(args.rows), args.engines.split(",")
    figures: dict[str, float] = {"rows": rows, "row_bytes": args.row_bytes, "batch": args.batch}
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=args.dir) as folder:
        benches = {name: EngineBench(name, Path(folder) / name, rows, args) for name in engines}
        for name, bench in benches.items():
            figures |= {f"{name}.{key}": value for key, value in bench.load().items()}
        samples: dict[str, list[float]] = {}
        for _ in range(args.rounds):  # interleaved, so that a busy minute does not hit one engine only
            samples.setdefault("device.read_iops", []).append(device_reads(Path(folder) / "device", args))
            for name, bench in benches.items():
                for key, value in bench.round().items():
                    samples.setdefault(f"{name}.{key}", []).append(value)
    figures |= {key: float(np.median(values)) for key, values in samples.items()}
    figures |= ratios(figures, engines)
    for key, value in figures.items():
        print(f"{key:<32} {value:>14,.3f}" if value < 100 else f"{key:<32} {value:>14,.0f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


class EngineBench:
    """One engine's store of random ids, and the phases that are measured on it."""

    def __init__(self, engine: str, path: Path, rows: int, args: argparse.Namespace) -> None:
        self.engine, self.path, self.args = engine, path, args
        self.random = np.random.default_rng(1)
        self.ids = self.random.permutation(rows * _ID_SPREAD)[:rows]
        self.table = TableSpec("bench", 0, rows * _ID_SPREAD, args.row_bytes // 4, args.row_bytes)
        self.values = self.random.integers(0, 256, (args.batch, args.row_bytes), dtype=np.uint8)

    def load(self) -> dict[str, float]:
        """All rows in random order, then one commit."""
        with self.open() as store:
            start = time.perf_counter()
            for first in range(0, len(self.ids), self.args.batch):
                keys = make_keys(0, self.ids[first : first + self.args.batch])
                store.write(keys, self.values[: len(keys)])
            written = time.perf_counter()
            store.commit(b"")
            done = time.perf_counter()
            settle()
            store.commit(b"")  # keeps what compaction has done meanwhile
            disk = store.stats().disk_bytes
        return {
            "load.rows_per_s": len(self.ids) / (done - start),
            "load.commit_s": done - written,
            "load.disk_bytes_per_live_byte": disk / (len(self.ids) * self.args.row_bytes),
        }

    def round(self) -> dict[str, float]:
        """Reopen with nothing of it in the page cache; random reads; random overwrites; commit of 1 %."""
        forget(self.path)
        start = time.perf_counter()
        with self.open() as store:
            reopened = time.perf_counter() - start
            settle()
            out = np.empty_like(self.values)
            read_before, _ = moved_bytes()
            latencies = self.timed(lambda keys: store.read(keys, out))
            read_bytes = moved_bytes()[0] - read_before
            overwrites, amplification = self.changing(
                lambda: self.timed(lambda keys: store.write(keys, self.values)), store
            )
            (commit_seconds,), commit_amplification = self.changing(lambda: self.write_some(store), store)
        return {
            "reopen_s": reopened,
            "read.rows_per_s": self.args.batch / float(np.mean(latencies)),
            "read.p50_ms": float(np.percentile(latencies, 50)) * 1e3,
            "read.p99_ms": float(np.percentile(latencies, 99)) * 1e3,
            "read.moved_per_useful_byte": read_bytes / (len(latencies) * self.values.size),
            "overwrite.rows_per_s": self.args.batch / float(np.mean(overwrites)),
            "write_amplification": amplification,
            "commit_1pct_s": commit_seconds,
            "commit_1pct.moved_per_changed_byte": commit_amplification,
        }

    def open(self) -> DirectoryStore:
        return open_store(self.path, self.engine, [self.table], _CAP, read_threads=self.args.read_threads)

    def timed(self, call: Callable[[NDArray[np.uint64]], object]) -> list[float]:
        """Seconds of each ``call`` of a random batch, until their sum is enough."""
        latencies: list[float] = []
        while sum(latencies) < self.args.seconds:
            keys = make_keys(0, self.random.choice(self.ids, self.args.batch, replace=False))
            start = time.perf_counter()
            call(keys)
            latencies.append(time.perf_counter() - start)
        return latencies

    def changing(self, change: Callable[[], list[float]], store: DirectoryStore) -> tuple[list[float], float]:
        """Runs ``change`` and a commit: the seconds it tells, bytes written per byte given to the store."""
        given, (_, written) = store.stats().written_rows, moved_bytes()
        seconds = change()
        store.commit(b"")
        given = (store.stats().written_rows - given) * self.args.row_bytes
        return seconds, (moved_bytes()[1] - written) / given

    def write_some(self, store: DirectoryStore) -> list[float]:
        """Changes 1 % of the rows and tells the seconds of the commit."""
        count = max(1, len(self.ids) // 100)
        keys = make_keys(0, self.random.choice(self.ids, count, replace=False))
        store.write(keys, np.resize(self.values, (count, self.args.row_bytes)))
        start = time.perf_counter()
        store.commit(b"")
        return [time.perf_counter() - start]


def moved_bytes() -> tuple[int, int]:
    """Bytes that this process made the devices read and write so far."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def settle(seconds: float = 30) -> None:
    """Waits until this process moves no bytes, so that no compaction runs beside what comes next."""
    end = time.perf_counter() + seconds
    before, now = (-1, -1), moved_bytes()
    while now != before and time.perf_counter() < end:
        time.sleep(0.5)
        before, now = now, moved_bytes()


def device_reads(file: Path, args: argparse.Namespace, threads: int = 32) -> float:
    """Random direct reads of 4 KiB per second, by threads that each wait for one at a time."""
    size = parse_bytes(args.device_file, "--device-file")
    if not file.exists():
        with open(file, "wb") as handle:
            for _ in range(size >> 20):
                handle.write(os.urandom(1 << 20))
            os.fsync(handle.fileno())
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    ready = threading.Barrier(threads)

    def reads_per_second(seed: int) -> float:
        buffer, count = mmap.mmap(-1, _PAGE), 0
        offsets = np.random.default_rng(seed).integers(0, size // _PAGE, 1 << 16) * _PAGE
        ready.wait()
        start = now = time.perf_counter()
        while count == 0 or now < start + args.seconds:
            os.preadv(fd, [buffer], int(offsets[count % len(offsets)]))
            count, now = count + 1, time.perf_counter()
        return count / (now - start)

    try:
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(reads_per_second, range(threads)))
    finally:
        os.close(fd)


def forget(path: Path) -> None:
    """Drops the files below ``path`` from the page cache."""
    os.sync()
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def ratios(figures: dict[str, float], engines: list[str]) -> dict[str, float]:
    """Reads of each engine against the device's, and of the first engine against the others'."""
    result = {
        f"ratio.{name}_read_vs_device": figures[f"{name}.read.rows_per_s"] / figures["device.read_iops"]
        for name in engines
    }
    first, *others = engines
    for name in others:
        result[f"ratio.read_vs_{name}"] = (
            figures[f"{first}.read.rows_per_s"] / figures[f"{name}.read.rows_per_s"]
        )
    return result
