"""Exports that are damaged or made by an attacker: nothing in them is trusted."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.store.exported_stores import contents
from tests.store.store_model import (
    CAP,
    TABLES,
    put,
)
from tierstore.errors import (
    StoreCorruptError,
    StoreMismatchError,
)
from tierstore.store import import_, open_store
from tierstore.store.files import json_with_checksum


def small_export(tmp_path: Path) -> Path:
    with open_store(tmp_path / "store", "memory", TABLES[:2], CAP) as store:
        put(store, 1, range(4))
        store.commit(b"m", tag="t")
        store.export(tmp_path / "export")
    return tmp_path / "export"


def test_every_byte_flipped_and_every_length(tmp_path):
    folder = small_export(tmp_path)
    whole = contents(tmp_path / "store")
    for file in folder.iterdir():
        data = file.read_bytes()
        step = 1 if file.name == "EXPORT.json" else 13
        places = range(0, len(data), step)
        damaged = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in places]
        damaged += [data[:length] for length in places[::7]] + [data + b"\0"]
        for number, content in enumerate(damaged):
            file.write_bytes(content)
            try:
                import_(folder, tmp_path / "again", "memory")
            except (StoreCorruptError, StoreMismatchError):
                assert not (tmp_path / "again").exists()
                continue
            # Only the checksum's own name and blanks behind the JSON may change unseen.
            assert file.name == "EXPORT.json", (file.name, number)
            assert contents(tmp_path / "again") == whole
            shutil.rmtree(tmp_path / "again")
        file.write_bytes(data)


def changed(content: dict, **changes) -> dict:
    return {**content, **changes}


HOSTILE_SHARDS = {
    "path": {"file": "../../store/memory/commit-000000000001"},
    "absolute": {"file": "/etc/passwd"},
    "name": {"file": "00001-00000.safetensors/../x"},
    "rows": {"rows": 1 << 47},
    "many rows": {"rows": 1 << 60},
    "negative": {"rows": -1},
    "float": {"rows": 4.0},
    "no checksums": {"crc32": {}},
    "checksums": {"crc32": {"header": "x", "ids": None, "weights": [], "state": 0}},
}


@pytest.mark.parametrize("change", HOSTILE_SHARDS)
def test_hostile_shards(tmp_path, change):
    """With a right checksum over the JSON: nothing outside is read, nothing large is allocated."""
    folder = small_export(tmp_path)
    content = json.loads((folder / "EXPORT.json").read_text())
    del content["crc32"]
    (shard,) = content["tables"][1]["shards"]
    shard.update(HOSTILE_SHARDS[change])
    (folder / "EXPORT.json").write_bytes(json_with_checksum(content))
    with pytest.raises(StoreCorruptError):
        import_(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"tables": None},
        {"tables": [3]},
        {"tables": [{"shards": []}]},
        {"format": 3},
        {"format": None},
        {"commit": 5},
        {"commit": {"id": 1, "tag": "x", "unix_nanoseconds": 0, "meta": "not base64!"}},
    ],
)
def test_hostile_descriptions(tmp_path, changes):
    folder = small_export(tmp_path)
    content = json.loads((folder / "EXPORT.json").read_text())
    del content["crc32"]
    (folder / "EXPORT.json").write_bytes(json_with_checksum({**content, **changes}))
    with pytest.raises((StoreCorruptError, StoreMismatchError)):
        import_(folder, tmp_path / "again")


def test_hostile_files(tmp_path):
    folder = small_export(tmp_path)
    shard = folder / "00001-00000.safetensors"
    data = shard.read_bytes()
    content = json.loads((folder / "EXPORT.json").read_text())
    del content["crc32"]

    def refused(match: str) -> None:
        (folder / "EXPORT.json").write_bytes(json_with_checksum(content))
        with pytest.raises(StoreCorruptError, match=match):
            import_(folder, tmp_path / "again")
        assert not (tmp_path / "again").exists()

    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    refused("symbolic link")
    shard.unlink()
    os.mkfifo(shard)
    refused("not a regular file")
    shard.unlink()
    with open(shard, "wb") as file:
        file.truncate(1 << 40)
    refused("1099511627776 bytes")
    # Ids that the table does not have, and one id twice, with checksums that are right.
    import zlib

    start = data.index(b"}", 8) and 8 + struct.unpack_from("<Q", data)[0]
    for ids, match in (([0, 1, 2, -1], "ids that table"), ([0, 1, 2, 2], "4 rows of 3 ids")):
        raw = np.array(ids, "<i8").tobytes()
        shard.write_bytes(data[:start] + raw + data[start + 32 :])
        content["tables"][1]["shards"][0]["crc32"]["ids"] = zlib.crc32(raw)
        refused(match)
    (folder / "EXPORT.json").unlink()
    with pytest.raises(StoreMismatchError, match="not an export"):
        import_(folder, tmp_path / "again")
