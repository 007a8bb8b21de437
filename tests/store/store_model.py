"""What the store tests share: tables of several row sizes, rows with recognisable content, checks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tierstore.keys import MAX_ID, make_keys
from tierstore.store import DirectoryStore, RowStore, StoredTable, open_store
from tierstore.store.native import NativeConfig, NativeLimits, NativeStore

CAP = 1 << 30
TABLES = (
    StoredTable("small", 0, 1000, 4, 16),
    StoredTable("wide", 1, MAX_ID + 1, 64, 272, {"name": "RowWiseAdagrad"}, 1, {"rule": "uniform"}),
    StoredTable("other", 7, MAX_ID + 1, 64, 272),
    StoredTable("last", 65535, MAX_ID + 1, 300, 1200),
)
ROW_BYTES = {spec.index: spec.row_bytes for spec in TABLES}


def use_compact_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every native store a compact index whose ranges have 64 ids, so that few rows make one dense."""
    check = NativeConfig.__post_init__

    def compact(self: NativeConfig) -> None:
        check(self)
        object.__setattr__(self, "index", "compact")
        object.__setattr__(self, "limits", replace(self.limits or NativeLimits(), range_bits=6))

    monkeypatch.setattr(NativeConfig, "__post_init__", compact)


def make_rows(keys: np.ndarray, row_bytes: int, version: int = 0) -> np.ndarray:
    """Rows uint8 (n, row_bytes) that are a function of key and version."""
    words = np.arange(row_bytes // 8, dtype=np.uint64) + np.uint64(version * 1_000_003)
    mixed = (keys[:, None] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ words * np.uint64(
        0xC2B2AE3D27D4EB4F
    )
    return np.ascontiguousarray(mixed).view(np.uint8).reshape(len(keys), row_bytes)


def put(store: RowStore, table: int, ids, version: int = 0) -> None:
    keys = make_keys(table, ids)
    store.write(keys, make_rows(keys, ROW_BYTES[table], version))


def get(store: RowStore, table: int, ids) -> tuple[np.ndarray, np.ndarray]:
    keys = make_keys(table, ids)
    out = np.full((len(keys), ROW_BYTES[table]), 0xEE, np.uint8)
    return store.read(keys, out), out


def assert_holds(store: RowStore, table: int, ids, version: int = 0) -> None:
    """All rows of ``ids`` are there, in ``version``."""
    found, out = get(store, table, ids)
    assert found.dtype == np.bool_
    assert found.all()
    assert np.array_equal(out, make_rows(make_keys(table, ids), ROW_BYTES[table], version))


def open_memory(path, tables=TABLES) -> DirectoryStore:
    return open_store(path, "memory", tables, CAP)


def make_store(path, tables=TABLES) -> None:
    """A store directory of the engine `memory` with ten rows in its table 1."""
    with open_memory(path, tables) as store:
        put(store, 1, range(10))
        store.commit(b"made")


def folder_contents(path: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below ``path`` with its bytes and time of change."""
    return {
        str(file.relative_to(path)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in path.rglob("*")
        if file.is_file()
    }


def stored_ids(store: RowStore, table: int) -> list[int]:
    """Ids of all stored rows of ``table``, sorted, from keys()."""
    chunks = list(store.keys(table))
    for chunk in chunks:
        assert chunk.dtype == np.uint64
        assert (chunk >> np.uint64(48) == table).all()
    return sorted(int(key) & MAX_ID for chunk in chunks for key in chunk.tolist())


def scanned(store: RowStore, tables=None) -> dict[int, tuple[int, bytes]]:
    """Every row of a scan by key, with its row size; each key comes once, in rows of its table's size."""
    rows: dict[int, tuple[int, bytes]] = {}
    for batch in store.scan(tables):
        add_scanned(rows, *batch)
    return rows


def add_scanned(rows: dict[int, tuple[int, bytes]], keys: np.ndarray, found: np.ndarray) -> None:
    assert keys.dtype == np.uint64
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert found.shape[0] == len(keys) > 0
    assert {ROW_BYTES[key >> 48] for key in keys.tolist()} == {found.shape[1]}
    batch = dict(zip(keys.tolist(), ((found.shape[1], row.tobytes()) for row in found), strict=True))
    assert len(batch) == len(keys)
    assert not batch.keys() & rows.keys()
    rows |= batch


def expected_scan(table: int, ids, version: int = 0) -> dict[int, tuple[int, bytes]]:
    keys = make_keys(table, ids)
    rows = make_rows(keys, ROW_BYTES[table], version)
    return {key: (rows.shape[1], row.tobytes()) for key, row in zip(keys.tolist(), rows, strict=True)}


class Child(subprocess.Popen):
    """A process that a failing test kills: Popen would wait for its end, for ever where that hangs."""

    def __exit__(self, failure, *rest):
        if failure is not None:
            self.kill()
        super().__exit__(failure, *rest)


@contextmanager
def plain_user() -> Iterator[None]:
    """Not root for a while, since root may read and write everywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def run_child(code: str, *arguments: object, **options) -> Child:
    """A Python process that runs ``code`` and can import what the tests can."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [Path(__file__).parents[2], *sys.path])),
    }
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return Child(command, stdout=subprocess.PIPE, text=True, env=environment, **options)


def wait_for_saved_index(store: NativeStore, seconds: float = 60) -> None:
    """Wait until no save of the index is under way: not while rows have changed since the last commit."""
    end = time.perf_counter() + seconds
    while (counters := store.counters())["begun_snapshots"] > (
        counters["saved_snapshots"] + counters["snapshot_failures"]
    ):
        assert time.perf_counter() < end, counters
        time.sleep(0.005)
