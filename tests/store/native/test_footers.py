"""Footers, as docs/reference/formats.md has them: what they hold, and that older ones are read."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.store.native.checksums import crc32c
from tests.store.native.test_golden import CONFIG as GOLDEN_CONFIG
from tests.store.native.test_golden import FOLDERS
from tests.store.native.test_golden import TABLES as GOLDEN_TABLES
from tierstore import _core
from tierstore.errors import StoreCorruptError
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeStore

RECORDS = 51  # rows of 64 bytes, in a block
LARGEST = (1 << 48) - 1


class Slot(NamedTuple):
    key: int
    epoch: int


class Segment(NamedTuple):
    number: int
    relocated: bool
    records: list[Slot]
    voids: int
    footer: list[Slot]
    widths: tuple[int, int, int, int]


def numbers(data: bytes, widths: tuple[int, ...], count: int) -> list[list[int]]:
    """The array of a footer, read bit by bit from the lowest one on."""
    bits = int.from_bytes(data, "little")
    found = []
    for _ in range(count):
        fields = []
        for width in widths:
            fields.append(bits & ((1 << width) - 1))
            bits >>= width
        found.append(fields)
    assert bits == 0
    return found


def read(file: Path) -> Segment | None:
    """None when the segment has no footer."""
    data = file.read_bytes()
    number, flags = struct.unpack_from("<II", data, 24)
    trailer = data[-64:]
    if trailer[:8] != b"TSTFOOTR":
        return None
    version, of, flags_again, slots, voids, array_crc, offset = struct.unpack_from("<6IQ", trailer, 8)
    widths = tuple(trailer[40:44])
    assert (version, of, flags_again) == (3, number, flags)
    assert trailer[44:60] == bytes(16)
    assert struct.unpack("<I", trailer[60:])[0] == crc32c(trailer[:60])
    array_bytes = (slots * sum(widths) + 7) // 8
    assert array_crc == crc32c(data[offset : offset + array_bytes])
    assert not any(data[offset + array_bytes : -64])
    records = []
    for slot in range(slots):
        _, epoch, key = struct.unpack_from("<IIQ", data, 4096 * (1 + slot // RECORDS) + slot % RECORDS * 80)
        records.append(Slot(key, epoch))
    footer = []
    for is_void, id, table, age in numbers(data[offset : offset + array_bytes], widths, slots):
        footer.append(Slot(table << 48 | id, 0 if is_void else number - age))
    assert len(data) == -(-(offset + array_bytes + 64) // 4096) * 4096
    return Segment(number, bool(flags & 1), records, voids, footer, widths)


def segments(folder: Path) -> list[Segment]:
    return [found for file in sorted(folder.glob("*.seg")) if (found := read(file)) is not None]


def filled(folder: Path, tables: list[int], ids: np.ndarray, versions: int, commits: bool) -> list[Segment]:
    """Segments of three blocks, in some of which compaction has left copies."""
    specs = [StoredTable(f"t{table}", table, 1 << 48, 16, 64) for table in tables]
    rng = np.random.default_rng(1)
    with NativeStore(folder, specs, config=NativeConfig(1 << 20, segment_bytes=16_384)) as store:
        for version in range(versions):
            some = ids if version == 0 else rng.permutation(ids)[: len(ids) // 2]
            for table in tables:
                store.write(make_keys(table, some), np.full((len(some), 64), version, np.uint8))
                if commits:
                    store.commit(b"%d" % version)
        store.compact()
        store.commit(b"last")
    found = segments(folder)
    report = _core.verify_store(str(folder), dict.fromkeys(tables, 64), None)
    assert report.findings_total == 0, report.findings
    return found


@pytest.mark.parametrize("commits", [False, True], ids=["", "commits"])
@pytest.mark.parametrize(
    ("tables", "ids"),
    [
        ([0], np.arange(1000)),
        ([0, 1, 3], np.arange(400)),
        ([65535], np.array([0, *range(LARGEST - 998, LARGEST + 1)])),
        ([0, 65535], np.array([0, *range(LARGEST - 498, LARGEST + 1)])),
    ],
    ids=["one table", "three", "largest keys", "all bits"],
)
def test_a_footer_has_the_keys_of_the_records(tmp_path, tables, ids, commits):
    found = filled(tmp_path, tables, ids, 4, commits)
    assert any(segment.relocated for segment in found)
    assert any(segment.voids for segment in found) or not commits
    for segment in found:
        assert segment.voids == sum(record.epoch == 0 for record in segment.records)
        assert segment.footer == segment.records
        ids = max(record.key & LARGEST for record in segment.records)
        table = max(record.key >> 48 for record in segment.records)
        assert segment.widths[0] == (segment.voids > 0)
        assert segment.widths[1:3] == (ids.bit_length(), table.bit_length())
        assert (segment.widths[3] > 0) == segment.relocated


def test_a_row_of_table_0_and_id_0_takes_no_bits(tmp_path):
    """The smallest footer is its trailer."""
    specs = [StoredTable("t", 0, 1 << 48, 16, 64)]
    with NativeStore(tmp_path, specs, config=NativeConfig(1 << 20, segment_bytes=8192)) as store:
        for version in range(RECORDS):
            store.write(make_keys(0, [0]), np.full((1, 64), version, np.uint8))
        store.commit()
        (segment,) = segments(tmp_path)
        assert segment.widths == (0, 0, 0, 0)
        assert segment.footer == [Slot(0, segment.number)] * RECORDS
    with NativeStore(tmp_path, specs, config=NativeConfig(1 << 20)) as store:
        out = np.zeros((1, 64), np.uint8)
        assert store.read(make_keys(0, [0]), out).all()
        assert (out == RECORDS - 1).all()


@pytest.mark.parametrize("has_footers", [True, False])
@pytest.mark.parametrize("version", [2, 3])
def test_footers_of_both_versions_are_read(tmp_path, version, has_footers):
    """In place of damaged records, without an INDEX: nothing else tells their keys."""
    full = 0
    for file in FOLDERS[version - 2].iterdir():
        data = bytearray(file.read_bytes())
        if data[-64:-56] == b"TSTFOOTR":
            assert struct.unpack_from("<I", data, len(data) - 56)[0] == version
            full += 1
            data[4096 + 100] ^= 1
            data[-1] ^= 0 if has_footers else 1
        if file.name != "INDEX":
            (tmp_path / file.name).write_bytes(data)
    assert full >= 2
    if not has_footers:
        with pytest.raises(StoreCorruptError, match="has no valid footer that tells its key"):
            NativeStore(tmp_path, GOLDEN_TABLES, config=GOLDEN_CONFIG)
        return
    with NativeStore(tmp_path, GOLDEN_TABLES, config=GOLDEN_CONFIG) as store:
        assert store.stats().rows == 59
