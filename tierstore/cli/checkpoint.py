"""Saves and resumes a training run, and checks that a folder holds the run that is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierstore import checkpoint
from tierstore.cache.machine import check_parent
from tierstore.cli.ranks import ALONE, Ranks
from tierstore.cli.trainer import Trainer
from tierstore.errors import ConfigError
from tierstore.result_file import option_errors

MUST_MATCH = (
    *("data", "data_path", "rows", "tables", "max_rows", "batch_size"),
    *("dim", "optimizer", "lr", "seed"),
)
"""Options that a resumed run must repeat, since otherwise it would not be the same training."""

_STORE_FILES = ("TIERSTORE.json", "TIERSTORE-DEVICE.json", "COMMIT.json")
_ROWS = "rows"


def folder_of(args: argparse.Namespace) -> Path | None:
    """Return where the run is saved: ``--checkpoint``, else in ``--store``; None if neither is given."""
    if args.checkpoint is None and args.store is not None:
        return args.store[0] / "checkpoints"
    return args.checkpoint


def store_of(args: argparse.Namespace) -> list[Path] | None:
    """Return the store's folders: ``--store``, else in ``--checkpoint``; None for a temporary folder."""
    if args.store is None and args.checkpoint is not None:
        return [args.checkpoint / _ROWS]
    return args.store


def make_folder(args: argparse.Namespace) -> None:
    """Make the folder of the checkpoints, if the rows go into it."""
    if args.checkpoint is not None and args.store is None:
        check_parent(args.checkpoint, "--checkpoint")
        with option_errors("--checkpoint", args.checkpoint):
            args.checkpoint.mkdir(exist_ok=True)


def check(args: argparse.Namespace, ranks: Ranks = ALONE) -> None:
    """Raise ``ConfigError`` if the run would mix with another run, or cannot resume the run that it names."""
    folder, stores = folder_of(args), store_of(args)
    if folder is None or stores is None:
        for option, given in (("--resume", args.resume), ("--checkpoint-every", args.checkpoint_every)):
            if given:
                raise ConfigError(f"{option} needs --checkpoint DIR, the folder of the run's checkpoints")
        return
    given = [("--store", store) for store in args.store or ()]
    for option, path in [*given, *([("--checkpoint", folder)] if args.checkpoint else [])]:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{option} {path} is a file; give a folder")
        if wrong := next((one for one in path.parents if one.exists() and not one.is_dir()), None):
            raise ConfigError(f"{option} {path}: {wrong} is a file; give another path")
    extra = checkpoint.read_extra(folder)
    if args.resume:
        if extra is not None:
            _check_options(args, folder, extra, ranks)
        return
    for path, there, what in (
        (folder, extra is not None, "checkpoint"),
        *((store, _is_store(store), "store") for store in stores),
    ):
        if there:
            raise ConfigError(
                f"{path} already holds a {what}; go on with it by --resume, give another folder, or remove it"
            )


def _is_store(folder: Path) -> bool:
    return any((folder / name).exists() for name in _STORE_FILES)


def _check_options(args: argparse.Namespace, folder: Path, extra: Any, ranks: Ranks) -> None:
    if not isinstance(extra, dict) or "options" not in extra:
        raise ConfigError(f"--resume: {folder} holds no checkpoint of tierstore train; give another folder")
    then = extra.get("ranks", 0)
    if then != (ranks.size if ranks.sharded else 0):
        had = f"on {then} ranks (--plan)" if then else "in one process, without --plan"
        raise ConfigError(f"--resume: the run in {folder} was trained {had}; go on with it in this way")
    now = _options(args)
    different = [
        f"--{key.replace('_', '-')} {was}" for key, was in extra["options"].items() if now.get(key) != was
    ]
    if different:
        raise ConfigError(f"--resume: the run in {folder} had {', '.join(different)}; give the same")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {key: None if (value := getattr(args, key)) is None else str(value) for key in MUST_MATCH}


class Saver:
    """Saves a trainer to ``folder`` every ``--checkpoint-every`` batches, and when :meth:`save` is called.

    ``peak_rss_bytes`` returns the most memory that the run had so far.
    """

    def __init__(
        self, trainer: Trainer, args: argparse.Namespace, folder: Path, peak_rss_bytes: Callable[[], int]
    ) -> None:
        self._trainer = trainer
        self._options = _options(args)
        self._every = args.checkpoint_every
        self._folder = folder
        self._peak_rss_bytes = peak_rss_bytes
        self._peak_before = 0
        self.saved: int | None = None
        """Batches of the last checkpoint, None if there is none."""

    def resume(self) -> bool:
        """Bring the trainer to the last checkpoint. Return False if there is none: the run starts anew."""
        found = checkpoint.restore(
            self._folder, self._trainer.model, self._trainer.optimizer, extra={"trainer": self._trainer}
        )
        if found is None:
            return False
        self.saved = found.step
        self._peak_before = found.extra["peak_rss_bytes"]
        return True

    def peak_rss_bytes(self) -> int:
        """Return the peak of this process and of the processes whose run it continues, in bytes."""
        return max(self._peak_before, self._peak_rss_bytes())

    def after_step(self) -> None:
        """Save the run if ``--checkpoint-every`` batches have passed."""
        if self._every and self._trainer.batches % self._every == 0:
            self.save()

    def save(self) -> None:
        """Save the run, unless nothing has changed since the last checkpoint."""
        trainer = self._trainer
        if self.saved == trainer.batches:
            return
        extra = {"options": self._options, "trainer": trainer, "peak_rss_bytes": self.peak_rss_bytes()}
        if trainer.ranks.sharded:
            extra["ranks"] = trainer.ranks.size
        checkpoint.save(self._folder, trainer.model, trainer.optimizer, step=trainer.batches, extra=extra)
        self.saved = trainer.batches
