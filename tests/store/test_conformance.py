"""The contract of RowStore, which every registered engine keeps."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.store.store_model import CAP, ROW_BYTES, TABLES, assert_holds, get, make_rows, put, stored_ids
from tierstore.errors import ClosedError, InputError, StoreFullError
from tierstore.keys import MAX_ID, make_keys
from tierstore.store import RowStore, StoreStats


def test_is_a_row_store(opened, engine):
    store = opened()
    assert isinstance(store, RowStore)
    assert store.engine == engine


def test_reads_its_own_writes(opened):
    store = opened()
    for table in ROW_BYTES:
        put(store, table, range(100))
    for table in ROW_BYTES:
        assert_holds(store, table, range(100))


def test_overwrite_newest_wins(opened):
    store = opened()
    put(store, 1, range(1000), version=1)
    put(store, 1, range(250, 750), version=2)
    store.commit(b"")
    put(store, 1, range(400, 600), version=3)
    for ids, version in [(range(250), 1), (range(250, 400), 2), (range(400, 600), 3), (range(600, 750), 2)]:
        assert_holds(store, 1, ids, version)


def test_missing_keys_among_stored_ones_in_any_order(opened):
    store = opened()
    put(store, 1, range(0, 1000, 3))
    ids = np.random.default_rng(0).permutation(1000)
    found, out = get(store, 1, ids)
    assert np.array_equal(found, ids % 3 == 0)
    keys = make_keys(1, ids)
    assert np.array_equal(out[found], make_rows(keys[found], 272))


def test_nothing_stored(opened):
    found, _ = get(opened(), 1, [0, 5, MAX_ID])
    assert not found.any()


def test_tables_do_not_mix(opened):
    store = opened()
    put(store, 1, range(10), version=1)
    put(store, 7, range(5), version=2)
    assert_holds(store, 1, range(10), 1)
    found, _ = get(store, 7, range(10))
    assert found.tolist() == [True] * 5 + [False] * 5


def test_one_call_for_several_tables_of_one_row_size(opened):
    store = opened()
    keys = np.concatenate([make_keys(7, [3, 1]), make_keys(1, [2, 3])])
    store.write(keys, make_rows(keys, 272))
    out = np.zeros((4, 272), np.uint8)
    assert store.read(keys[::-1].copy(), out).all()
    assert np.array_equal(out[::-1], make_rows(keys, 272))


def test_ids_up_to_48_bits(opened):
    store = opened()
    ids = [0, 1, 2**31, 2**32 - 1, 2**32, 2**47, MAX_ID - 1, MAX_ID]
    for table in (1, 7, 65535):
        put(store, table, ids)
    store.commit(b"")
    for table in (1, 7, 65535):
        assert_holds(store, table, ids)
        assert stored_ids(store, table) == ids


def test_empty_batches(opened):
    store = opened()
    keys, rows = np.empty(0, np.uint64), np.empty((0, 272), np.uint8)
    store.write(keys, rows)
    found = store.read(keys, rows)
    assert found.shape == (0,)
    assert found.dtype == np.bool_


def test_arrays_may_be_reused_after_write(opened):
    store = opened()
    keys = make_keys(1, range(500))
    rows = make_rows(keys, 272)
    store.write(keys, rows)
    rows[:] = 0
    keys[:] = 0
    assert_holds(store, 1, range(500))


def test_keys_lists_each_stored_row_once(opened):
    store = opened()
    assert stored_ids(store, 1) == []
    put(store, 1, range(0, 200_000, 2))
    put(store, 7, [5])
    store.commit(b"")
    put(store, 1, range(100, 300))
    expected = sorted({*range(0, 200_000, 2), *range(100, 300)})
    assert stored_ids(store, 1) == expected
    assert stored_ids(store, 7) == [5]
    assert stored_ids(store, 0) == []


def test_commit_close_reopen(opened):
    store = opened()
    assert store.meta() == b""
    first = store.commit(b"step 0")
    for table in ROW_BYTES:
        put(store, table, range(300), version=table)
    second = store.commit(b"step 1\0\xff")
    assert 1 <= first < second
    assert store.meta() == b"step 1\0\xff"
    store.close()
    store = opened()
    assert store.meta() == b"step 1\0\xff"
    for table in ROW_BYTES:
        assert_holds(store, table, range(300), version=table)
        assert stored_ids(store, table) == list(range(300))
    assert store.commit(b"") > second
    assert store.meta() == b""


def test_commits_with_a_tag_are_kept_until_they_are_dropped(opened):
    store = opened()
    assert store.commits() == []
    for version, tag in enumerate(["one: a", "", "", "two", ""], 1):
        put(store, 1, range(100), version)
        store.commit(b"%d" % version, tag)
    kept = [(1, "one: a"), (4, "two"), (5, "")]
    assert [(commit.id, commit.tag) for commit in store.commits()] == kept
    assert store.commits()[-1].meta == b"5"
    with pytest.raises(InputError, match="commit 5 is the newest"):
        store.drop_commit(5)
    with pytest.raises(InputError, match="commit 3 is not kept"):
        store.drop_commit(3)
    store.close()
    with pytest.raises(InputError, match="commit 3 is not kept"):
        opened(at=3)
    for number, _ in kept:
        store = opened(at=number)
        assert store.meta() == b"%d" % number
        assert_holds(store, 1, range(100), number)
        store.close()
    store = opened(at=kept[0][0])
    put(store, 1, range(50), 9)
    assert store.commit(b"branch", "three") == 6
    for number, _ in kept:
        if number < 5:
            store.drop_commit(number)
    store.close()
    store = opened()
    assert [(commit.id, commit.tag) for commit in store.commits()] == [(6, "three")]
    assert_holds(store, 1, range(50), 9)
    assert_holds(store, 1, range(50, 100), kept[0][0])


def test_uncommitted_is_gone_after_close(opened):
    store = opened()
    put(store, 1, range(100), version=1)
    store.commit(b"a")
    put(store, 1, range(50, 150), version=2)
    put(store, 0, range(10))
    store.close()
    store = opened()
    assert store.meta() == b"a"
    assert_holds(store, 1, range(100), version=1)
    assert stored_ids(store, 1) == list(range(100))
    assert stored_ids(store, 0) == []


def test_uncommitted_is_gone_before_the_first_commit(opened):
    store = opened()
    put(store, 1, range(1000))
    store.close()
    assert stored_ids(opened(), 1) == []


def test_many_rows_between_commits(opened):
    """More than any engine buffers before it goes to disk: what was spilled must not show after a close."""
    store = opened()
    put(store, 1, range(20_000), version=1)
    store.commit(b"kept")
    for start in range(0, 300_000, 50_000):
        put(store, 1, range(start, start + 50_000), version=2)
    assert_holds(store, 1, range(0, 300_000, 7), version=2)
    store.close()
    store = opened()
    assert stored_ids(store, 1) == list(range(20_000))
    assert_holds(store, 1, range(20_000), version=1)


def test_large_meta(opened):
    meta = bytes(range(256)) * 4096
    store = opened()
    store.commit(meta)
    store.close()
    assert opened().meta() == meta


def test_added_table(opened):
    store = opened(TABLES[:2])
    put(store, 1, range(20))
    store.commit(b"")
    store.close()
    store = opened(TABLES)
    put(store, 65535, range(20))
    store.commit(b"")
    store.close()
    store = opened(TABLES)
    assert_holds(store, 1, range(20))
    assert_holds(store, 65535, range(20))


def test_stats(opened, engine):
    store = opened(TABLES[1:2])
    put(store, 1, range(1000))
    store.commit(b"")
    get(store, 1, range(500, 1500))
    stats = store.stats()
    assert isinstance(stats, StoreStats)
    assert stats.engine == engine
    assert stats.rows == 1000
    assert stats.live_bytes == 272_000
    assert 272_000 <= stats.disk_bytes < 30_000_000
    assert (stats.read_rows, stats.written_rows) == (500, 1000)
    assert stats.written_bytes >= 272_000
    assert stats.index_bytes >= 0
    assert stats.io


def test_stats_of_reads(opened):
    store = opened(TABLES[1:2])
    put(store, 1, range(1000))
    store.commit(b"")
    store.close()  # so that nothing is left in write buffers
    store = opened(TABLES[1:2])
    get(store, 1, range(500, 1500))
    stats = store.stats()
    assert (stats.read_rows, stats.written_rows) == (500, 0)
    assert stats.read_bytes >= 500 * 272
    assert stats.read_requests >= 1


def test_use_after_close(opened):
    store = opened()
    put(store, 1, range(10))
    keys = store.keys(1)
    store.close()
    store.close()
    for call in (
        lambda: put(store, 1, [1]),
        lambda: get(store, 1, [1]),
        lambda: store.read(KEYS, ROWS, np.arange(4, dtype=np.int32)),
        lambda: store.places(KEYS),
        lambda: store.commit(b""),
        store.meta,
        store.stats,
        lambda: list(store.keys(1)),
        lambda: next(keys),
    ):
        with pytest.raises(ClosedError):
            call()


def test_close_from_another_thread_while_reading(opened):
    store = opened()
    put(store, 1, range(2000))
    started, failures = threading.Event(), []

    def read_until_closed():
        try:
            while True:
                assert_holds(store, 1, range(2000))
                started.set()
        except ClosedError:
            return
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            started.set()

    thread = threading.Thread(target=read_until_closed)
    thread.start()
    assert started.wait(30)
    store.close()
    thread.join(30)
    assert not thread.is_alive()
    assert not failures


def test_calls_from_different_threads_in_turn(opened):
    store = opened()
    for version in range(4):
        thread = threading.Thread(
            target=lambda v=version: (put(store, 1, range(100), v), store.commit(b"%d" % v))
        )
        thread.start()
        thread.join(30)
        assert_holds(store, 1, range(100), version)
    assert store.meta() == b"3"


KEYS, ROWS = make_keys(1, range(4)), np.zeros((4, 272), np.uint8)
READ_ONLY = ROWS.copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("keys", "rows", "text"),
    [
        (KEYS.tolist(), ROWS, "keys must be a NumPy array, not list"),
        (KEYS.astype(np.int64), ROWS, "keys must be uint64, not int64"),
        (KEYS[:, None], ROWS, "keys must have 1 dimension"),
        (KEYS[::2], ROWS[:2], "keys must be C-contiguous"),
        (KEYS, ROWS.view(np.float32), "must be uint8, not float32"),
        (KEYS, ROWS[0], "must have 2 dimensions"),
        (KEYS, np.zeros((4, 544), np.uint8)[:, ::2], "must be C-contiguous"),
        (KEYS[:3], ROWS, "3 keys, but .* 4 rows"),
        (KEYS, np.zeros((4, 256), np.uint8), "rows of 256 bytes, but rows of table 1 have 272"),
        (make_keys(2, range(4)), ROWS, "table index 2 is unknown"),
        (make_keys(9, range(4)), ROWS, "table index 9 is unknown"),
        (np.array([1, 1 << 48, 2, 3], np.uint64), ROWS, "rows of table 0 have 16"),
    ],
)
def test_wrong_arrays_are_named_and_change_nothing(opened, keys, rows, text):
    store = opened()
    with pytest.raises(InputError, match=text):
        store.write(keys, rows)
    with pytest.raises(InputError, match=text):
        store.read(keys, rows)
    assert all(stored_ids(store, table) == [] for table in ROW_BYTES)


def test_other_wrong_arguments(opened):
    store = opened()
    with pytest.raises(InputError, match="writable"):
        store.read(KEYS, READ_ONLY)
    with pytest.raises(InputError, match="unknown"):
        store.keys(3)
    with pytest.raises(InputError, match="unknown"):
        store.keys(-1)
    with pytest.raises(InputError, match="meta must be bytes"):
        store.commit("text")
    for tag in ("x" * 101, "a/b", "\n", "é", 7):
        with pytest.raises(InputError, match="tag must be at most 100 printable"):
            store.commit(b"", tag)


def test_byte_cap_keeps_the_last_commit(opened):
    """Growing beyond the cap is an error that names it; the last commit is still there afterwards."""
    cap = 24 << 20
    store = opened(ssd_bytes=cap)
    put(store, 1, range(2000), version=1)
    store.commit(b"before")

    def grow():
        for start in range(0, 1_000_000, 10_000):
            put(store, 1, range(start, start + 10_000), version=2)
            if start % 20_000 == 10_000:
                store.commit(b"more %d" % start)

    with pytest.raises(StoreFullError, match="24 MiB"):
        grow()
    store.close()
    store = opened(ssd_bytes=CAP)
    meta = store.meta()
    count = int(meta.split()[1]) + 10_000 if meta.startswith(b"more") else 2000
    assert stored_ids(store, 1) == list(range(count))
    assert_holds(store, 1, range(count), version=2 if count > 2000 else 1)
