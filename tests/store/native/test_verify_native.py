"""Verification of the native store: every byte that it has is covered, and what is damaged is named."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.store import store_model
from tests.store.native import test_golden as golden
from tests.store.native.checksums import crc32c
from tests.store.native.test_native_faults import open_on, put, rows_of
from tierstore import _core
from tierstore.keys import make_keys
from tierstore.store import open_store, verify
from tierstore.store.native import NativeConfig, NativeStore
from tierstore.store.verification import VerifyReport, fill_report

CONFIG = NativeConfig(cap_bytes=1_000_000, segment_bytes=8192, snapshot_min_rows=1, keep=2)
ROW_BYTES = {0: 16, 1: 272}
ROWS = 15


def verify_on(disk, row_bytes=ROW_BYTES) -> VerifyReport:
    report = VerifyReport("disk", "native")
    fill_report(report, _core.verify_store("disk", row_bytes, None, disk), {0: "a", 1: "b"})
    return report


@pytest.fixture(scope="module")
def disk():
    """Full, relocated and unfinished segments, voids, two commits, a saved index."""
    env = _core.MemoryEnv()
    with open_on(env, CONFIG) as store:
        for version in range(1, 3):
            put(store, range(ROWS), version)
        put(store, [i for i in range(ROWS) if i % 5], 4)
        store.compact()
        store.commit(b"first")
        keys = make_keys(0, range(10))
        store.write(keys, rows_of(keys, 3, 16))
        put(store, range(3), 5)
        store.commit(b"whole")
    with open_on(env, CONFIG) as store:  # appending goes on where a commit ended
        put(store, range(2), 6)
        store.commit(b"last")
    return env


def damaged(disk, name: str, contents: bytes):
    image = disk.after_crash(disk.operations(), "kept")
    image.set_contents(f"disk/{name}", contents)
    return image


def test_a_whole_store(disk):
    seen = []
    report = _core.verify_store("disk", ROW_BYTES, lambda done, total: seen.append((done, total)), disk)
    names = disk.list("disk")
    assert (report.findings, report.leftovers, report.foreign) == ([], [], [])
    assert report.files == len(names)
    assert "INDEX" in names
    assert report.index_entries == ROWS + 10
    assert report.commits == 2
    assert seen == sorted(seen)
    assert seen[-1] == (sum(len(disk.contents(f"disk/{name}")) for name in names),) * 2


def test_the_golden_store():
    report = _core.verify_store(str(golden.GOLDEN), {0: 16, 1: 272}, None)
    assert report.findings_total == 0
    assert report.index_entries == 59


def test_every_byte_flipped_is_found(disk):
    """All of them: records, voids, footers, zeros between, the manifest, the saved index."""
    for name in disk.list("disk"):
        whole, image = disk.contents(f"disk/{name}"), damaged(disk, name, b"")
        for at in range(len(whole)):
            if not any(whole[at - at % 512 : at - at % 512 + 512]) and at % 61:
                continue  # padding, sampled
            image.set_contents(
                f"disk/{name}", whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
            )
            found = [item for item in verify_on(image).damage if item.file == f"native/{name}"]
            assert found, (name, at)
            assert name == "MANIFEST" or any(i.offset <= at < i.offset + max(i.bytes, 1) for i in found)


def test_every_truncation_is_found_or_harmless(disk):
    for name in disk.list("disk"):
        whole = disk.contents(f"disk/{name}")
        for length in [*range(0, len(whole), 1 if name == "MANIFEST" else 29), len(whole) - 1]:
            image = damaged(disk, name, whole[:length])
            if verify_on(image).ok:
                with open_on(image, CONFIG) as store:  # then all rows are there: footers can be done without
                    assert store.meta() == b"last"
                    out = np.zeros((ROWS, 272), np.uint8)
                    assert store.read(make_keys(1, range(ROWS)), out).all()


def test_missing_files(disk):
    for name in disk.list("disk"):
        image = disk.after_crash(disk.operations(), "kept")
        image.remove(f"disk/{name}")
        report = verify_on(image)
        assert report.ok == (name == "INDEX")
        assert report.ok or "is missing" in report.damage[0].what


def test_damage_names_rows_commits_and_a_way_out(disk):
    """A row that only the last commit has."""
    with open_on(disk.after_crash(disk.operations(), "kept"), CONFIG) as store:
        commits = [commit.id for commit in store.commits()]
    (place,) = [
        (name, at)
        for name in disk.list("disk")
        if name.endswith(".seg")
        for at in [disk.contents(f"disk/{name}").find(rows_of(make_keys(1, [1]), 6).tobytes())]
        if at >= 0
    ]
    name, at = place
    whole = disk.contents(f"disk/{name}")
    report = verify_on(damaged(disk, name, whole[:at] + b"\xee" + whole[at + 1 :]))
    (item,) = report.damage
    assert (item.file, item.lost, item.tables) == (f"native/{name}", True, ["b"])
    assert item.offset <= at < item.offset + item.bytes == item.offset + 288
    assert item.what == "a record is damaged: checksum mismatch"
    assert item.commits == commits[-1:]
    report.commits = commits
    assert report.whole_commits == commits[:-1]
    assert f"at={commits[0]}" in " ".join(report.advice())


def test_rows_of_a_sealed_segment_are_named(disk):
    """Its footer tells whose the damaged records are."""
    row = rows_of(make_keys(1, [7]), 4).tobytes()
    for name in disk.list("disk"):
        whole = disk.contents(f"disk/{name}")
        if name.endswith(".seg") and (at := whole.find(row)) >= 0:
            report = verify_on(damaged(disk, name, whole[:at] + b"\xee" * 300 + whole[at + 300 :]))
            assert report.damage[0].what == "2 records are damaged: checksum mismatch"
            assert report.damage[0].rows[0] == "table b, id 7"
            return
    pytest.fail("no segment has the row")


def test_rows_of_unknown_tables(disk):
    assert "does not have" in verify_on(disk, {1: 272}).damage[0].what
    assert "other row_bytes" in verify_on(disk, {0: 32, 1: 272}).damage[0].what
    assert verify_on(disk, {}).ok


def test_a_saved_index_that_lies(tmp_path):
    """One of an earlier state, brought back: its checksums are right, its entries are not."""
    with NativeStore(tmp_path, golden.TABLES, config=golden.CONFIG) as store:
        golden.put(store, 1, range(56), 1)
        store.commit(b"")
    shutil.copy(tmp_path / "INDEX", tmp_path / "old")
    with NativeStore(tmp_path, golden.TABLES, config=golden.CONFIG) as store:
        golden.put(store, 1, range(5), 2)
        store.commit(b"")
    assert _core.verify_store(str(tmp_path), {}, None).findings == []
    data = bytearray((tmp_path / "old").read_bytes())
    (tmp_path / "old").unlink()
    header = 16 + int.from_bytes(data[12:16], "little") + 4
    entries = (len(data) - header) // 11
    assert entries >= 56
    first, second = header + 6, header + 17  # swap the locations of two rows
    data[first : first + 5], data[second : second + 5] = data[second : second + 5], data[first : first + 5]
    data[header + 616 : header + 620] = crc32c(bytes(data[header : header + 616])).to_bytes(4, "little")
    (tmp_path / "INDEX").write_bytes(data)
    (finding,) = _core.verify_store(str(tmp_path), {}, None).findings
    assert "the saved index contradicts" in finding.what
    assert not finding.lost


def test_a_device_that_fails_while_it_is_read(disk):
    faulty = _core.FaultEnv(disk)
    faulty.fail("read", 6, 5)
    report = VerifyReport("disk", "native")
    fill_report(report, _core.verify_store("disk", {}, None, faulty), {})
    assert "Input/output error" in report.damage[0].what
    with pytest.raises(KeyboardInterrupt):
        _core.verify_store("disk", {}, interrupt, disk)


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_rows_of_a_forgotten_commit_are_no_footer(tmp_path):
    """The row of the second commit lies where the footer of the first would, and is as long."""
    path = tmp_path / "store"
    with open_store(path, "native", store_model.TABLES, store_model.CAP, keep=2) as store:
        for version in (1, 2):
            store_model.put(store, 0, [0], version)
            store.commit()
    with open_store(path, "native", store_model.TABLES, store_model.CAP, keep=2, at=1) as store:
        store.commit()
        store.commit()
    report = verify(path)
    assert report.ok, report.damage
