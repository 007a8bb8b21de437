"""Tiered tables under ``lightning.Trainer``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from tierstore.checkpoint.state import random_states, set_random_states
from tierstore.checkpoint.tree import pack, unpack
from tierstore.errors import ConfigError
from tierstore.integrations.commits import CheckpointedRows
from tierstore.integrations.required import need
from tierstore.modules.tables import without_rows

need("lightning")

from lightning.fabric.plugins import CheckpointIO  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

_KEY = "tierstore"


class TierStoreCallback(Callback):
    """Makes each checkpoint of the trainer one unit with the rows of its tables.

    A checkpoint commits the stores and names the commits, in place of copies of rows. Loading it
    (``trainer.fit(ckpt_path=...)``) brings the tables back to these commits, and random generators to their
    states. Give the trainer ``tierstore.prefetch(loader, model)`` as its loader: the prefetch fetches rows
    ahead, and goes on in the middle of an epoch.

    Raises ConfigError for tables that have no lasting store, or are sharded, and for gradients that the
    trainer accumulates or clips, since the backward pass updates rows.
    """

    def __init__(self) -> None:
        self.restored_random: dict[str, Any] | None = None
        """States of the random generators that the next training batch begins with."""
        self.stage = ""
        """What the trainer does: "fit", "validate", "test" or "predict"."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        rows = CheckpointedRows(pl_module)
        if stage == "fit":
            _check(trainer, pl_module)
        inner = trainer.strategy.checkpoint_io
        if isinstance(inner, RowsIO):
            inner = inner.inner
        else:
            trainer.save_checkpoint = _without_rows(trainer.save_checkpoint)  # type: ignore[method-assign]
        trainer.strategy.checkpoint_io = RowsIO(inner, rows, self)
        self.stage = stage

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        _check(trainer, pl_module)  # again: callbacks may change what the trainer accumulates
        if self.restored_random is not None:
            set_random_states(self.restored_random)
            self.restored_random = None


class RowsIO(CheckpointIO):
    """Reads and writes checkpoints by ``inner``, with the commits of ``rows``."""

    def __init__(self, inner: CheckpointIO, rows: CheckpointedRows, callback: TierStoreCallback) -> None:
        self.inner = inner
        self._rows = rows
        self._callback = callback

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        saved = self._rows.commit(path)
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **self._rows.marks()}
        tensors: dict[str, Tensor] = {}
        random = pack(random_states(), "random", tensors)
        checkpoint[_KEY] = {**saved, "random": random, "tensors": tensors}
        self.inner.save_checkpoint(checkpoint, path, storage_options)
        self._rows.forget(path, but=saved["tag"])

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = self.inner.load_checkpoint(path, *args, **kwargs)
        saved = checkpoint.get(_KEY)
        if saved is not None:
            later = self._rows.files_after(saved)
            if later and self._callback.stage != "fit":
                raise ConfigError(
                    f"to {self._callback.stage} {path}, the tables would go back to its rows, and the rows "
                    f"of {', '.join(later)} would be lost: use the newest checkpoint, or a copy of the "
                    "folder of the tables, or remove these files"
                )
            self._rows.go_to(saved, path)
            self._callback.restored_random = unpack(saved["random"], saved["tensors"])
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        self.inner.remove_checkpoint(path)
        self._rows.forget(path)

    def teardown(self) -> None:
        self.inner.teardown()


def _check(trainer: Trainer, module: LightningModule) -> None:
    if not module.automatic_optimization:
        return
    if trainer.accumulate_grad_batches != 1 or trainer.gradient_clip_val:
        raise ConfigError(
            "the backward pass updates rows, so accumulate_grad_batches and gradient_clip_val of the trainer "
            "would act on the dense parameters alone: set automatic_optimization = False and use "
            "`with tierstore.accumulate(self) as rows:` in training_step, or larger batches and "
            "clip_grad_norm of the tables' optimizer"
        )


def _without_rows(save: Callable[..., None]) -> Callable[..., None]:
    """Return ``save`` that computes no dense copies of tables, since commits have their rows."""

    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        with without_rows():
            save(*args, **kwargs)

    return save_checkpoint
