"""Every engine through the front door: a factory of open stores that closes what a test leaves open."""

from __future__ import annotations

import pytest

from tests.store.store_model import CAP, TABLES, use_compact_index
from tierstore.store import engine_names, open_store

COMPACT = "native with a compact index"


@pytest.fixture(params=[*engine_names(), COMPACT])
def engine(request, monkeypatch):
    if request.param != COMPACT:
        return request.param
    use_compact_index(monkeypatch)
    return "native"


@pytest.fixture
def opened(tmp_path, engine):
    """``opened()`` opens the test's own directory with the engine under test."""
    stores = []

    def make(tables=TABLES, ssd_bytes=CAP, **options):
        stores.append(open_store(tmp_path / "store", engine, tables, ssd_bytes, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
