"""The worker of a prefetch makes the lookups in half of the tests, and a thread beside it in the others.

Stores without a path are in memory.
"""

from __future__ import annotations

import zlib

import pytest

from tests.in_memory import temporary_stores
from tierstore.pipeline import made

__all__ = ["temporary_stores"]

BY_WORKER, BESIDE = 1 << 30, 1
"""For ``made.MANY_THREADS``."""


@pytest.fixture(autouse=True)
def half_of_lookups_beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = zlib.crc32(request.node.nodeid.encode()) % 2
    monkeypatch.setattr(made, "MANY_THREADS", BESIDE if odd else BY_WORKER)


@pytest.fixture(autouse=True)
def in_memory(temporary_stores: None) -> None:
    pass
