"""Files that format version 2 wrote are read by every later version. ``make`` below made them, once for each
version of footers."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.store.native.checksums import crc32c
from tierstore.errors import StoreCorruptError
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeStore

GOLDEN = Path(__file__).parent / "golden" / "v2"
FOLDERS = [GOLDEN, GOLDEN.parent / "v2_footers_v3"]
TABLES = (StoredTable("a", 0, 1 << 40, 4, 16), StoredTable("b", 1, 1 << 40, 64, 272))
CONFIG = NativeConfig(cap_bytes=1 << 20, segment_bytes=12_288, snapshot_min_rows=1, keep=2)


def rows_of(keys: np.ndarray, version: int, row_bytes: int) -> np.ndarray:
    words = keys[:, None] * np.uint64(1_000_003) + np.arange(row_bytes // 8, dtype=np.uint64)
    return (words + np.uint64(version)).view(np.uint8)


def put(store: NativeStore, table: int, ids, version: int) -> None:
    keys = make_keys(table, ids)
    store.write(keys, rows_of(keys, version, TABLES[table].row_bytes))


def holds(store: NativeStore, table: int, ids, version: int) -> bool:
    keys = make_keys(table, ids)
    out = np.zeros((len(keys), TABLES[table].row_bytes), np.uint8)
    found = store.read(keys, out)
    return bool(found.all()) and np.array_equal(out, rows_of(keys, version, TABLES[table].row_bytes))


def make(folder: Path) -> None:
    """Full, relocated and unfinished segments, voids, two commits, a saved index."""
    with NativeStore(folder, TABLES, config=CONFIG) as store:
        put(store, 1, range(56), 1)
        put(store, 1, [i for i in range(56) if i % 7], 2)
        store.compact()
        store.commit(b"first", tag="one")
        put(store, 0, [0, 5, (1 << 40) - 1], 3)
        put(store, 1, range(3), 4)
        store.commit(b"second", tag="two")


def check(folder: Path, with_index: bool) -> None:
    with NativeStore(folder, TABLES, config=CONFIG) as store:
        assert store.counters()["snapshot_failures"] == 0
        assert (store.counters()["rebuilt_rows"] == 0) == with_index
        assert [(c.meta, c.tag) for c in store.commits()] == [(b"first", "one"), (b"second", "two")]
        assert store.stats().rows == 59
        assert holds(store, 0, [0, 5, (1 << 40) - 1], 3)
        assert holds(store, 1, range(3), 4)
        assert holds(store, 1, [i for i in range(3, 56) if i % 7], 2)
        assert holds(store, 1, range(7, 56, 7), 1)


@pytest.mark.parametrize("golden", FOLDERS, ids=lambda folder: folder.name)
def test_version_2_is_read(tmp_path, golden):
    shutil.copytree(golden, tmp_path / "store")
    check(tmp_path / "store", with_index=True)
    shutil.copytree(golden, tmp_path / "other")
    (tmp_path / "other" / "INDEX").unlink()
    check(tmp_path / "other", with_index=False)


@pytest.mark.parametrize("golden", FOLDERS, ids=lambda folder: folder.name)
def test_the_first_commit_of_version_2_is_read(tmp_path, golden):
    shutil.copytree(golden, tmp_path / "store")
    config = NativeConfig(cap_bytes=1 << 20, keep=2, at=1)
    with NativeStore(tmp_path / "store", TABLES, config=config) as store:
        assert store.meta() == b"first"
        assert store.stats().rows == 56
        assert holds(store, 1, range(7, 56, 7), 1)
        assert holds(store, 1, [0], 1)


@pytest.mark.parametrize("version", [0, 1, 3, 0xFFFFFFFF])
@pytest.mark.parametrize(("name", "covered"), [("MANIFEST", None), ("00000003.seg", 48)])
def test_other_versions_are_refused_plainly(tmp_path, name, covered, version):
    shutil.copytree(GOLDEN, tmp_path / "store")
    file = tmp_path / "store" / name
    data = file.read_bytes()
    end = len(data) - 4 if covered is None else covered
    changed = data[:8] + struct.pack("<I", version) + data[12:end]
    file.write_bytes(changed + struct.pack("<I", crc32c(changed)) + data[end + 4 :])
    with pytest.raises(
        StoreCorruptError, match=f"{name}: is of format {version}.*knows format 2 alone: export"
    ):
        NativeStore(tmp_path / "store", TABLES, config=CONFIG)
