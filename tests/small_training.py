"""``tierstore train`` of small synthetic tables: what tests of the command and of its checkpoints run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tierstore.cli.main import main


@pytest.fixture
def small_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few held-out examples; what the command does to the threads is undone."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("tierstore.data.synthetic.TEST_EXAMPLES", 512)
    yield
    torch.set_num_threads(threads)


def small_training(hbm: str, steps: int) -> Callable[..., int]:
    """``train(*arguments)``: the command with these arguments besides, and its exit status."""
    tables = ["--data", "synthetic:zipf:1.05", "--rows", "4000", "--tables", "3", "--dim", "8"]
    small = [*tables, "--hbm", hbm, "--batch-size", "64", "--steps", str(steps), "--threads", "1"]

    def train(*arguments: str | Path) -> int:
        return main(["train", *small, *map(str, arguments)])

    return train
