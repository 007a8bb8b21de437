"""Accelerate trains the bits of a plain loop, also after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.state import GradientState

import tierstore
from tests import warm
from tests.integrations.trainings import Model, assert_equal, dense_optimizer, loader, plain_loop, result
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.integrations.accelerate import Accelerator

ROOT = Path(__file__).resolve().parents[2]


def train(folder: Path, kill_at: int = -1, resume: Path | None = None) -> Model:
    accelerator = Accelerator(cpu=True)
    model = Model(folder / "rows")
    model, optimizer, batches = accelerator.prepare(model, dense_optimizer(model), loader())
    batches = tierstore.prefetch(batches, model)
    accelerator.register_for_checkpointing(batches)
    torch.manual_seed(3 if resume is None else 99)
    if resume is not None:
        accelerator.load_state(str(resume))
    step = 0 if resume is None else 5
    for ids in batches:
        optimizer.zero_grad()
        accelerator.backward(model(ids))
        optimizer.step()
        step += 1
        if step == 5:
            accelerator.save_state(str(folder / "five"))
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return model


def test_the_bits_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    model = train(tmp_path)
    found = result(model)
    model.bag.close(commit=False)
    assert_equal(found, plain_loop(tmp_path / "plain"))


def test_a_killed_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.integrations.test_accelerate import train; "
        f"train(Path({str(tmp_path)!r}), kill_at=8)"
    )
    done = subprocess.run([warm.python(), "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    model = train(tmp_path, resume=tmp_path / "five")
    found = result(model)
    model.bag.close(commit=False)
    assert_equal(found, plain_loop(tmp_path / "plain"))


def test_states_keep_their_rows_while_they_are_there(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.project_configuration.automatic_checkpoint_naming = True
    accelerator.project_configuration.total_limit = 2
    model = accelerator.prepare(Model(tmp_path / "rows"))
    for step, ids in enumerate(loader(4)):
        accelerator.backward(model(ids))
        if step == 2:
            before = result(model)
        accelerator.save_state()
    assert len([commit for commit in model.bag.engine.commits() if commit.tag]) == 2
    accelerator.load_state(str(tmp_path / "checkpoints/checkpoint_2"))
    assert_equal(result(model), before)
    (tmp_path / "checkpoints/checkpoint_2/tierstore.pt").unlink()
    with pytest.raises(StoreMismatchError, match=r"has no whole state: tierstore\.pt"):
        accelerator.load_state(str(tmp_path / "checkpoints/checkpoint_2"))
    model.bag.close(commit=False)


def test_what_would_act_on_dense_gradients_alone_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(Model(tmp_path / "rows"))
    with pytest.raises(ConfigError, match=r"use `with tierstore\.accumulate"):
        accelerator.save_state(str(tmp_path / "state"))
    before = model.bag.rows(torch.arange(3000))
    with pytest.raises(ConfigError, match=r"leave it at 1, and use `with tierstore\.accumulate"):
        accelerator.backward(model(next(iter(loader()))))
    assert torch.equal(model.bag.rows(torch.arange(3000)), before)
    with pytest.raises(ConfigError, match="no model is prepared"):
        Accelerator(cpu=True).save_state(str(tmp_path / "state"))
    model.bag.close(commit=False)


def test_and_with_accelerates_own_class(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, batches = accelerator.prepare(Model(tmp_path / "rows"), loader())
    updates = model.bag.fused_optimizer
    try:
        with accelerator.accumulate(model):
            loss = model(next(iter(batches)))
            with pytest.raises(ConfigError, match="of Accelerate would act on dense parameters alone"):
                accelerator.backward(loss)
        assert updates.num_updates == 0
        with tierstore.accumulate(model):
            for _, ids in zip(range(2), batches, strict=False):
                with accelerator.accumulate(model):
                    accelerator.backward(model(ids))
        assert updates.num_updates == 1
    finally:
        GradientState._reset_state()
        model.bag.close(commit=False)


def test_without_accelerate_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['accelerate'] = None\n"
        "from tierstore.errors import MissingPackageError\n"
        "try:\n    import tierstore.integrations.accelerate\n"
        "except MissingPackageError as error:\n    print(error)\n"
    )
    output = subprocess.run([warm.python(), "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install accelerate" in output
