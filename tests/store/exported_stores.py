"""Stores that tests export, and what such a store contains."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.store.store_model import CAP, TABLES, get, put, stored_ids
from tierstore.keys import MAX_ID, make_keys
from tierstore.store import open_store

IDS = {0: range(0, 900, 2), 1: [*range(700), 2**40, MAX_ID], 7: range(5)}


def fill(path: Path, engine: str) -> None:
    """Two commits; the last has NaNs and other odd bits. Table 65535 has no rows."""
    with open_store(path, engine, TABLES, CAP, keep=2) as store:
        for table, ids in IDS.items():
            put(store, table, ids, 1)
        store.commit(b"first")
        put(store, 1, range(100, 300), 2)
        odd = np.array([[0x7FC00001, 0xFFFFFFFF, 0x80000000, 1] * 17], np.uint32).view(np.uint8)
        store.write(make_keys(1, [5]), odd)
        store.commit(b"\0meta\xff", tag="best")


def rows(store, table: int, ids) -> bytes:
    found, out = get(store, table, ids)
    assert found.all()
    return out.tobytes()


def contents(path: Path, **options) -> dict:
    with open_store(path, read_only=True, **options) as store:
        indices = [spec.index for spec in store.tables]
        return {
            "tables": store.tables,
            "meta": store.meta(),
            **{t: (ids := stored_ids(store, t), rows(store, t, ids)) for t in indices},
        }


def export(path: Path, target: Path, **options) -> int:
    with open_store(path, read_only=True, **options) as store:
        return store.export(target)
