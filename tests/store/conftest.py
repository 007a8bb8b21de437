"""Every engine through the front door: a factory of open stores that closes what a test leaves open.

The native engine comes with one device and with two."""

from __future__ import annotations

import pytest

from tests.store.store_model import CAP, TABLES, use_compact_index
from tierstore.store import engine_names, open_store

COMPACT = "native with a compact index"


def pytest_generate_tests(metafunc):
    """Run a test that asks for ``engine`` with each; what opens stores by ``opened`` on two devices, too."""
    given = any("engine" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    names = [*engine_names(), COMPACT]
    if {"opened", "engine"} <= set(metafunc.fixturenames):  # else it is a fixture of the test's own file
        cases = [*((name, 1) for name in names), ("native", 2)]
        ids = [*names, "native on two devices"]
        metafunc.parametrize(("engine", "devices"), cases, indirect=["engine"], ids=ids)
    elif "engine" in metafunc.fixturenames and not given:
        metafunc.parametrize("engine", names, indirect=True)


@pytest.fixture
def engine(request, monkeypatch):
    if request.param != COMPACT:
        return request.param
    use_compact_index(monkeypatch)
    return "native"


@pytest.fixture
def opened(tmp_path, engine, devices):
    """``opened()`` opens the test's own directory with the engine under test."""
    stores = []
    paths = [tmp_path / "store", tmp_path / "more"][:devices]

    def make(tables=TABLES, ssd_bytes=CAP, **options):
        stores.append(open_store(paths, engine, tables, ssd_bytes, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
