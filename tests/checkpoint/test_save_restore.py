"""checkpoint.save and restore: everything of a training comes back, bit for bit, at the step it was saved
at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierstore
from tests.checkpoint.trainings import ROWS, Training, equal

ENGINES = ["native", "rocksdb", "lmdb", "memory"]


@pytest.mark.parametrize("stores", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_restored_training_goes_on_with_the_same_bits(engine: str, stores: int, tmp_path: Path) -> None:
    undisturbed = Training(tmp_path / "undisturbed", engine, stores)
    for _ in range(8):
        undisturbed.step()
    expected = undisturbed.everything()
    undisturbed.model.close()

    first = Training(tmp_path, engine, stores)
    assert first.restore(tmp_path / "checkpoints") is None
    for step in range(1, 7):
        first.step()
        if step % 2 == 0 and step <= 4:
            first.save(tmp_path / "checkpoints", step)
    first.model.close()

    for _ in range(2):  # steps that no checkpoint has are forgotten, how often ever
        second = Training(tmp_path, engine, stores)
        restored = second.restore(tmp_path / "checkpoints")
        assert restored is not None
        assert restored.step == 4
        for _ in range(4):
            second.step()
        equal(second.everything(), expected)
        second.model.close()


def test_a_training_goes_back_within_one_process(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for _ in range(3):
        training.step()
    training.save(tmp_path / "checkpoints", 3)
    training.step()
    expected = training.everything()
    training.restore(tmp_path / "checkpoints")
    training.step()
    equal(training.everything(), expected)
    training.model.close()


def test_batches_pulled_ahead_are_not_in_a_checkpoint(tmp_path: Path) -> None:
    """A shuffling DataLoader, whose generator is ahead of the training, and rows that were fetched ahead."""

    def run(folder: Path, steps: int, save_at: int = 0) -> dict[str, torch.Tensor]:
        training = Training(folder)
        order = torch.Generator().manual_seed(5)
        ids = torch.randint(0, ROWS, (32 * 24, 4), generator=order)
        loader = torch.utils.data.DataLoader(ids, 32, shuffle=True, generator=order)
        batches = tierstore.prefetch(loader, training.model, depth=3, window=8)
        training.restore(folder / "checkpoints", loader=batches)
        for batch in batches:
            training.step(batch)
            done = batches.state_dict()["batches"]
            if done == save_at:
                training.save(folder / "checkpoints", done, loader=batches)
            if done == steps:
                break
        batches.close()
        found = training.everything()
        training.model.close()
        return found

    expected = run(tmp_path / "undisturbed", 20)
    run(tmp_path / "stopped", 15, save_at=13)
    equal(run(tmp_path / "stopped", 20), expected)
