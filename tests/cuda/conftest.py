"""Stores of modules on a fake GPU are in memory."""

from __future__ import annotations

import pytest

from tests.in_memory import temporary_stores

__all__ = ["temporary_stores"]


@pytest.fixture(autouse=True)
def in_memory(temporary_stores: None) -> None:
    pass
