"""``bench.research.read_ahead_split``: the choice is one of the sizes compared, and near the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.research import main, read_ahead_split
from bench.research.layout import add_arguments


@pytest.mark.parametrize("data", ["synthetic:zipf:0.8", "synthetic:zipf:0"])
def test_the_choice_is_near_the_best(data: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--rows=8000", "--tables=2", "--batch-size=48", "--hbm=1/20", "--warm-up=150", "--plans=60"]
    assert main(None, add_arguments, read_ahead_split.run, ["--data", data, *sizes, "--json", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"].values()
    assert case["best_cost"] == min(case["costs"].values()) <= case["chosen_cost"]
    assert case["costs"][str(case["chosen"])] == case["chosen_cost"] < 1.1 * case["best_cost"]
    assert max(case["costs"].values()) > 1.3 * case["best_cost"]
    misses = list(case["misses"].values())  # the more memory the cache has, the fewer
    assert misses == sorted(misses, reverse=True)
