"""Keys of rows: the table in the upper 16 bits, the id in the lower 48, as in csrc/common/key.h."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tierstore.errors import InputError

ID_BITS = 48
MAX_ID = (1 << ID_BITS) - 1
MAX_TABLE = (1 << 16) - 1


def make_keys(table: int, ids: ArrayLike) -> NDArray[np.uint64]:
    """Return the keys ``table << 48 | id`` of ``ids`` (any integer array), as uint64 of the same shape.

    Raises ``InputError`` when the table is not in [0, 65535], or an id is not an integer in [0, 2**48).
    """
    if not 0 <= table <= MAX_TABLE:
        raise InputError(f"table index {table} is not in [0, {MAX_TABLE}]")
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(array.shape, np.uint64)
    if array.dtype.kind not in "iu":
        raise InputError(f"ids must be integers, not {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_ID:
        raise InputError(f"id {low if low < 0 else high} of table {table} is not in [0, 2**{ID_BITS})")
    return array.astype(np.uint64) | np.uint64(table << ID_BITS)


def split(keys: NDArray[np.uint64]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Return the tables (uint16) and ids (int64) of ``keys``: the inverse of :func:`make_keys`."""
    keys = np.asarray(keys, np.uint64)
    return (keys >> np.uint64(ID_BITS)).astype(np.uint16), (keys & np.uint64(MAX_ID)).astype(np.int64)


def rows_by_table(
    keys: NDArray[np.uint64], rows: NDArray[np.uint8]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.uint8]]]:
    """Yield for each table of ``keys``, uint64 (n,), its index, its ids, int64 (m,), and their ``rows``."""
    tables, ids = split(keys)
    present = np.unique(tables).tolist()
    if len(present) == 1:
        yield present[0], ids, rows
        return
    for table in present:
        at = np.flatnonzero(tables == table)
        yield table, ids[at], rows[at]
