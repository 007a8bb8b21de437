"""Budgets are bytes: training takes at most what its dense layers take, plus the budget, plus what reading
ahead may take, plus 200 MiB.

What the dense layers' temporaries leave in malloc's heap is the user's, and so are malloc's settings: that
memory is measured by the same training with tables of a few rows in memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SLACK = 200 << 20


def trained(data: str, tiers: list[str], result: Path, environment: dict[str, str] | None = None) -> Any:
    """Figures of a training, with the bytes that it took beyond what was resident before."""
    data = f"train --data synthetic:{data} --tables 8 --dim 64 --batch-size 4096"
    command = [sys.executable, "-m", "tierstore.cli", *data.split(), *tiers, "--threads", "1"]
    command += ["--json", str(result)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **(environment or {})})
    figures = json.loads(result.read_text())
    return {**figures, "used": figures["peak_rss_bytes"] - figures["rss_before_bytes"]}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes that the dense layers take."""
    result = tmp_path_factory.mktemp("dense") / "result.json"
    return int(trained("zipf:0.8 --rows 100 --steps 30", ["--hbm", "all"], result)["used"])


@pytest.mark.parametrize(
    ("hbm", "uvm", "data"),
    [
        ("16MiB", "0", "zipf:0.8 --rows 1000000 --steps 30"),
        ("32MiB", "64MiB", "zipf:0.8 --rows 1000000 --steps 30"),
        ("256MiB", "0", "zipf:0.8 --rows 1000000 --steps 30"),
        ("512MiB", "0", "zipf:0.6 --rows 4000000 --steps 80"),  # some 2.5 M rows are touched
    ],
)
def test_peak_memory_of_training(hbm: str, uvm: str, data: str, dense: int, tmp_path: Path) -> None:
    tiers = ["--hbm", hbm, "--uvm", uvm, "--store", str(tmp_path / "store")]
    # The first one begins like the first training after an installation, with nothing compiled yet.
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "compiled")} if hbm == "16MiB" else {}
    figures = trained(data, tiers, tmp_path / "result.json", cache)
    used = figures["used"]
    assert figures["table_bytes"] > 6 * figures["budget_bytes"]
    assert figures["ssd_bytes"] > 0
    assert dense < SLACK
    assert used <= dense + figures["budget_bytes"] + figures["read_ahead_bytes"] + SLACK
    # The budget is really used, so that the bound above says something.
    assert used > figures["budget_bytes"] // 2
