"""Damaged, foreign and unfitting checkpoints are refused, before anything is changed, and say what to do."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.checkpoint.trainings import Training, equal
from tests.store.test_disk_full import files_no_larger_than
from tierstore import TierConfig, checkpoint
from tierstore.checkpoint.folder import Folder
from tierstore.errors import (
    ConfigError,
    StoreCorruptError,
    StoreFullError,
    StoreLockedError,
    StoreMismatchError,
    TierStoreError,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    training = Training(tmp_path)
    for step in (1, 2):
        training.step()
        training.save(tmp_path / "checkpoints", step, keep=2)
    training.model.close()
    return tmp_path


def newest(folder: Path) -> Path:
    return sorted((folder / "checkpoints").glob("*-step*"))[-1]


def refused(folder: Path, error: type[TierStoreError], what: str, **options: Any) -> None:
    """Restoring fails, and has changed nothing."""
    training = Training(folder, **options)
    training.step()
    before = training.everything()
    state = torch.get_rng_state()
    with pytest.raises(error, match=what):
        training.restore(folder / "checkpoints")
    assert torch.equal(torch.get_rng_state(), state)
    after = training.everything()
    for name in ("random", "losses"):
        before.pop(name), after.pop(name)
    equal(after, before)
    training.model.close()


def test_flipped_and_cut_files(saved: Path) -> None:
    rng = random.Random(0)
    training = Training(saved)
    for file in sorted(newest(saved).iterdir()):
        if file.name == "COMMITTED.json":  # for people
            continue
        data = file.read_bytes()
        cut = [data[: rng.randrange(len(data))] for _ in range(6)]
        places = [rng.randrange(len(data)) for _ in range(24)]
        for bad in [
            *cut,
            b"",
            *(data[:i] + bytes([data[i] ^ 1 << rng.randrange(8)]) + data[i + 1 :] for i in places),
        ]:
            file.write_bytes(bad)
            with pytest.raises(StoreCorruptError, match=str(newest(saved))):
                training.restore(saved / "checkpoints")
        file.unlink()
        with pytest.raises(StoreCorruptError, match=f"{file.name} is missing"):
            training.restore(saved / "checkpoints")
        file.write_bytes(data)
    found = training.restore(saved / "checkpoints")
    assert found is not None
    assert found.step == 2
    training.model.close()


def test_an_older_checkpoint_instead_of_a_damaged_one(saved: Path) -> None:
    (newest(saved) / "tensors.safetensors").write_bytes(b"")
    refused(saved, StoreCorruptError, "restore an older checkpoint with step=")
    training = Training(saved)
    with pytest.raises(StoreMismatchError, match=r"step 7 of these tables; it has steps \[1, 2\]"):
        training.restore(saved / "checkpoints", step=7)
    found = training.restore(saved / "checkpoints", step=1)
    assert found is not None
    assert (found.step, len(found.extra["losses"])) == (1, 1)
    training.step()
    training.save(saved / "checkpoints", 2, keep=1)  # the damaged one goes
    assert len(list((saved / "checkpoints").glob("*-step*"))) == 1
    training.model.close()


def test_links_are_not_followed(saved: Path) -> None:
    file = newest(saved) / "state.json"
    file.rename(saved / "elsewhere")
    file.symlink_to(saved / "elsewhere")
    refused(saved, StoreCorruptError, "does not follow links")
    unit = newest(saved)
    shutil.move(unit, saved / "moved")
    unit.symlink_to(saved / "moved")
    refused(saved, StoreCorruptError, "does not follow links")


def test_another_model(saved: Path) -> None:
    def with_head(change: Any) -> None:
        training = Training(saved)
        change(training.model)
        with pytest.raises(StoreMismatchError) as raised:
            training.restore(saved / "checkpoints")
        training.model.close()
        messages.append(str(raised.value))

    messages: list[str] = []
    with_head(lambda model: model.head.append(torch.nn.Linear(1, 1)))
    with_head(lambda model: setattr(model, "head", torch.nn.Linear(8, 2)))
    with_head(lambda model: model.double())
    assert "it has no head.2.bias; it has no head.2.weight; build the model that was saved" in messages[0]
    assert "it has head.1.bias, which the model has not" in messages[1]
    assert "head.1.bias is torch.float32 (1,) there, torch.float64 (1,) in the model" in messages[2]


def test_other_tables(saved: Path) -> None:
    shutil.copytree(saved / "checkpoints", saved / "other/checkpoints")
    refused(saved / "other", StoreMismatchError, "is not the store that .* was saved from", stores=1)
    refused(saved, StoreMismatchError, r"no whole checkpoint|is not the store that", stores=2)


def test_stores_of_another_folder_are_not_mixed_in(saved: Path) -> None:
    other = Training(saved / "other")
    with pytest.raises(StoreMismatchError, match="holds checkpoints of other stores than"):
        other.save(saved / "checkpoints", 1)
    other.save(saved / "others", 1)
    other.model.close()
    training = Training(saved)
    with pytest.raises(StoreMismatchError, match="others holds checkpoints of other stores"):
        training.save(saved / "others", 3)
    with pytest.raises(StoreMismatchError, match=r"has no whole checkpoint, but the store .*a has a commit"):
        training.restore(saved / "empty")
    training.model.close()


def test_folders_that_are_none(tmp_path: Path) -> None:
    training = Training(tmp_path)
    (tmp_path / "file").write_text("x")
    for call in (lambda path: training.save(path, 1), training.restore):
        with pytest.raises(ConfigError, match="file is a file"):
            call(tmp_path / "file")
        with pytest.raises(
            StoreMismatchError, match=r"is no folder of checkpoints: it has no CHECKPOINTS\.json, but "
        ):
            call(tmp_path)
    assert training.restore(tmp_path / "nowhere") is None
    training.model.close()


def test_a_folder_in_use(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.save(tmp_path / "checkpoints", 0)
    with open(tmp_path / "checkpoints/LOCK") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreLockedError, match="another process is writing a checkpoint"):
            training.save(tmp_path / "checkpoints", 1)
    with pytest.raises(StoreLockedError, match="in use by another object of this process"):
        Training(tmp_path)
    training.model.close()


def test_a_folder_locked_at_a_fork(tmp_path: Path) -> None:
    """A worker of a DataLoader that is forked during a save does not keep the lock."""
    begun, tell = os.pipe()
    with (folder := Folder(tmp_path / "checkpoints")).locked():
        child = os.fork()
        if child == 0:
            os.write(tell, b"x")
            while True:
                signal.pause()
    os.read(begun, 1)
    try:
        with folder.locked():
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_newer_formats(saved: Path) -> None:
    (saved / "checkpoints/CHECKPOINTS.json").write_text('{"format": 2, "id": "00000000"}')
    refused(saved, StoreMismatchError, "has format 2; this tierstore reads 1")
    (saved / "checkpoints/CHECKPOINTS.json").write_text('{"format": 1')
    refused(saved, StoreCorruptError, "CHECKPOINTS.json is damaged")


def test_wrong_arguments(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for options, what in (
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"step": 1, "keep": 0}, "keep is 0"),
        ({"step": 1, "extra": {"f": print}}, "extra.f is a builtin_function_or_method"),
    ):
        with pytest.raises(ConfigError, match=what):
            checkpoint.save(tmp_path / "checkpoints", training.model, **options)
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(ConfigError, match="no tiered module"):
        checkpoint.save(tmp_path / "checkpoints", torch.nn.Linear(1, 1), step=1)
    for config in (TierConfig(), TierConfig(hbm="all")):
        with (
            tierstore.TieredEmbeddingBag(10, 4, config=config) as bag,
            pytest.raises(ConfigError, match="no lasting store"),
        ):
            checkpoint.save(tmp_path / "checkpoints", bag, step=1)
    training.model.close()


def saves_once_there_is_room(training: Training, folder: Path) -> None:
    assert [path.name for path in folder.glob("*.tmp")] == []
    training.save(folder, 3)
    found = training.restore(folder)
    assert found is not None
    assert found.step == 3
    training.model.close()


def test_a_full_disk_leaves_the_checkpoint_before(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(saved)
    training.restore(saved / "checkpoints")
    training.step()

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("tierstore.checkpoint.folder.sync_file", full)
    with pytest.raises(TierStoreError, match="No space left on device; free some space"):
        training.save(saved / "checkpoints", 3)
    monkeypatch.undo()
    saves_once_there_is_room(training, saved / "checkpoints")


@pytest.mark.parametrize("size", [0, 300, 3000])
def test_a_device_that_is_full_at_any_file(saved: Path, size: int) -> None:
    """The library that writes tensors has errors of its own."""
    training = Training(saved)
    training.restore(saved / "checkpoints")
    training.step()
    with files_no_larger_than(size), pytest.raises(StoreFullError, match="File too large"):
        training.save(saved / "checkpoints", 3)
    saves_once_there_is_room(training, saved / "checkpoints")


@pytest.mark.parametrize("used", [3, 20])
@pytest.mark.parametrize(("depth", "window"), [(2, 4), (0, 0)])
def test_not_while_a_prefetch_runs(saved: Path, used: int, depth: int, window: int) -> None:
    """Also where no batch is known ahead, since the lookups of the present one are made."""
    training = Training(saved)
    data = torch.randint(0, 400, (20, 8, 4))
    batches = tierstore.prefetch(data, training.model, depth=depth, window=window)
    for _ in range(used - 1):
        training.step(next(batches))
    batch = next(batches)
    with pytest.raises(ConfigError, match="a prefetch is running on these tables; close it first"):
        training.restore(saved / "checkpoints")
    training.step(batch)
    inner = tierstore.prefetch(data[:3], training.model)
    next(inner)
    inner.close()
    with pytest.raises(ConfigError, match="a prefetch is running on these tables; close it first"):
        training.restore(saved / "checkpoints")
    batches.close()
    found = training.restore(saved / "checkpoints")
    assert found is not None
    training.step()
    training.model.close()
