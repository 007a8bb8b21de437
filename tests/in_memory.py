"""Files that have to outlive processes but not the machine: in memory, where syncing takes no time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder where fsync costs nothing; None: there is none."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In place of pytest's, for folders of tests that import it in their conftest.py."""
    with tempfile.TemporaryDirectory(prefix="tierstore-test-", dir=IN_MEMORY) as folder:
        yield Path(folder)
