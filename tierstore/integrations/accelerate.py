"""Tiered tables under Hugging Face Accelerate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tierstore.checkpoint.state import tiered_modules
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.integrations.commits import CheckpointedRows, one_model
from tierstore.integrations.required import need
from tierstore.modules.tables import without_rows

need("accelerate")

import accelerate  # noqa: E402
import torch  # noqa: E402

_FILE = "tierstore.pt"


class Accelerator(accelerate.Accelerator):
    """Accelerate's ``Accelerator``, whose saved states are one unit with the rows of the prepared models.

    ``save_state`` commits the stores, and the folder that it writes names the commits; ``load_state`` brings
    the tables back to them. Everything else is as in Accelerate. To go on in the middle of an epoch, give the
    loop ``tierstore.prefetch(loader, model)`` and register that with ``register_for_checkpointing``.

    Raises ConfigError for tables that have no lasting store, or are sharded, and for gradients that
    Accelerate accumulates, since the backward pass updates rows.
    """

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients, and update the rows. Raises ConfigError where Accelerate accumulates."""
        if any(tiered_modules(model) for model in self._models):
            self._check_accumulation()
        super().backward(loss, **kwargs)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """Save models, optimizers, schedules, random generators and registered objects in a folder, and
        commit the rows for it."""
        rows = self._rows()
        if output_dir is not None:  # a kill from here on must not leave new files that name old rows
            (Path(output_dir) / _FILE).unlink(missing_ok=True)
        with without_rows():
            folder = super().save_state(output_dir, *args, **kwargs)
        saved = rows.commit(folder)
        _write(Path(folder) / _FILE, saved)
        rows.forget(folder, but=saved["tag"])
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what :meth:`save_state` saved, and bring the rows back to its commits."""
        rows = self._rows()
        if input_dir is None:
            input_dir = self._newest()
        path = Path(input_dir) / _FILE
        if not path.exists():
            raise StoreMismatchError(
                f"{input_dir} has no whole state: {_FILE}, which names the rows, is missing; give another "
                "folder that save_state wrote"
            )
        rows.go_to(torch.load(path, weights_only=True), input_dir)
        with without_rows():
            super().load_state(input_dir, *args, **kwargs)

    def _newest(self) -> str:
        """Return the folder of Accelerate's own names that was saved last and is whole."""
        below = Path(self.project_dir or ".") / "checkpoints"
        whole = [file.parent for file in below.glob(f"checkpoint_*/{_FILE}")]
        if not whole:
            raise StoreMismatchError(f"{below} has no whole state; give load_state the folder of one")
        return str(max(whole, key=lambda folder: int(folder.name.rpartition("_")[2])))

    def _rows(self) -> CheckpointedRows:
        if not self._models:
            raise ConfigError("no model is prepared; call prepare(model, ...) first")
        self._check_accumulation()
        return CheckpointedRows(one_model(self._models))

    def _check_accumulation(self) -> None:
        if self.gradient_accumulation_steps != 1:
            raise ConfigError(
                "the backward pass updates rows, so gradient_accumulation_steps would act on the dense "
                "parameters alone: leave it at 1, and use `with tierstore.accumulate(model) as rows:` around "
                "the backward passes"
            )


def _write(path: Path, saved: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        torch.save(saved, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
