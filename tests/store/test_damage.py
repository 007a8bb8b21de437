"""Damaged files: an error that names the file, or the right rows; never other bytes, and never a crash."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest

from tests.store.store_model import CAP, TABLES, get, make_rows, make_store, open_memory, put
from tierstore.errors import StoreCorruptError, TierStoreError
from tierstore.keys import make_keys
from tierstore.store import open_store

ROWS = 200


def make(path, engine):
    with open_store(path, engine, TABLES, CAP) as store:
        put(store, 1, range(ROWS))
        store.commit(b"meta")


def check(path, engine) -> bool:
    """Whether the store opened and returned all rows; damage may be reported, but wrong rows never come."""
    try:
        with open_store(path, engine, TABLES, CAP) as store:
            assert store.meta() == b"meta"
            found, out = get(store, 1, range(ROWS))
            assert found.all()
            assert np.array_equal(out, make_rows(make_keys(1, range(ROWS)), 272))
            return True
    except TierStoreError:
        return False


def test_memory_every_byte_flipped_and_every_length(tmp_path):
    make_store(tmp_path)
    file = tmp_path / "memory" / "commit-000000000001"
    data = file.read_bytes()
    damaged = [data[:length] for length in range(0, len(data), 7)]
    damaged += [data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :] for i in range(0, len(data), 3)]
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(StoreCorruptError, match="commit-000000000001 "):
            open_memory(tmp_path)


def test_rocksdb_flipped_bytes(tmp_path):
    make(tmp_path / "good", "rocksdb")
    (commit,) = (tmp_path / "good" / "rocksdb").glob("commit-*[0-9]")
    reported = 0
    rng = random.Random(0)
    files = [file for file in sorted(commit.iterdir()) if file.suffix == ".sst" or "MANIFEST" in file.name]
    places = [(file, rng.randrange(file.stat().st_size)) for file in files for _ in range(12)]
    for file, place in places:
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        bad = tmp_path / "bad" / file.relative_to(tmp_path / "good")
        data = bytearray(file.read_bytes())
        data[place] ^= 0x40
        bad.write_bytes(data)
        reported += not check(tmp_path / "bad", "rocksdb")
        shutil.rmtree(tmp_path / "bad")
    assert reported > len(places) // 3  # the rest are in properties that reading does not need


@pytest.mark.parametrize("pattern", ["*.sst", "CURRENT", "MANIFEST-*"])
def test_rocksdb_missing_file(tmp_path, pattern):
    make(tmp_path, "rocksdb")
    (commit,) = (tmp_path / "rocksdb").glob("commit-*[0-9]")
    next(commit.glob(pattern)).unlink()
    assert not check(tmp_path, "rocksdb")


def test_rocksdb_falls_back_on_nothing_it_was_not_told(tmp_path):
    """An empty commit folder with a higher number is damage, and the real commit survives the attempt."""
    make(tmp_path, "rocksdb")
    fake = tmp_path / "rocksdb" / "commit-000000000007"
    fake.mkdir()
    with pytest.raises(StoreCorruptError, match="commit-000000000007"):
        open_store(tmp_path, "rocksdb", TABLES, CAP)
    fake.rmdir()
    assert check(tmp_path, "rocksdb")


def test_rocksdb_never_unpickles(tmp_path):
    """The package's settings file could ask for pickled values; it is not taken over."""
    make(tmp_path, "rocksdb")
    (commit,) = (tmp_path / "rocksdb").glob("commit-*[0-9]")
    (commit / "rocksdict-config.json").write_text(json.dumps({"raw_mode": False, "prefix_extractors": {}}))
    assert check(tmp_path, "rocksdb")


def test_lmdb_cut_off(tmp_path):
    make(tmp_path, "lmdb")
    file = tmp_path / "lmdb" / "data.mdb"
    data = file.read_bytes()
    for length in range(1, len(data), 4096 + 512):
        file.write_bytes(data[:length])
        with pytest.raises(StoreCorruptError, match="lmdb"):
            open_store(tmp_path, "lmdb", TABLES, CAP)
    file.write_bytes(data)
    assert check(tmp_path, "lmdb")


def test_rows_of_another_size(tmp_path):
    """As after an edit of TIERSTORE.json by hand."""
    for engine in ("rocksdb", "lmdb", "memory"):
        path = tmp_path / engine
        make(path, engine)
        identity = json.loads((path / "TIERSTORE.json").read_text())
        identity["tables"][1]["row_bytes"] = 288
        (path / "TIERSTORE.json").write_text(json.dumps(identity))
        tables = [*TABLES[:1], TABLES[1].__class__(**identity["tables"][1]), *TABLES[2:]]
        try:
            with open_store(path, engine, tables, CAP) as store:
                assert not store.read(make_keys(1, range(10)), np.zeros((10, 288), np.uint8)).any()
        except StoreCorruptError:
            pass
