"""TIERSTORE.json: which differences are refused, and what a damaged one is called."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from tests.store.store_model import CAP, TABLES, folder_contents, make_store, open_memory
from tierstore.errors import ConfigError, StoreCorruptError, StoreMismatchError
from tierstore.store import StoredTable, open_store, read_identity

WIDE = TABLES[1]


def test_tables_are_the_same_whatever_order_and_sequence_type(tmp_path):
    path = tmp_path / "s"
    make_store(path, [replace(WIDE, optimizer={"name": "Adam", "betas": (0.9, 0.999)})])
    open_memory(path, (replace(WIDE, optimizer={"betas": [0.9, 0.999], "name": "Adam"}),)).close()
    make_store(tmp_path / "t")
    open_memory(tmp_path / "t", TABLES[::-1]).close()


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("num_embeddings", 7, "num_embeddings is 281474976710656 there, but 7 was asked for"),
        ("embedding_dim", 32, "embedding_dim is 64 there, but 32"),
        ("row_bytes", 288, "row_bytes is 272 there, but 288"),
        (
            "optimizer",
            {"name": "Adam"},
            r"optimizer is {'name': 'RowWiseAdagrad'} there, but {'name': 'Adam'}",
        ),
        ("seed", 2, "seed is 1 there, but 2"),
        ("init", {"rule": "normal"}, r"init is {'rule': 'uniform'} there"),
        ("index", 3, "index is 1 there, but 3"),
    ],
)
def test_every_field_of_a_table_must_match(tmp_path, field, value, text):
    path = tmp_path / "s"
    make_store(path, [WIDE])
    before = folder_contents(path)
    with pytest.raises(StoreMismatchError, match=f"'wide': {text}"):
        open_memory(path, [replace(WIDE, **{field: value})])
    assert folder_contents(path) == before


def test_another_engine_or_other_tables_are_refused(tmp_path):
    path = tmp_path / "s"
    make_store(path, TABLES[:2])
    before = folder_contents(path)
    with pytest.raises(StoreMismatchError, match='written by engine "memory", not "lmdb"'):
        open_store(path, "lmdb", TABLES[:2], CAP)
    with pytest.raises(
        StoreMismatchError, match=r"rows of table 'small', which was not asked for \(asked: \['x'\]"
    ):
        open_memory(path, [StoredTable("x", 0, 10, 4, 16)])
    with pytest.raises(StoreMismatchError, match="'wide', which was not asked for"):
        open_memory(path, TABLES[:1])
    assert folder_contents(path) == before


def test_tables_are_added_when_the_others_match(tmp_path):
    path = tmp_path / "s"
    make_store(path, TABLES[:2])
    open_memory(path, TABLES).close()
    assert read_identity(path).tables == TABLES
    with pytest.raises(StoreMismatchError, match="'other', which was not asked for"):
        open_memory(path, TABLES[:2])


def test_tables_that_contradict_each_other(tmp_path):
    with pytest.raises(ConfigError, match="'wide' and 'wide' have the same"):
        open_memory(tmp_path / "s", [WIDE, replace(WIDE, index=5)])
    with pytest.raises(ConfigError, match="'wide' and 'w2' have the same name or index 1"):
        open_memory(tmp_path / "s", [WIDE, replace(WIDE, name="w2")])
    with pytest.raises(ConfigError, match="cannot be stored"):
        open_memory(tmp_path / "s", [replace(WIDE, init={"bound": float("nan")})])
    with pytest.raises(ConfigError, match="known engines: native, rocksdb"):
        open_store(tmp_path / "s", "rocks", TABLES, CAP)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("index", 65536),
        ("num_embeddings", 0),
        ("embedding_dim", 0),
        ("row_bytes", 20),
        ("row_bytes", 16),
    ],
)
def test_impossible_tables(field, value):
    with pytest.raises(ConfigError):
        replace(WIDE, **{field: value})


GOOD = {"format": 1, "engine": "memory", "tables": []}
TABLE = {
    "name": "t",
    "index": 0,
    "num_embeddings": 10,
    "embedding_dim": 4,
    "row_bytes": 16,
    "optimizer": {},
    "seed": 0,
    "init": {},
}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[" * 100_000, "damaged"),
        ([], "not a JSON object"),
        ({**GOOD, "format": "1"}, "format '1'"),
        ({**GOOD, "format": True}, "format True"),
        ({**GOOD, "engine": 3}, "engine 3"),
        ({**GOOD, "tables": {}}, "tables is not a list"),
        ({**GOOD, "tables": [3]}, "exactly the fields"),
        ({**GOOD, "tables": [{**TABLE, "more": 1}]}, "exactly the fields"),
        ({**GOOD, "tables": [{**TABLE, "seed": 1.5}]}, "seed 1.5"),
        ({**GOOD, "tables": [{**TABLE, "init": []}]}, r"init \[\]"),
        ({**GOOD, "tables": [{**TABLE, "row_bytes": 1 << 62 | 1}]}, "multiple of 16"),
        ({**GOOD, "tables": [TABLE, TABLE]}, "same name or index"),
        ({**GOOD, "tables": [{**TABLE, "weight_dtype": "fp8"}]}, "weight dtype 'fp8' is unknown"),
        ({**GOOD, "tables": [{**TABLE, "state_dtype": 2}]}, "state_dtype 2"),
        ({**GOOD, "format": 3}, "devices is not a list"),
        ({**GOOD, "format": 3, "devices": []}, "devices is not a list"),
        ({**GOOD, "format": 3, "devices": [{"id": "a"}]}, "devices is not a list"),
        ({**GOOD, "format": 3, "devices": [{"id": "a", "path": "b"}] * 2}, "devices is not a list"),
    ],
)
def test_damaged_identity(tmp_path, content, text):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / "TIERSTORE.json").write_bytes(data)
    with pytest.raises(StoreCorruptError, match=text):
        read_identity(tmp_path)
    with pytest.raises(StoreCorruptError, match=text):
        open_memory(tmp_path)


def test_dtypes_of_rows_are_part_of_the_identity(tmp_path):
    """A store of float32 rows is described as before there were dtypes."""
    table = StoredTable(**TABLE)
    short = replace(table, weight_dtype="bf16", state_dtype="bf16")
    for spec, version in ((table, 1), (short, 2)):
        path = tmp_path / str(version)
        open_store(path, "memory", [spec]).close()
        written = json.loads((path / "TIERSTORE.json").read_text())
        assert written["format"] == version
        assert ("weight_dtype" in written["tables"][0]) == (version == 2)
        assert read_identity(path).tables == (spec,)
    with pytest.raises(StoreMismatchError, match="weight_dtype is 'bf16' there, but 'fp32' was asked for"):
        open_store(tmp_path / "2", "memory", [table])


def test_identity_of_a_newer_version(tmp_path):
    (tmp_path / "TIERSTORE.json").write_text(json.dumps({**GOOD, "format": 4}))
    with pytest.raises(
        StoreMismatchError, match="has format 4, but this tierstore reads up to format 3; upgrade"
    ):
        open_memory(tmp_path)


def test_identity_file_of_absurd_size(tmp_path):
    with open(tmp_path / "TIERSTORE.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreCorruptError, match="1099511627776 bytes, more than"):
        open_memory(tmp_path)
