"""Code is compiled also where nothing can be kept: in a read-only installation, or on a full disk."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core.caching import CacheImpl

from cache_policies import disk_cache

ASK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # a file takes no byte, as on a full disk
import numpy
import cache_policies
trace = cache_policies.prepare_flat(numpy.array([1, 2, 1]), 1)
print(cache_policies.simulate(trace, "lru", 2).misses)
"""


def test_without_a_folder_that_can_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])  # numba tries these
    disk_cache._warn.cache_clear()

    def doubled(values: np.ndarray) -> np.ndarray:
        return 2 * values

    with caplog.at_level(logging.WARNING):
        both = [disk_cache.compiled(doubled) for _ in range(2)]
    assert [record.getMessage() for record in caplog.records] == [
        "no folder for compiled code can be written, so each process compiles for some seconds before it "
        "computes; set NUMBA_CACHE_DIR to a folder that stays (said once)"
    ]
    assert [function(np.arange(3)).tolist() for function in both] == [[0, 2, 4]] * 2


def test_on_a_full_disk(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, cwd=root, capture_output=True, text=True
    )
    assert (found.returncode, found.stdout.strip()) == (0, "2"), found.stderr
    assert all(not file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
