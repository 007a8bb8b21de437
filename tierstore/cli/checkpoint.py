"""A training run that can go on: rows in the store's commit, the rest in a file that the commit names."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tierstore.cli.trainer import Trainer
from tierstore.errors import ConfigError, StoreCorruptError, StoreMismatchError

MUST_MATCH = ("data", "path", "rows", "tables", "max_rows", "batch_size", "dim", "optimizer", "lr", "seed")
"""Options that a resumed run must repeat, since otherwise it would not be the same training."""

_STORE_FILE = "TIERSTORE.json"


def check_folder(folder: Path | None, resume: bool) -> None:
    """Raises ``ConfigError`` when ``folder`` has a store that is not to be resumed, or lacks one that is."""
    if folder is None:
        if resume:
            raise ConfigError("--resume needs --ssd DIR, the folder of the run to go on with")
        return
    exists = (folder / _STORE_FILE).exists()
    if exists and not resume:
        raise ConfigError(
            f"{folder} already holds a store; go on with it by --resume, give another folder, or remove it"
        )
    if resume and not exists:
        raise ConfigError(f"--resume: {folder} holds no store; leave --resume out to start one there")


def save(trainer: Trainer, args: argparse.Namespace) -> None:
    """Commits rows, dense parameters and position as one: after a crash the last commit's state is whole."""
    name = f"dense-{trainer.batches}.pt"
    file = args.ssd / name
    temporary = file.with_suffix(".tmp")
    model = {key: tensor.detach() for key, tensor in dense_tensors(trainer).items()}
    with open(temporary, "wb") as out:
        torch.save({"model": model, "optimizer": trainer.optimizer.state_dict()}, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
    trainer.embeddings.commit({"batches": trainer.batches, "dense": name, "options": options(args)})
    for old in args.ssd.glob("dense-*.pt"):
        if old.name != name:
            with suppress(OSError):
                old.unlink()


def load(trainer: Trainer, args: argparse.Namespace) -> None:
    """Puts ``trainer`` where the last commit in ``args.ssd`` was; the rows are there already."""
    saved = trainer.embeddings.engine.committed_extra()
    if "dense" not in saved:
        raise StoreMismatchError(
            f"--resume: {args.ssd} has no commit of tierstore train; start in another folder"
        )
    now = options(args)
    different = [
        f"--{key.replace('_', '-')} {was}" for key, was in saved["options"].items() if now[key] != was
    ]
    if different:
        raise ConfigError(f"--resume: the run in {args.ssd} had {', '.join(different)}; repeat that")
    file = args.ssd / saved["dense"]
    try:
        content = torch.load(file, weights_only=True)
    except FileNotFoundError:
        raise StoreCorruptError(f"{file} with the dense parameters of the last commit is missing") from None
    with torch.no_grad():
        for name, tensor in dense_tensors(trainer).items():
            tensor.copy_(content["model"][name])
    trainer.optimizer.load_state_dict(content["optimizer"])
    trainer.batches = saved["batches"]


def dense_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and buffers of the model outside its tables, by name."""
    of_tables = {id(tensor) for tensor in _tensors(trainer.embeddings).values()}
    return {name: tensor for name, tensor in _tensors(trainer.model).items() if id(tensor) not in of_tables}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {key: None if (value := getattr(args, key)) is None else str(value) for key in MUST_MATCH}
