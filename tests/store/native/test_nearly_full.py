"""A store that is 75 % full of live rows is overwritten, committed and reopened without an end."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore.errors import StoreFullError
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeStore

ROUNDS = 40
FULL = 0.75


def rows_of(ids: np.ndarray, versions: np.ndarray, row_bytes: int) -> np.ndarray:
    rows = np.zeros((len(ids), row_bytes // 8), np.uint64)
    rows[:, 0] = versions
    rows[:, -1] = ids * 1_000_003 + versions
    return rows.view(np.uint8)


class Training:
    """Tables of ``count`` rows each beside the version of every row."""

    def __init__(self, path, sizes: list[int], count: int) -> None:
        self.tables = [StoredTable(f"t{i}", i, 1 << 40, size // 4, size) for i, size in enumerate(sizes)]
        self.path, self.sizes, self.count = path, sizes, count
        self.cap = int(count * sum(size + 16 for size in sizes) / FULL)
        self.versions = np.zeros((len(sizes), count), np.int64)
        self.store = self.open()

    def open(self) -> NativeStore:
        return NativeStore(self.path, self.tables, config=NativeConfig(self.cap))

    def write(self, table: int, ids: np.ndarray, version: int) -> None:
        for first in range(0, len(ids), 1000):
            some = ids[first : first + 1000]
            self.versions[table, some] = version
            self.store.write(
                make_keys(table, some), rows_of(some, self.versions[table, some], self.sizes[table])
            )

    def check(self) -> None:
        ids = np.arange(self.count)
        for table, size in enumerate(self.sizes):
            out = np.zeros((self.count, size), np.uint8)
            assert self.store.read(make_keys(table, ids), out).all()
            assert np.array_equal(out, rows_of(ids, self.versions[table], size))


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(
    ("sizes", "share"),
    [([272], 0.01), ([272], 0.02), ([272], 0.03), ([272], 0.05), ([2064], 0.05), ([48, 240, 528], 0.05)],
)
def test_rounds_at_three_quarters(tmp_path, sizes, share, skewed):
    rng = np.random.default_rng(1)
    training = Training(tmp_path, sizes, 20_000)
    for table in range(len(sizes)):
        training.write(table, np.arange(training.count), 0)
    training.store.commit(b"0")
    for version in range(1, ROUNDS + 1):
        for table in range(len(sizes)):
            changed = int(share * training.count)
            if skewed:
                ids = np.unique(rng.zipf(1.2, 4 * changed) % training.count)[:changed]
            else:
                ids = rng.choice(training.count, changed, replace=False)
            training.write(table, ids, version)
        training.store.commit(b"%d" % version)
        if version % 5 == 0:
            training.store.close()
            training.store = training.open()
            assert training.store.meta() == b"%d" % version
    training.check()
    training.store.close()


def test_what_was_written_before_a_store_was_full_can_be_committed(tmp_path):
    """And with the room that the error asks for the same call goes through."""
    training = Training(tmp_path, [272], 20_000)
    training.write(0, np.arange(training.count), 0)
    training.store.commit(b"0")
    written = 0

    def fill() -> None:
        nonlocal written
        for written in range(0, training.count, 100):
            training.write(0, np.arange(written, written + 100), 1)

    with pytest.raises(StoreFullError, match="raise the cap by at least") as full:
        fill()
    training.store.commit(b"saved")
    training.versions[0, written:] = 0
    needed = int(str(full.value).split("bytes, to ")[1].split(",")[0])
    assert training.cap < needed < 2 * training.cap
    training.store.close()
    training.cap = 2 * needed
    training.store = training.open()
    assert training.store.meta() == b"saved"
    training.write(0, np.arange(written, training.count), 2)
    training.store.commit(b"went on")
    training.check()
    training.store.close()
