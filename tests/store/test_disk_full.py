"""No room on the device: a StoreFullError, and the last commit is intact."""

from __future__ import annotations

import resource
from contextlib import contextmanager

import pytest

from tests.store.store_model import CAP, TABLES, assert_holds, put, stored_ids
from tierstore.errors import ClosedError, ConfigError, StoreFullError
from tierstore.store import open_store


@contextmanager
def files_no_larger_than(size: int):
    """Writes beyond ``size`` bytes of any file fail, as on a full device (EFBIG in place of ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_device(tmp_path, engine):
    path = tmp_path / "store"
    store = open_store(path, engine, TABLES, CAP)
    put(store, 1, range(1000), version=1)
    store.commit(b"safe")

    def fill():
        for start in range(0, 1_000_000, 10_000):
            put(store, 1, range(start, start + 10_000), version=2)
            store.commit(b"filled %d" % (start + 10_000))

    with files_no_larger_than(2 << 20), pytest.raises(StoreFullError):
        fill()
    try:  # either still usable, or clearly closed
        put(store, 7, range(10))
        store.commit(b"went on")
        assert_holds(store, 7, range(10))
    except ClosedError as error:
        assert "since its last commit" in str(error)  # noqa: PT017
    store.close()
    with open_store(path, engine, TABLES, CAP) as store:
        meta = store.meta()
        assert meta
        count = int(meta.split()[1]) if meta.startswith(b"filled") else len(stored_ids(store, 1))
        assert stored_ids(store, 1) == list(range(count))
        assert_holds(store, 1, range(count), version=1 if meta == b"safe" else 2)


def test_the_least_cap_of_lmdb(tmp_path):
    """A map of LMDB is no smaller, so a smaller cap would not be kept."""
    with pytest.raises(ConfigError, match="cap is 1023 KiB; an LMDB store needs at least 1 MiB, so raise"):
        open_store(tmp_path / "a", "lmdb", TABLES, 1023 << 10)
    with open_store(tmp_path / "b", "lmdb", TABLES, 1 << 20) as store:
        with pytest.raises(StoreFullError, match="the cap of 1 MiB is reached"):
            put(store, 1, range(100_000))
        files = (tmp_path / "b").rglob("data.mdb")
        assert [file.stat().st_size <= 1 << 20 for file in files] == [True]
