"""Budgets are bytes: training takes at most the memory before the tiers, plus the budget, plus 200 MiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SLACK = 200 << 20


@pytest.mark.parametrize(
    ("hbm", "uvm", "data"),
    [
        ("16MiB", "0", "zipf:0.8 --rows 1000000 --steps 30"),
        ("32MiB", "64MiB", "zipf:0.8 --rows 1000000 --steps 30"),
        ("256MiB", "0", "zipf:0.8 --rows 1000000 --steps 30"),
        ("1GiB", "0", "zipf:0.6 --rows 4000000 --steps 200"),  # some 6 M rows are touched
    ],
)
def test_peak_memory_of_training(hbm: str, uvm: str, data: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    data = f"train --data synthetic:{data} --tables 8 --dim 64 --batch-size 4096"
    tiers = ["--hbm", hbm, "--uvm", uvm, "--ssd", str(tmp_path / "store"), "--threads", "1"]
    command = [sys.executable, "-m", "tierstore.cli", *data.split(), *tiers, "--json", str(result)]
    # The first one begins like the first training after an installation, with nothing compiled yet.
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "compiled")} if hbm == "16MiB" else {}
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **cache})
    figures = json.loads(result.read_text())
    used = figures["peak_rss_bytes"] - figures["rss_before_bytes"]
    assert figures["table_bytes"] > 6 * figures["budget_bytes"]
    assert figures["ssd_bytes"] > 0
    assert used <= figures["budget_bytes"] + SLACK
    # The budget is really used, so that the bound above says something.
    assert used > figures["budget_bytes"] // 2
