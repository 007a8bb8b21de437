"""``tierstore train`` of small synthetic tables: what tests of the command and of its checkpoints run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.cli.main import main
from tierstore.cli.trainer import Trainer


@pytest.fixture
def small_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few held-out examples; what the command does to the threads is undone."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("tierstore.data.synthetic.TEST_EXAMPLES", 512)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ctrl_c_in_batch_10(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets SIGINT in that batch of every training, until ``monkeypatch.undo()``."""
    step = Trainer._step

    def interrupted(trainer: Trainer, batch: Any) -> None:
        if trainer.batches == 9:
            os.kill(os.getpid(), signal.SIGINT)
        step(trainer, batch)

    monkeypatch.setattr(Trainer, "_step", interrupted)


def small_training(hbm: str, steps: int) -> Callable[..., int]:
    """``train(*arguments)``: the command with these arguments besides, and its exit status."""
    tables = ["--data", "synthetic:zipf:1.05", "--rows", "4000", "--tables", "3", "--dim", "8"]
    small = [*tables, "--hbm", hbm, "--batch-size", "64", "--steps", str(steps), "--threads", "1"]

    def train(*arguments: str | Path) -> int:
        return main(["train", *small, *map(str, arguments)])

    return train
