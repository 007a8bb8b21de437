"""Lightning trains the bits of a plain loop, also after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

import tierstore
from tests import warm
from tests.integrations.trainings import (
    STEPS,
    Model,
    assert_equal,
    dense_optimizer,
    loader,
    plain_loop,
    result,
)
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.integrations.lightning import TierStoreCallback

ROOT = Path(__file__).resolve().parents[2]


class Module(LightningModule):
    def __init__(self, path: Path, automatic: bool = True) -> None:
        super().__init__()
        self.model = Model(path)
        self.automatic_optimization = automatic

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor | None:
        loss = self.model(ids)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, ids: torch.Tensor, index: int) -> None:
        self.model(ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return dense_optimizer(self.model)

    def on_train_start(self) -> None:
        if self.trainer.global_step == 0:
            torch.manual_seed(3)


class KillAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, **quiet, **options}
    saves = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=5, save_top_k=1, save_last=True)
    return Trainer(accelerator="cpu", callbacks=[TierStoreCallback(), saves, *callbacks], **options)


def fit(folder: Path, *callbacks: Callback, ckpt_path: Path | None = None, **options: Any) -> Module:
    module = Module(folder / "rows", options.pop("automatic", True))
    batches = tierstore.prefetch(loader(), module)
    validation = [options.pop("validation")] if "validation" in options else []
    trainer(folder, *callbacks, **options).fit(module, batches, *validation, ckpt_path=ckpt_path)
    return module


def last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_the_bits_are_those_of_a_plain_loop(automatic: bool, tmp_path: Path) -> None:
    module = fit(tmp_path, automatic=automatic, max_epochs=2)
    found = result(module.model)
    module.model.bag.close(commit=False)
    assert_equal(found, plain_loop(tmp_path / "plain", epochs=2))


def test_validation_changes_nothing(tmp_path: Path) -> None:
    own = torch.Generator()  # without one, a DataLoader draws from the global generator
    validation = torch.utils.data.DataLoader(torch.arange(64).reshape(16, 4), 4, generator=own)
    module = fit(tmp_path, validation=validation, val_check_interval=3)
    found = result(module.model)
    module.model.bag.close(commit=False)
    assert_equal(found, plain_loop(tmp_path / "plain"))


def test_a_killed_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.integrations.test_lightning import *; "
        f"fit(Path({str(tmp_path)!r}), KillAt(8))"
    )
    done = subprocess.run([warm.python(), "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    module = fit(tmp_path, ckpt_path=last(tmp_path))
    found = result(module.model)
    assert module.trainer.global_step == STEPS
    module.model.bag.close(commit=False)
    assert_equal(found, plain_loop(tmp_path / "plain"))


def test_rows_of_removed_checkpoints_go(tmp_path: Path) -> None:
    module = fit(tmp_path)
    kept = [commit for commit in module.model.bag.engine.commits() if commit.tag]
    files = list((tmp_path / "checkpoints").glob("*.ckpt"))
    assert len(files) == 2  # the best and the last
    assert len(kept) == 2
    module.model.bag.close(commit=False)


def test_a_checkpoint_has_no_rows_and_is_of_its_store_only(tmp_path: Path) -> None:
    fit(tmp_path).model.bag.close(commit=False)
    saved = torch.load(last(tmp_path), weights_only=True)
    assert saved["state_dict"]["model.bag.weight"].numel() < 100
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(StoreMismatchError, match=r"other/rows does not hold the rows of .*last\.ckpt"):
        fit(other, ckpt_path=last(tmp_path))


class Evaluated(Module):
    def test_step(self, ids: torch.Tensor, index: int) -> None:
        self.model(ids)


def test_evaluating_an_older_checkpoint_does_not_lose_a_newer_one(tmp_path: Path) -> None:
    fit(tmp_path).model.bag.close(commit=False)
    (older,) = (path for path in (tmp_path / "checkpoints").glob("*.ckpt") if path.name != "last.ckpt")
    module = Evaluated(tmp_path / "rows")
    trained = result(module.model)
    with pytest.raises(ConfigError, match=r"the rows of .*last\.ckpt would be lost"):
        trainer(tmp_path).test(module, loader(), ckpt_path=older)
    assert torch.equal(module.model.bag.rows(torch.arange(3000)), trained["rows"])
    trainer(tmp_path).test(module, loader(), ckpt_path=last(tmp_path))
    module.model.bag.close(commit=False)


def test_loading_without_the_trainer_checks_the_rows(tmp_path: Path) -> None:
    fit(tmp_path).model.bag.close(commit=False)
    other = Module(tmp_path / "other")
    with pytest.raises(StoreMismatchError, match="the table has other rows now"):
        other.load_state_dict(torch.load(last(tmp_path), weights_only=True)["state_dict"])
    other.model.bag.close(commit=False)


@pytest.mark.parametrize("option", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_what_would_act_on_dense_gradients_alone_is_refused(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"use `with tierstore\.accumulate"):
        fit(tmp_path, **option)


@pytest.mark.parametrize("option", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_and_without_our_callback(option: dict[str, Any], tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    module, other = Module(tmp_path / "rows"), Model(tmp_path / "other")
    for one in (quiet, quiet | option):
        trainer = Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, **one)
        before = module.model.bag.fused_optimizer.num_updates
        if one is quiet:
            trainer.fit(module, loader())
            continue
        with pytest.raises(ConfigError, match="of Lightning's Trainer would act on dense parameters alone"):
            trainer.fit(module, loader())
        assert module.model.bag.fused_optimizer.num_updates == before > 0
    other(next(iter(loader()))).backward()  # the trainer is not that of this model
    for model in (module.model, other):
        model.bag.close(commit=False)


def test_a_callback_that_accumulates_later_is_refused(tmp_path: Path) -> None:
    module, later = Module(tmp_path / "rows"), GradientAccumulationScheduler({1: 2})
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[TierStoreCallback(), later],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with pytest.raises(ConfigError, match=r"use `with tierstore\.accumulate"):
        trainer.fit(module, loader())
    assert trainer.current_epoch == 1
    module.model.bag.close(commit=False)


def test_without_lightning_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['lightning'] = None\n"
        "from tierstore.errors import MissingPackageError\n"
        "try:\n    import tierstore.integrations.lightning\n"
        "except MissingPackageError as error:\n    print(error)\n"
    )
    output = subprocess.run([warm.python(), "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install lightning" in output
