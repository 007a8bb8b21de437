"""The worker of a prefetch makes the lookups in half of the tests, and a thread beside it in the others."""

from __future__ import annotations

import zlib

import pytest

from tierstore.pipeline import made

BY_WORKER, BESIDE = 1 << 30, 1
"""For ``made.MANY_THREADS``."""


@pytest.fixture(autouse=True)
def half_of_lookups_beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = zlib.crc32(request.node.nodeid.encode()) % 2
    monkeypatch.setattr(made, "MANY_THREADS", BESIDE if odd else BY_WORKER)
