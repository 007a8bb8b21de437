"""Files that have to outlive processes but not the machine: in memory, where syncing takes no time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_SHARED = Path("/dev/shm")
IN_MEMORY = (
    "/dev/shm" if os.access(_SHARED, os.W_OK) and shutil.disk_usage(_SHARED).total >= 1 << 30 else None
)
"""A folder where fsync costs nothing; None: there is none, or none as large as the caps of the tests."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In place of pytest's, for folders of tests that import it in their conftest.py."""
    with tempfile.TemporaryDirectory(prefix="tierstore-test-", dir=IN_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def temporary_stores(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores without a path be there, for folders of tests that open hundreds of them."""
    tmp_path_factory.getbasetemp()  # pytest's own folders stay where they are
    monkeypatch.setattr(tempfile, "tempdir", IN_MEMORY)
