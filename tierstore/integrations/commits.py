"""The rows that belong to a checkpoint of another framework: commits of the stores, with a tag of their own.

The framework's file, which is written after the commits, names the tag. So a checkpoint is whole as soon as
its file is, and the rows of the checkpoint before stay until then.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from torch import Tensor, nn

from tierstore.cache.engine import Engine
from tierstore.checkpoint.state import engines_of, fused_optimizers, tiered_modules
from tierstore.checkpoint.training import check_stores
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.modules.left_out import bare_mark
from tierstore.modules.tables import HasWeight, without_rows
from tierstore.store.protocol import CommitInfo

logger = logging.getLogger("tierstore")

_PREFIX = "of-file-"


class CheckpointedRows:
    """The rows of a model, saved and restored with files of checkpoints.

    Raises ConfigError for models without tiered modules, without lasting stores, and with sharded tables.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = tiered_modules(model)
        self._model = model
        if any(module.collective for module in self._modules.values()):
            raise ConfigError(
                "sharded tables are committed by all ranks together: save and restore this model by "
                "tierstore.checkpoint.save and restore"
            )
        check_stores(self._engines())

    def _engines(self) -> list[Engine]:
        return engines_of(self._modules)

    def commit(self, file: str | os.PathLike[str]) -> dict[str, Any]:
        """Commit all rows for the checkpoint ``file``, which must keep the returned plain values."""
        tag = _PREFIX + uuid4().hex
        with without_rows():
            fused = {path: one.state_dict() for path, one in fused_optimizers(self._modules).items()}
        for engine in self._engines():
            engine.commit({"file": _absolute(file)}, tag)
        return {"tag": tag, "fused": fused}

    def go_to(self, saved: dict[str, Any], file: str | os.PathLike[str]) -> None:
        """Bring the rows and fused optimizers back to what :meth:`commit` saved. Later commits are lost; a
        warning names files that need them.

        Raises StoreMismatchError, before anything changes, if a store has not these rows.
        """
        fused = fused_optimizers(self._modules)
        if set(fused) != set(saved["fused"]):
            raise StoreMismatchError(
                f"{file} has the tables of {sorted(saved['fused'])}, and the model those of {sorted(fused)}; "
                "build the model that was saved"
            )
        engines = self._engines()
        commits = [_commit_of(engine, saved["tag"], file) for engine in engines]
        if later := self.files_after(saved):
            logger.warning("the rows go back to the rows of %s: rows of %s are lost", file, ", ".join(later))
        for engine, commit in zip(engines, commits, strict=True):
            engine.go_to(commit)
        with without_rows():
            for path, optimizer in fused.items():
                optimizer.load_state_dict(saved["fused"][path])

    def files_after(self, saved: dict[str, Any]) -> list[str]:
        """Return the files whose rows are lost when the rows go back to ``saved``."""
        files = set()
        for engine in self._engines():
            at = next((commit.id for commit in engine.commits() if commit.tag == saved["tag"]), 0)
            later = [one for one in engine.commits() if at and one.id > at and one.tag.startswith(_PREFIX)]
            files |= {_file_of(commit) for commit in later if not _is_over(commit, "")}
        return sorted(files)

    def marks(self) -> dict[str, Tensor]:
        """Return what stands for the present rows in the model's state dict: loading it elsewhere is an
        error, unless the tables have these rows. A module with several names has several entries."""
        return {
            f"{path}.weight" if path else "weight": bare_mark(part.rows_version())
            for path, part in self._model.named_modules(remove_duplicate=False)
            if isinstance(part, HasWeight)
        }

    def forget(self, file: str | os.PathLike[str], but: str | None = None) -> None:
        """Drop the commits of ``file``, ``but`` not that of this tag, and the commits of files that are
        gone. The newest commit of a store stays."""
        for engine in self._engines():
            for commit in engine.commits()[:-1]:
                if commit.tag.startswith(_PREFIX) and commit.tag != but and _is_over(commit, _absolute(file)):
                    engine.drop_commit(commit.id)


def one_model(models: Sequence[nn.Module]) -> nn.Module:
    """Return one module that has all ``models``."""
    return models[0] if len(models) == 1 else nn.ModuleList(models)


def _absolute(file: str | os.PathLike[str]) -> str:
    name = os.fspath(file)
    return name if "://" in name else os.path.abspath(name)


def _file_of(commit: CommitInfo) -> str:
    return str(json.loads(commit.meta)["extra"].get("file", ""))


def _is_over(commit: CommitInfo, file: str) -> bool:
    """Return whether a commit is of ``file``, or of a local file that is gone."""
    of = _file_of(commit)
    return of == file or ("://" not in of and not os.path.exists(of))


def _commit_of(engine: Engine, tag: str, file: str | os.PathLike[str]) -> int:
    for commit in engine.commits():
        if commit.tag == tag:
            return commit.id
    raise StoreMismatchError(
        f"{engine.config.where} does not hold the rows of {file}: they were saved from another folder, or a "
        "later checkpoint has taken this one's place; give TierConfig the path of that training, or an "
        "existing checkpoint of this one"
    )
