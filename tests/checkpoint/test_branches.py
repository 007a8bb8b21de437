"""A training that goes on from an older checkpoint: those of the future that it abandons go first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint.trainings import Training, equal
from tierstore.cache.engine import Engine
from tierstore.checkpoint.folder import Folder
from tierstore.errors import StoreFullError


def steps(folder: Path) -> list[int]:
    return [unit.step for unit in Folder(folder).units()]


def saved(folder: Path, *at: int, engine: str = "native", stores: int = 1) -> Training:
    """Return a training with checkpoints at these steps."""
    training = Training(folder, engine, stores)
    for step in at:
        training.step()
        training.save(folder / "run", step, keep=len(at))
    return training


@pytest.mark.parametrize("engine", ["native", "rocksdb", "lmdb"])
@pytest.mark.parametrize("new_step", [6, 10, 30])
def test_the_checkpoint_that_was_restored_outlives_those_after_it(
    tmp_path: Path, engine: str, new_step: int
) -> None:
    training, folder = saved(tmp_path, 5, 10, 15, engine=engine), tmp_path / "run"
    training.restore(folder, step=5)
    expected = training.everything()
    left = []
    for step in range(new_step, new_step + 3):
        training.restore(folder, step=step - 1 if left else 5)
        training.save(folder, step, keep=3)
        left.append(steps(folder))
    assert left == [
        [5, 15, new_step],
        [5, new_step, new_step + 1],
        [new_step, new_step + 1, new_step + 2],
    ]
    training.restore(folder, step=new_step)
    equal(training.everything(), expected)
    assert len(training.model.bags()[0].engine.commits()) == 3
    training.model.close()


def test_a_new_process_and_commits_between_know_the_branch(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10, 15).model.close()
    training, folder = Training(tmp_path), tmp_path / "run"
    training.restore(folder, step=5)
    training.step()
    training.model.bags()[0].commit()
    training.model.close()
    training = Training(tmp_path)
    training.save(folder, 6, keep=2)
    assert steps(folder) == [5, 6]
    training.model.close()


def test_a_branch_of_a_branch(tmp_path: Path) -> None:
    training, folder = saved(tmp_path, 1, 2, 3), tmp_path / "run"
    training.restore(folder, step=2)
    training.save(folder, 4, keep=9)
    training.save(folder, 5, keep=9)
    training.restore(folder, step=4)
    training.save(folder, 6, keep=9)
    for step, left in [(7, [1, 2, 4, 5, 6, 7]), (8, [1, 2, 4, 6, 7, 8]), (9, [2, 4, 6, 7, 8, 9])]:
        training.save(folder, step, keep=6)
        assert steps(folder) == left
    training.model.close()


def test_a_return_to_the_abandoned_branch(tmp_path: Path) -> None:
    training, folder = saved(tmp_path, 1, 2, 3), tmp_path / "run"
    training.restore(folder, step=1)
    training.save(folder, 4, keep=9)
    training.restore(folder, step=3)
    training.save(folder, 5, keep=4)
    assert steps(folder) == [1, 2, 3, 5]
    training.model.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """The next save follows the restored checkpoint, not the one that never was whole."""
    training, folder = saved(tmp_path, 1, 2, 3, stores=2), tmp_path / "run"
    training.restore(folder, step=1)
    inner, full = Engine.commit, training.model.bags()[failing].engine

    def commit(engine: Engine, *arguments: object) -> int:
        if engine is full:
            raise StoreFullError("the disk is full")
        return inner(engine, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "commit", commit)
        with pytest.raises(StoreFullError):
            training.save(folder, 4, keep=2)
    training.save(folder, 4, keep=2)
    assert steps(folder) == [1, 4]
    training.model.close()


def test_a_store_of_an_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commits have the id of the folder alone, and say nothing of what came before."""
    inner = Engine.commit

    def commit(engine: Engine, extra: dict[str, object], tag: str) -> int:
        engine.checkpoint = tag.split()[1]
        return inner(engine, {"step": extra["step"]}, tag)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "commit", commit)
        saved(tmp_path, 1, 2, 3).model.close()
    training, folder = Training(tmp_path), tmp_path / "run"
    meta = json.loads(training.model.bags()[0].engine.commits()[-1].meta)
    assert meta["checkpoint"] == Folder(folder).id
    training.restore(folder, step=1)
    training.save(folder, 4, keep=2)
    assert steps(folder) == [1, 4]
    training.model.close()
