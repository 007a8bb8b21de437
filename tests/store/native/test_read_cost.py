"""What reads cost on a device is measured once per store and kept with it; damage makes it measured anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeStore

ROW_BYTES, ROWS = 4080, 20_000  # 78 MiB
TABLE = StoredTable("t", 0, ROWS, ROW_BYTES // 4, ROW_BYTES)


def open_at(path: Path) -> NativeStore:
    return NativeStore(path, [TABLE], config=NativeConfig(1 << 30))


def read_some(store: NativeStore, count: int) -> int:
    keys = make_keys(0, np.random.default_rng(0).choice(ROWS, count, replace=False))
    out = np.empty((count, ROW_BYTES), np.uint8)
    assert store.read(keys, out).all()
    assert np.array_equal(out[:, :8].copy().view(np.uint64)[:, 0], keys)
    return int(store.counters()["merge_gap_bytes"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with open_at(tmp_path) as store:
        for first in range(0, ROWS, 1000):
            rows = np.zeros((1000, ROW_BYTES), np.uint8)
            keys = make_keys(0, np.arange(first, first + 1000))
            rows[:, :8] = keys.view(np.uint8).reshape(-1, 8)
            store.write(keys, rows)
        store.commit(b"")
    return tmp_path


def test_measured_once_and_kept(path):
    file = path / "DEVICE"
    with open_at(path) as store:
        read_some(store, 100)
        assert not file.exists()  # too few rows to be worth it
        gap = read_some(store, 5000)
        assert file.stat().st_size == 4096
        assert read_some(store, 5000) == gap
    kept = file.read_bytes()
    with open_at(path) as store:
        assert store.counters()["merge_gap_bytes"] == gap
        read_some(store, 5000)
    assert file.read_bytes() == kept


@pytest.mark.parametrize("at", [0, 8, 12, 20, 40, 4096])
def test_measured_again_when_damaged(path, at):
    file = path / "DEVICE"
    with open_at(path) as store:
        read_some(store, 5000)
    damaged = bytearray(file.read_bytes())
    if at < len(damaged):
        damaged[at] ^= 1
    file.write_bytes(damaged[: max(at, 100)] if at < 4096 else damaged[:-1])
    with open_at(path) as store:
        assert store.counters()["merge_gap_bytes"] == 0
        read_some(store, 5000)
    assert file.stat().st_size == 4096
