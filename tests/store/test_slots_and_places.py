"""Reads into chosen slots, writes from them, and the places of rows, as every engine gives them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.store.store_model import assert_holds, make_rows, put
from tierstore.errors import InputError
from tierstore.keys import make_keys
from tierstore.store.protocol import NOWHERE

KEYS = make_keys(1, range(4))
SLOTS = np.array([5, 0, 7, 2], np.int32)


def test_rows_go_to_the_slots_that_are_named(opened):
    """From files as well as from what is still in memory; other rows stay as they are."""
    store = opened()
    put(store, 1, range(0, 2000, 2))
    store.commit()
    store.close()
    store = opened()
    put(store, 1, range(100, 200, 2), version=1)
    ids = np.random.default_rng(0).permutation(2000)[:700]
    keys, slots = make_keys(1, ids), np.random.default_rng(1).permutation(900)[:700].astype(np.int32)
    out = np.full((900, 272), 0xEE, np.uint8)
    found = store.read(keys, out, slots)
    assert found.dtype == np.bool_
    assert np.array_equal(found, ids % 2 == 0)
    new = (ids >= 100) & (ids < 200)
    assert np.array_equal(out[slots[found & ~new]], make_rows(keys[found & ~new], 272))
    assert np.array_equal(out[slots[found & new]], make_rows(keys[found & new], 272, 1))
    others = np.setdiff1d(np.arange(900), slots)
    assert (out[others] == 0xEE).all()


def test_slots_of_no_rows_and_of_every_row(opened):
    store = opened()
    put(store, 1, range(4))
    out = np.full((8, 272), 0xEE, np.uint8)
    assert store.read(KEYS[:0], out, SLOTS[:0]).shape == (0,)
    assert (out == 0xEE).all()
    assert store.read(KEYS, out[:4], np.array([3, 2, 1, 0], np.int32)).all()
    assert np.array_equal(out[3::-1], make_rows(KEYS, 272))
    assert store.read(KEYS, out, np.array([4, 5, 6, 7], np.int32)).all()
    assert np.array_equal(out[4:], make_rows(KEYS, 272))


def test_rows_come_from_the_slots_that_are_named(opened):
    """Also more rows than are copied at a time, and few of many."""
    store = opened()
    keys = make_keys(1, np.random.default_rng(0).permutation(2000)[:700])
    slots = np.random.default_rng(1).permutation(900)[:700].astype(np.int32)
    rows = np.full((900, 272), 0xEE, np.uint8)
    rows[slots] = make_rows(keys, 272)
    store.write(keys, rows, slots)
    assert_holds(store, 1, keys & np.uint64(0xFFFF))
    store.write(keys[:0], rows, slots[:0])
    rows[slots[:2]] = make_rows(keys[:2], 272, version=1)
    store.write(keys[:2], rows, slots[:2])
    assert_holds(store, 1, keys[:2] & np.uint64(0xFFFF), version=1)
    assert_holds(store, 1, keys[2:] & np.uint64(0xFFFF))
    assert store.stats().written_rows == 702


@pytest.mark.parametrize("count", [1, 5, 6, 7, 255, 256, 257, 511, 512, 513])
def test_as_many_rows_as_are_copied_or_fetched_at_a_time(opened, count):
    """The native store copies 256 rows at a time, and fetches the row that is six rows ahead."""
    store = opened()
    keys, slots = make_keys(1, range(count)), np.arange(count, dtype=np.int32)[::-1].copy()
    rows = make_rows(keys, 272)[::-1].copy()
    store.write(keys, rows, slots)
    assert_holds(store, 1, range(count))


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        (SLOTS.tolist(), "slots must be a NumPy array, not list"),
        (SLOTS.astype(np.int64), "slots must be int32, not int64"),
        (SLOTS[:, None], "slots must have 1 dimension"),
        (np.repeat(SLOTS, 2)[::2], "slots must be C-contiguous"),
        (SLOTS[:3], "4 keys, but there are 3 slots"),
        (np.array([0, 1, 2, 8], np.int32), "slots are from 0 to 8; out has 8 rows"),
        (np.array([0, -1, 2, 3], np.int32), "slots are from -1 to 3; out has 8 rows"),
    ],
)
def test_wrong_slots_are_named_and_change_nothing(opened, slots, text):
    store = opened()
    put(store, 1, range(4))
    out = np.full((8, 272), 0xEE, np.uint8)
    with pytest.raises(InputError, match=text):
        store.read(KEYS, out, slots)
    assert (out == 0xEE).all()
    with pytest.raises(InputError, match=text.replace("out", "rows")):
        store.write(KEYS, out, slots)
    assert_holds(store, 1, range(4))


def assert_places(store, table, ids, engine):
    """Of rows of which the stored ones are even: numbers, and none where the engine knows of no row."""
    keys = make_keys(table, ids)
    places = store.places(keys)
    assert places.dtype == np.uint64
    assert places.shape == keys.shape
    stored = np.asarray(ids) % 2 == 0
    assert (places[stored] != NOWHERE).all()
    if engine == "native":
        assert (places[~stored] == NOWHERE).all()
        assert len(np.unique(places[stored])) == np.count_nonzero(stored)
    return places


def test_places_of_rows(opened, engine):
    store = opened()
    ids = np.random.default_rng(0).permutation(3000)
    for table in (1, 7):
        assert len(store.places(make_keys(table, ids))) == 3000
        put(store, table, ids[ids % 2 == 0])
    assert_places(store, 1, ids, engine)
    store.commit()
    put(store, 1, range(0, 1000, 2), version=1)
    assert_places(store, 1, ids, engine)
    store.commit()
    store.compact()
    assert_places(store, 1, ids, engine)
    store.close()
    store = opened()
    places = assert_places(store, 1, ids, engine)
    assert_places(store, 7, ids, engine)
    order = np.argsort(places)[: len(ids) // 2]  # the stored ones, in the order that reads are asked for
    assert_holds(store, 7, ids[order][ids[order] % 2 == 0])
    assert store.places(np.empty(0, np.uint64)).shape == (0,)
    assert_places(store, 1, ids[:1], engine)


def test_rows_written_in_one_order_have_places_in_that_order(opened, engine):
    if engine != "native":
        assert opened().places(KEYS).tolist() == KEYS.tolist()
        return
    store = opened()
    ids = np.random.default_rng(0).permutation(5000)
    put(store, 1, ids)
    places = store.places(make_keys(1, ids))
    assert (np.diff(places.astype(np.int64)) == 1).all()
    put(store, 1, ids[:100], version=1)
    again = store.places(make_keys(1, ids[:200]))
    assert (np.diff(again[:100].astype(np.int64)) == 1).all()
    assert again[0] > places[-1]
    assert np.array_equal(again[100:], places[100:200])


def test_places_of_wrong_keys(opened):
    store = opened()
    for keys, text in (
        (KEYS.tolist(), "keys must be a NumPy array, not list"),
        (KEYS.astype(np.int64), "keys must be uint64, not int64"),
        (KEYS[:, None], "keys must have 1 dimension"),
        (KEYS[::2], "keys must be C-contiguous"),
    ):
        with pytest.raises(InputError, match=text):
            store.places(keys)


def test_places_and_reads_beside_writes_and_compaction(opened, engine):
    """A row that was read is never older than what was read of it before, whichever slots it goes to."""
    store, done, failures = opened(), threading.Event(), []
    put(store, 1, range(0, 2000, 2))

    def read(seed):
        random, seen = np.random.default_rng(seed), np.zeros(2000, np.int64)
        try:
            while not done.is_set():
                ids = random.permutation(2000)[:500]
                places = assert_places(store, 1, ids, engine)
                ids = ids[np.argsort(places)]
                keys, slots = make_keys(1, ids), random.permutation(600)[:500].astype(np.int32)
                out = np.full((600, 272), 0xEE, np.uint8)
                found = store.read(keys, out, slots)
                assert np.array_equal(found, ids % 2 == 0)
                rows = out[slots[found]]
                versions = [v for v in range(40) if (make_rows(keys[found][:1], 272, v) == rows[:1]).all()]
                assert versions
                assert versions[0] >= seen[ids[found][0]]
                seen[ids[found][0]] = versions[0]
                assert (out[np.setdiff1d(np.arange(600), slots)] == 0xEE).all()
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for reader in readers:
        reader.start()
    for version in range(1, 40):
        put(store, 1, range(0, 2000, 2), version)
        if version % 4 == 0:
            store.commit()
        if version % 10 == 0:
            store.compact()
    done.set()
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive()
    assert not failures
