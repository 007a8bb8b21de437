"""Keys: layout, bounds, round trip."""

import numpy as np
import pytest

from tierstore import keys
from tierstore.errors import InputError


def test_layout_and_round_trip():
    ids = np.array([0, 1, keys.MAX_ID], np.int64)
    made = keys.make_keys(7, ids)
    assert made.dtype == np.uint64
    assert made.tolist() == [7 << 48, (7 << 48) + 1, (8 << 48) - 1]
    tables, back = keys.split(made)
    assert tables.dtype == np.uint16
    assert tables.tolist() == [7, 7, 7]
    assert back.tolist() == ids.tolist()


def test_highest_table_and_unsigned_ids():
    made = keys.make_keys(keys.MAX_TABLE, np.array([keys.MAX_ID], np.uint64))
    assert made.tolist() == [2**64 - 1]
    assert keys.make_keys(0, []).shape == (0,)


@pytest.mark.parametrize(
    ("table", "ids", "text"),
    [
        (-1, [0], "table index -1"),
        (65536, [0], "table index 65536"),
        (3, [5, -2], "id -2 of table 3"),
        (3, [1 << 48], "id 281474976710656"),
        (3, [0.5], "integers"),
    ],
)
def test_bad_input_names_what_is_wrong(table, ids, text):
    with pytest.raises(InputError, match=text):
        keys.make_keys(table, ids)
