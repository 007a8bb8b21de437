"""Calls whose keys are of several tables in turn, as where rows of all tables leave memory together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.store.store_model import make_rows
from tierstore.errors import InputError
from tierstore.keys import make_keys
from tierstore.store import StoredTable
from tierstore.store.native import NativeConfig, NativeStore
from tierstore.store.protocol import NOWHERE

ROWS = (1 << 17, 3000, 0, 1)  # stored rows of each table; those of the first lie close enough for ranges
TABLES = (
    *(StoredTable(f"t{n}", n, 1 << 40, 64, 272) for n in range(len(ROWS))),
    StoredTable("w", 4, 9, 4, 16),
)
AT_ONCE = 1024  # keys that the store looks up together
LENGTHS = {
    "of one": [1] * 5000,
    "short": [1, 2, 15, 16, 17, 18] * 60,
    "up to a bound": [AT_ONCE - 1, 1, 1, AT_ONCE - 2, AT_ONCE, 5],
    "past a bound": [AT_ONCE + 1, 3, AT_ONCE - 3, AT_ONCE, 1],
}


@pytest.fixture(params=["hash", "compact"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NativeStore]:
    with NativeStore(tmp_path, TABLES, config=NativeConfig(1 << 30, index=request.param)) as made:
        for table, rows in enumerate(ROWS):
            keys = make_keys(table, range(rows))
            made.write(keys, make_rows(keys, 272))
        made.commit()
        yield made


def keys_in_runs(lengths: list[int]) -> np.ndarray:
    """Keys without repeats, each run of another table than the one before. Many are not stored."""
    ids = [
        iter(np.random.default_rng(table).permutation(2 * max(rows, 4000))) for table, rows in enumerate(ROWS)
    ]
    runs = [(number % len(ROWS), length) for number, length in enumerate(lengths)]
    return np.concatenate([make_keys(t, [next(ids[t]) for _ in range(length)]) for t, length in runs])


def is_stored(keys: np.ndarray) -> np.ndarray:
    return (keys & np.uint64((1 << 48) - 1)) < np.array(ROWS, np.uint64)[keys >> np.uint64(48)]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_tables_in_turn(store: NativeStore, lengths: list[int]) -> None:
    """Rows are read, found and overwritten as with a call for each key."""
    keys = keys_in_runs(lengths)
    stored = is_stored(keys)
    assert 0 < stored.sum() < len(keys)
    out = np.empty((len(keys), 272), np.uint8)
    assert np.array_equal(store.read(keys, out), stored)
    assert np.array_equal(out[stored], make_rows(keys[stored], 272))

    places = store.places(keys)
    assert np.array_equal(places != NOWHERE, stored)
    some = np.random.default_rng(1).permutation(len(keys))[:200]
    assert [int(places[at]) for at in some] == [int(store.places(keys[at : at + 1])[0]) for at in some]

    store.write(keys, make_rows(keys, 272, 1))
    assert store.read(keys, out).all()
    assert np.array_equal(out, make_rows(keys, 272, 1))
    for table, rows in enumerate(ROWS):
        every = np.union1d(make_keys(table, range(rows)), keys[keys >> np.uint64(48) == table])
        assert store.count(table) == len(every)
        rest = np.setdiff1d(every, keys)
        out = np.empty((len(rest), 272), np.uint8)
        assert store.read(rest, out).all()
        assert np.array_equal(out, make_rows(rest, 272))


def test_a_table_of_another_row_size_among_them(store: NativeStore) -> None:
    keys = np.concatenate([make_keys(0, [1]), make_keys(4, [1]), make_keys(1, [1])])
    with pytest.raises(InputError, match="all keys of one call must belong to tables of one row size"):
        store.read(keys, np.empty((3, 272), np.uint8))
    with pytest.raises(InputError, match="all keys of one call must belong to tables of one row size"):
        store.write(keys, np.empty((3, 272), np.uint8))
    assert store.count(4) == 0
    wide = make_keys(4, range(9))
    store.write(wide, make_rows(wide, 16))
    mixed = np.concatenate([wide, make_keys(1, range(9))])
    assert (store.places(mixed) != NOWHERE).all(), "places are of rows of any size"
