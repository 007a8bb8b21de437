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


def test_the_row_of_padding_ids_goes_back_too(tmp_path: Path) -> None:
    """Padding ids are not looked up: the module keeps their row beside the tiers."""
    config = tierstore.TierConfig(hbm="64KiB", ssd="1GiB", path=tmp_path / "rows")
    options = {"padding_idx": 2, "config": config, "optimizer": tierstore.optim.SGD(lr=0.1)}
    model = torch.nn.ModuleDict({"row": tierstore.TieredEmbedding(ROWS, 4, **options)})
    ids = torch.tensor([2, 3])
    rows = torch.stack([torch.full((4,), 5.0), torch.full((4,), 7.0)])
    with model["row"] as module:
        module.load_rows(ids, rows)
        tierstore.checkpoint.save(tmp_path / "checkpoints", model, step=1)
        for other in (torch.zeros(2, 4), rows + 1):
            module.load_rows(ids, other)
            tierstore.checkpoint.restore(tmp_path / "checkpoints", model)
            assert torch.equal(module(ids), rows)
            assert torch.equal(module.rows(ids), rows)
