"""Scans: every stored row once, of every registered engine."""

from __future__ import annotations

import threading
from itertools import zip_longest

import numpy as np
import pytest

from tests.store.store_model import ROW_BYTES, add_scanned, expected_scan, put, scanned
from tierstore.errors import ClosedError, InputError
from tierstore.keys import MAX_ID, make_keys


def test_every_row_once_in_its_newest_version(opened):
    store = opened()
    expected = {}
    for table in ROW_BYTES:
        put(store, table, range(0, 3000, 3), version=1)
        expected |= expected_scan(table, range(0, 3000, 3), 1)
    store.commit(b"")
    put(store, 1, range(0, 1500, 2), version=2)
    expected |= expected_scan(1, range(0, 1500, 2), 2)
    assert scanned(store) == expected
    store.compact()
    store.commit(b"")
    assert scanned(store) == expected
    store.close()
    store = opened(read_only=True)
    assert scanned(store) == expected
    assert store.count(1) == len({*range(0, 3000, 3), *range(0, 1500, 2)})


def test_nothing_stored(opened):
    store = opened()
    assert list(store.scan()) == []
    assert list(store.scan([])) == []
    assert store.count(1) == 0
    put(store, 1, [])
    assert list(store.scan()) == []


def test_some_tables(opened):
    store = opened()
    for table in ROW_BYTES:
        put(store, table, range(500), version=table)
    assert scanned(store, [7]) == expected_scan(7, range(500), 7)
    assert scanned(store, [65535, 0, 0]) == expected_scan(0, range(500)) | expected_scan(
        65535, range(500), 65535
    )
    assert list(store.scan([])) == []
    assert [store.count(table) for table in ROW_BYTES] == [500] * 4
    for unknown in (3, -1):
        with pytest.raises(InputError, match="unknown"):
            store.scan([1, unknown])
        with pytest.raises(InputError, match="unknown"):
            store.count(unknown)


def test_ids_up_to_48_bits(opened):
    store = opened()
    ids = [0, 1, 2**31, 2**32, 2**47, MAX_ID]
    for table in (1, 65535):
        put(store, table, ids)
    assert scanned(store) == expected_scan(1, ids) | expected_scan(65535, ids)


@pytest.mark.parametrize("rows", [15_419, 15_420, 15_421, 65_535, 65_536, 65_537])
def test_at_the_ends_of_batches(opened, rows):
    """4 MiB of rows have 15,420; listings have chunks of 65,536 keys."""
    store = opened()
    put(store, 1, range(rows))
    found = np.concatenate([keys for keys, _ in store.scan()])
    assert np.array_equal(np.sort(found), make_keys(1, range(rows)))


def test_several_at_a_time(opened):
    store = opened()
    put(store, 1, range(40_000))
    expected = expected_scan(1, range(40_000))
    found = [{}, {}, {}]
    # Where a batch ends depends on what is already in its file.
    for batches in zip_longest(*(store.scan() for _ in found)):
        for rows, batch in zip(found, batches, strict=True):
            if batch is not None:
                add_scanned(rows, *batch)
    assert found == [expected] * 3


def test_batches_may_be_kept_and_changed(opened):
    store = opened()
    put(store, 1, range(40_000))
    batches = list(store.scan())
    for keys, rows in batches:
        keys[:] = 0
        rows[:] = 0
    assert scanned(store) == expected_scan(1, range(40_000))


def test_rows_written_between_batches(opened):
    """Rows of the beginning come once, as they were at some time; new rows come once or not at all."""
    store, count = opened(), 50_000
    put(store, 1, range(count), version=1)
    store.commit(b"")
    rows, version = {}, 1
    for batch in store.scan():
        add_scanned(rows, *batch)
        if version == 5:
            continue
        version += 1
        put(store, 1, range(0, count, version), version)
        put(store, 1, range(count + 50 * version, count + 50 * version + 50), version)
    possible = [expected_scan(1, range(2 * count), some) for some in range(1, version + 1)]
    assert rows.keys() >= set(make_keys(1, range(count)).tolist())
    assert all(any(row == of_version[key] for of_version in possible) for key, row in rows.items())


def test_beside_a_writer_in_another_thread(opened):
    store = opened()
    put(store, 1, range(30_000))
    stop = threading.Event()

    def write():
        version = 0
        while not stop.is_set():
            version += 1
            put(store, 1, range(version % 7, 30_000, 7), version % 2)
            if version % 20 == 0:
                store.commit(b"")

    thread = threading.Thread(target=write)
    thread.start()
    either = [expected_scan(1, range(30_000), version) for version in (0, 1)]
    try:
        for _ in range(20):
            rows = scanned(store)
            assert rows.keys() == either[0].keys()
            assert all(row in (either[0][key], either[1][key]) for key, row in rows.items())
    finally:
        stop.set()
        thread.join(60)


def test_after_close(opened):
    store = opened()
    put(store, 1, range(100_000))
    begun, waiting = store.scan(), store.scan()
    next(begun)
    store.close()
    with pytest.raises(ClosedError):
        list(begun)
    with pytest.raises(ClosedError):
        next(waiting)
    with pytest.raises(ClosedError):
        list(store.scan())
    with pytest.raises(ClosedError):
        store.count(1)
