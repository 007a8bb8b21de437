"""Scans of the native store beside writers and compaction, at every limit, and over damaged records."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from tests.store.native.test_limits import SMALL, in_chunk, open_on, put, rows_of
from tests.store.native.test_native_interrupts import Alarm, alarm, ring
from tierstore import _core
from tierstore.errors import InputError, StoreCorruptError, StoreIOError
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeStore

HEADER_BYTES = 16


class Scanned:
    """Versions of the rows that the batches of a scan have given, each once; -1 for none."""

    def __init__(self, rows: int, row_bytes: int = 272) -> None:
        self.versions = np.full(rows, -1)
        self.row_bytes = row_bytes

    def add(self, keys: np.ndarray, rows: np.ndarray) -> None:
        assert rows.shape == (len(keys), self.row_bytes)
        ids = keys.astype(np.int64)
        assert len(np.unique(ids)) == len(ids)
        assert (self.versions[ids] == -1).all()
        first = rows.view(np.uint64)[:, 0]
        self.versions[ids] = first - keys * np.uint64(1_000_003)
        expected = rows_of(ids, 0, self.row_bytes).view(np.uint64) + self.versions[ids, None].astype(
            np.uint64
        )
        assert np.array_equal(rows.view(np.uint64), expected)

    def all_of(self, batches) -> np.ndarray:
        for batch in batches:
            self.add(*batch)
        return self.versions


def versions_of(store: NativeStore, rows: int, row_bytes: int = 272) -> list[int]:
    return Scanned(rows, row_bytes).all_of(store.scan()).tolist()


@pytest.mark.parametrize("row_bytes", [16, 48, 272, 2064])
@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_at_the_ends_of_chunks_and_segments(row_bytes, off, chunks):
    """A segment holds two chunks. Rows are in memory, in files, or in both."""
    env = _core.MemoryEnv()
    rows = chunks * in_chunk(row_bytes, SMALL.chunk_bytes) + off
    store = open_on(env, row_bytes, segment_bytes=4096 + 2 * SMALL.chunk_bytes)
    put(store, range(rows), 1, row_bytes)
    assert versions_of(store, rows, row_bytes) == [1] * rows
    store.commit(b"")
    assert versions_of(store, rows, row_bytes) == [1] * rows
    put(store, range(rows, rows + 5), 1, row_bytes)
    put(store, range(0, rows, 2), 2, row_bytes)
    expected = [2, 1] * (rows // 2 + 1)
    expected = expected[:rows] + [1] * 5
    assert versions_of(store, rows + 5, row_bytes) == expected
    store.commit(b"")
    store.close()
    store = open_on(env, row_bytes, segment_bytes=4096 + 2 * SMALL.chunk_bytes)
    put(store, range(rows + 5, rows + 7), 1, row_bytes)  # behind where the commit ended, within a chunk
    assert versions_of(store, rows + 7, row_bytes) == [*expected, 1, 1]
    store.compact()
    assert versions_of(store, rows + 7, row_bytes) == [*expected, 1, 1]
    store.close()


@pytest.mark.parametrize("rows", [1023, 1024, 1025, 14 * 1024 - 1, 14 * 1024, 14 * 1024 + 1, 30_000])
def test_at_the_ends_of_lookups_and_stretches(rows):
    """1,024 rows are looked up at once; 4 MiB, which hold 14 · 1,024 of these rows, are read at once."""
    with open_on(_core.MemoryEnv()) as store:
        put(store, range(rows), 3)
        store.commit(b"")
        assert versions_of(store, rows) == [3] * rows
        put(store, range(rows // 2), 4)
        store.commit(b"")
        assert versions_of(store, rows) == [4] * (rows // 2) + [3] * (rows - rows // 2)


def test_the_largest_rows():
    with open_on(_core.MemoryEnv(), 256 << 10, segment_bytes=3 << 20) as store:
        put(store, range(40), 1, 256 << 10)
        assert versions_of(store, 40, 256 << 10) == [1] * 40
        store.commit(b"")
        put(store, range(0, 40, 3), 2, 256 << 10)
        assert versions_of(store, 40, 256 << 10) == [1 + (i % 3 == 0) for i in range(40)]


def test_several_row_sizes_in_one_scan():
    tables = [StoredTable(f"t{size}", size // 16, 1 << 40, 4, size) for size in (16, 32, 48)]
    config = NativeConfig(cap_bytes=1 << 30, segment_bytes=8192, limits=SMALL)
    with NativeStore("disk", tables, config=config, env=_core.MemoryEnv()) as store:
        for spec in tables:
            store.write(make_keys(spec.index, range(5000)), rows_of(range(5000), 0, spec.row_bytes))
        found: dict[int, int] = {}
        for keys, rows in store.scan([1, 3]):
            assert np.array_equal(rows, rows_of(keys & np.uint64((1 << 48) - 1), 0, rows.shape[1]))
            assert (keys >> np.uint64(48) == rows.shape[1] // 16).all()
            found[rows.shape[1]] = found.get(rows.shape[1], 0) + len(keys)
        assert found == {16: 5000, 48: 5000}


ROWS = 3000


@pytest.mark.parametrize("segment_bytes", [8192, 16_384, 36_864])
@pytest.mark.parametrize("seed", range(6))
def test_steps_between_writes_and_compaction(segment_bytes, seed):
    """A call visits four segments. Between two of them rows move out of segments that were visited, and of
    others, and segments go; every row comes once, as it was at some time since the scan began."""
    random = np.random.default_rng(seed)
    with open_on(_core.MemoryEnv(), segment_bytes=segment_bytes, cap_bytes=16 << 20) as store:
        put(store, range(ROWS), 0)
        newest = np.zeros(ROWS, int)
        for round_ in range(12):
            least = newest.copy()
            found = Scanned(2 * ROWS)
            for batch in store.scan():
                found.add(*batch)
                if random.random() < 0.7:
                    start, step = random.integers(ROWS), int(random.integers(1, 9))
                    ids = np.arange(start, ROWS, step)
                    newest[ids] += 1
                    for version in np.unique(newest[ids]):
                        put(store, ids[newest[ids] == version], int(version))
                if random.random() < 0.2:
                    store.commit(b"")
                if random.random() < 0.2:
                    store.compact()
                if random.random() < 0.2:
                    put(store, [ROWS + round_], 0)  # new rows
            versions = found.versions[:ROWS]
            assert (versions >= least).all()
            assert (versions <= newest).all()


@pytest.mark.parametrize("chunk_bytes", [16_384, 2 << 20])
def test_beside_a_writer_and_compaction_that_never_end(tmp_path, chunk_bytes):
    """In a store so full that every write needs a segment which compaction has emptied."""
    rows = 20_000
    config = NativeConfig(
        cap_bytes=9 << 20,
        segment_bytes=128 << 10,
        limits=None if chunk_bytes == 2 << 20 else SMALL,
    )
    store = NativeStore(tmp_path, [StoredTable("t", 0, 1 << 40, 68, 272)], config=config)
    put(store, range(rows), 0)
    done, written, stop = [0], [0], threading.Event()
    failures: list[BaseException] = []

    def write():
        random = np.random.default_rng(0)
        try:
            while not stop.is_set():
                written[0] += 1
                order = random.permutation(rows)
                for start in range(0, rows, 500):
                    put(store, order[start : start + 500], written[0])
                    if start % 2000 == 0:
                        store.commit(b"")
                done[0] = written[0]
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        end = time.monotonic() + 4
        while time.monotonic() < end and not failures:
            least = done[0]
            versions = Scanned(rows).all_of(store.scan())
            assert versions.min() >= least
            assert versions.max() <= written[0]
    finally:
        stop.set()
        thread.join(60)
    assert not failures
    assert store.counters()["relocated_rows"] > 0
    store.close()


def test_a_scan_that_waits_takes_no_space():
    """Its user overwrites all rows of a full store meanwhile; the segments of the beginning are all gone."""
    with open_on(_core.MemoryEnv(), segment_bytes=16_384, cap_bytes=2 << 20) as store:
        put(store, range(ROWS), 0)
        store.commit(b"")
        scan, found = store.scan(), Scanned(ROWS)
        found.add(*next(scan))
        first = found.versions >= 0
        for version in range(1, 6):
            for start in range(0, ROWS, 300):
                put(store, range(start, start + 300), version)
                store.commit(b"")
        store.compact()
        assert store.stats().disk_bytes < 2 << 20
        versions = found.all_of(scan)
        assert (versions == np.where(first, 0, 5)).sum() >= ROWS - 4 * 60  # batches that were read with it
        assert (np.isin(versions, [0, 5])).all()


def test_scans_that_are_left_alone_cost_nothing_later():
    with open_on(_core.MemoryEnv(), segment_bytes=16_384) as store:
        put(store, range(ROWS), 0)
        for version in range(1, 4):
            scans = [store.scan() for _ in range(3)]
            next(scans[0])
            scans[1].close()  # type: ignore[attr-defined]
            del scans
            put(store, range(ROWS), version)
        assert versions_of(store, ROWS) == [3] * ROWS


# -- damage ------------------------------------------------------------------------------

ID = 100


def damage(
    env: _core.MemoryEnv, id: int, version: int, at: int = HEADER_BYTES, cut_footers: bool = False
) -> str:
    """Flip a bit of the record of this row version, ``at`` bytes from its begin; return where it is."""
    row = rows_of([id], version).tobytes()
    (place,) = [
        (name, content.index(row) - HEADER_BYTES)
        for name in env.list("disk")
        if name.endswith(".seg") and row in (content := env.contents(f"disk/{name}"))
    ]
    name, offset = place
    content = bytearray(env.contents(f"disk/{name}"))
    content[offset + at] ^= 4
    if cut_footers:
        content[-8] ^= 1
    env.set_contents(f"disk/{name}", bytes(content))
    return rf"{name}: the record at offset {offset} \(table 0, id {id}\) is damaged: checksum mismatch"


@pytest.fixture(params=[16_384, 1 << 20], ids=["full segments", "one segment"])
def two_versions(request):
    """Rows of version 1, half of which are superseded by version 2, in files."""
    env = _core.MemoryEnv()
    with open_on(env, segment_bytes=request.param) as store:
        put(store, range(500), 1)
        put(store, range(0, 500, 2), 2)
        store.commit(b"")
    return env


EXPECTED = [2, 1] * 250


@pytest.mark.parametrize("cut_footers", [False, True])
@pytest.mark.parametrize("at", [0, 4, 8, 15, HEADER_BYTES, HEADER_BYTES + 271])
def test_damaged_records(two_versions, at, cut_footers):
    """In the checksum, the epoch, the key and the row."""
    with open_on(two_versions, read_only=True) as store:
        damage(two_versions, ID, 1, at, cut_footers)
        assert versions_of(store, 500) == EXPECTED  # superseded
        where = damage(two_versions, ID, 2, at, cut_footers)
        with pytest.raises(StoreCorruptError, match=where):
            versions_of(store, 500)
        with pytest.raises(StoreCorruptError, match=where):
            store.read(make_keys(0, [ID]), np.zeros((1, 272), np.uint8))


def test_a_damaged_row_that_is_overwritten_during_the_scan():
    env = _core.MemoryEnv()
    with open_on(env) as store:
        put(store, range(500), 1)
        store.commit(b"")
        damage(env, ID, 1)
        scan = store.scan()
        put(store, [ID], 2)
        assert Scanned(500).all_of(scan).tolist() == [1 + (i == ID) for i in range(500)]


def test_damage_ends_a_scan(two_versions):
    with open_on(two_versions, read_only=True) as store:
        damage(two_versions, ID, 2)
        core = store._core
        scan = core.scan([0])
        with pytest.raises(StoreCorruptError):
            list(iter(lambda: core.next_rows(scan), []))
        with pytest.raises(InputError, match="the scan was ended by an error; begin another one"):
            core.next_rows(scan)


def test_damage_is_told_at_once():
    """Not when the other 200 segments are read."""
    env = _core.MemoryEnv()
    with open_on(env, segment_bytes=16_384) as store:
        put(store, range(ROWS * 3), 1)
        store.commit(b"")
        where = damage(env, 0, 1)
        calls = 0
        with pytest.raises(StoreCorruptError, match=where):  # noqa: PT012
            for _ in store.scan():
                calls += 1
        assert calls <= 4


def test_files_that_end_early(two_versions):
    with open_on(two_versions, read_only=True) as store:
        for name in two_versions.list("disk"):
            if name.endswith(".seg"):
                two_versions.set_contents(f"disk/{name}", two_versions.contents(f"disk/{name}")[:5000])
        with pytest.raises(StoreCorruptError, match="is damaged: the file ends before its end"):
            versions_of(store, 500)


def test_a_device_that_cannot_read(two_versions):
    env = _core.FaultEnv(two_versions)
    with open_on(env, read_only=True) as store:
        env.fail("read", 1, 5)  # is read again, row by row
        assert versions_of(store, 500) == EXPECTED
        env.fail("read", 1, 5, forever=True)
        with pytest.raises(StoreIOError, match=r"\.seg: read"):
            versions_of(store, 500)
        env.heal()
        assert versions_of(store, 500) == EXPECTED


@pytest.mark.parametrize("fault", ["flip_bits", "shorten_reads"])
def test_what_is_damaged_on_the_way_is_read_again(two_versions, fault):
    env = _core.FaultEnv(two_versions)
    with open_on(env, read_only=True) as store:
        right = wrong = 0
        for nth in (2, 3, 5, 40):
            getattr(env, fault)(nth)
            try:
                assert versions_of(store, 500) == EXPECTED
                right += 1
            except StoreCorruptError:
                wrong += 1
        assert right > 0
        assert wrong < 4


# -- signals -----------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_signals(tmp_path):
    env = _core.FaultEnv(_core.posix_env(str(tmp_path)))
    config = NativeConfig(cap_bytes=1 << 30, segment_bytes=128 << 10)
    store = NativeStore(tmp_path, [StoredTable("t", 0, 1 << 40, 68, 272)], config=config, env=env)
    put(store, range(40_000), 0)
    store.commit(b"")
    env.slow_down(0.2)  # of 88 segments: four are read in two turns
    calls: list[float] = []
    with alarm(lambda: calls.append(time.monotonic()), 0.05, 0.05):
        scan, found = store.scan(), Scanned(40_000)
        found.add(*next(scan))
    assert len(calls) > 1
    assert max(b - a for a, b in pairwise(calls)) < 0.3
    with alarm(ring), pytest.raises(Alarm):
        found.all_of(scan)
    env.heal()
    assert versions_of(store, 40_000) == [0] * 40_000
    store.close()
