"""Saves and restores a whole training as one unit: rows in the stores' commits, other state in files.

First the dense files are written, durably, then all stores commit with the checkpoint's tag. A checkpoint is
whole when every store has a commit with its tag, so the last of these commits completes it. Until then the
checkpoint before stays.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tierstore.cache.engine import Engine
from tierstore.checkpoint import ranks
from tierstore.checkpoint.folder import Folder, Unit
from tierstore.checkpoint.state import DenseState, Parts, capture, engines_of, own_state, tiered_modules
from tierstore.config import is_integer
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.store.identity import plain
from tierstore.store.protocol import StoredTable

logger = logging.getLogger("tierstore")

AFTER = "after"
"""Name in a commit's ``extra``: the number of the checkpoint that its training saved or restored last."""


@dataclass(frozen=True)
class Restored:
    """The result of :func:`restore`."""

    step: int
    extra: Any
    """The ``extra`` that was given to :func:`save`, with the state dict of each object that has one."""
    path: Path
    """Folder of the checkpoint's own files."""


def save(
    dir: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    step: int,
    extra: Any = None,
    loader: Any = None,
    keep: int = 1,
) -> Path:
    """Save the whole training in ``dir`` as one checkpoint, and drop older checkpoints beyond ``keep``: first
    those of a future that a :func:`restore` of an older step has abandoned.

    Changed rows go to their stores as commits, all other state to a folder in ``dir``: parameters and buffers
    of ``model``, its fused optimizers, ``optimizer`` (one, or a list or dict of optimizers), Python's,
    NumPy's and torch's random generators, the position of ``loader`` (an object with ``state_dict()``: a
    stateful data loader, or the result of :func:`tierstore.prefetch`), and ``extra``: plain values, tensors,
    and objects with ``state_dict()`` such as learning-rate schedules, in lists and dicts.

    Call it between two steps, in the thread that trains. A prefetch may be running: rows that it has fetched
    ahead are saved as they are after ``step`` steps. A kill at any moment leaves this checkpoint, whole, or
    the checkpoint before. Returns the folder of its files.

    Raises ``ConfigError`` for tables without a lasting store (``TierConfig(path=...)``) and for values that
    cannot be kept; ``StoreMismatchError`` when ``dir`` holds checkpoints of other stores;
    ``StoreLockedError`` when another process is saving there.

    A model with sharded collections is saved and restored by all ranks together; rank 0 must see ``dir``.
    The rows are then in the commit of all ranks, ``keep`` must be 1, and each rank has its own position in
    the data and random generators.
    """
    if not is_integer(step):
        raise ConfigError(f"step is {step!r}; it must be the number of steps so far")
    if not is_integer(keep, 1):
        raise ConfigError(f"keep is {keep!r}; it must be 1 or more, since the last checkpoint is kept")
    parts, modules = Parts(model, optimizer, loader, extra), tiered_modules(model)
    folder = Folder(dir)
    if any(module.collective for module in modules.values()):
        return ranks.save(folder, parts, modules, step, keep)
    engines = engines_of(modules)
    check_stores(engines)
    state, tensors = capture(parts, own_state(loader))
    with folder.locked():
        check_owner(folder, engines)
        stores = [describe(engine) for engine in engines]
        unit = folder.add(step, {"stores": stores, "state": state}, tensors)
        about = {"checkpoint": unit.path.name, "step": step, AFTER: before(folder, engines, unit)}
        commits = []
        for engine in engines:
            commit = commit_checkpoint(engine, about, unit.tag)
            commits.append({"path": engine.config.where, "commit": commit})
        unit.note_committed(commits)
        forget_old(folder, engines, keep)
    return unit.path


def restore(
    dir: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    step: int | None = None,
    extra: Any = None,
    loader: Any = None,
) -> Restored | None:
    """Restore the last checkpoint of :func:`save` (or the checkpoint of ``step``); return None if there is
    none.

    ``model``, ``optimizer``, ``loader`` and ``extra`` are built as for the training that was saved; the
    objects in ``extra`` get their state, and so do the global random generators. The tables' stores must be
    the stores that the checkpoint was saved from; they go back to the commits of the checkpoint, and later
    training is lost. Sharded collections are at their last commit when they are made, on any number of ranks
    and with any plan, so the model must be a new one.

    Raises ``StoreMismatchError`` for a checkpoint of another model or other stores, and ``StoreCorruptError``
    for damaged files, before it changes anything.
    """
    folder = Folder(dir)
    parts, modules = Parts(model, optimizer, loader, extra), tiered_modules(model)
    if any(module.collective for module in modules.values()):
        found = ranks.restore(folder, parts, modules, step)
        return None if found is None else Restored(*found)
    engines = engines_of(modules)
    unit = choose(folder, engines, step)
    if unit is None:
        return None
    state = unit.read_state()
    compare_stores(unit, state["stores"], engines)
    dense = DenseState(state["state"], unit.read_tensors())
    dense.check(model)
    for engine in engines:
        go_back(engine, unit)
    dense.apply(parts)
    return Restored(state["step"], dense.extra, unit.path)


def read_extra(dir: str | os.PathLike[str]) -> Any:
    """Return ``extra`` of the newest checkpoint in ``dir``, without a model; None if there is none.

    After a crash this may be a checkpoint that :func:`restore` passes over.
    """
    units = Folder(dir).units()
    if not units:
        return None
    packed = units[-1].read_state()["state"]["extra"]
    return DenseState({"extra": packed}, units[-1].read_tensors()).extra


# -- stores ----------------------------------------------------------------------------------------


def check_stores(engines: Sequence[Engine]) -> None:
    if not engines:
        raise ConfigError("the model has no tiered module; use torch.save for other modules")
    for engine in engines:
        engine.check_open()
        if engine.store is None or engine.config.path is None:
            raise ConfigError(
                f"tables {[table.name for table in engine.tables]} have no lasting store to commit their "
                "rows to; give TierConfig(path=..., ssd=...)"
            )


def check_owner(folder: Folder, engines: Sequence[Engine]) -> None:
    """Raise ``StoreMismatchError`` if ``folder`` has checkpoints of other stores: they must not be mixed, nor
    removed."""
    if any(unit.committed for unit in folder.units()):
        for engine in engines:
            if not _comes_from(engine, folder):
                raise StoreMismatchError(
                    f"{folder.path} holds checkpoints of other stores than {engine.config.where}; give a "
                    "folder of its own, or restore() first to go on with that training"
                )


def _comes_from(engine: Engine, folder: Folder) -> bool:
    return folder.owns(engine.checkpoint) or engine.checkpoint == folder.id


def describe(engine: Engine) -> dict[str, Any]:
    return {
        "path": engine.config.where,
        "engine": engine.config.engine,
        "tables": [spec.to_dict() for spec in plain(engine.specs)],
    }


def compare_stores(unit: Unit, saved: Sequence[Mapping[str, Any]], engines: Sequence[Engine]) -> None:
    was = [[StoredTable(**table) for table in store["tables"]] for store in saved]
    now = [list(plain(engine.specs)) for engine in engines]
    if was == now:
        return
    names_was, names_now = ([[spec.name for spec in store] for store in stores] for stores in (was, now))
    if names_was != names_now:
        what = f"its stores have tables {names_was}, the model's {names_now}"
    else:
        old, new = next(
            (a, b) for x, y in zip(was, now, strict=True) for a, b in zip(x, y, strict=True) if a != b
        )
        what = "; ".join(
            f"{name} of table {old.name!r} is {value!r} there, {asdict(new)[name]!r} in the model"
            for name, value in asdict(old).items()
            if value != asdict(new)[name]
        )
    raise StoreMismatchError(
        f"{unit.path} is a checkpoint of another model: {what}; build the model that was saved, or give "
        "another folder"
    )


def commit_of(engine: Engine, unit: Unit) -> int:
    """Return the number of the checkpoint's commit in the engine's store, 0 if it is not there."""
    return next((commit.id for commit in engine.commits() if commit.tag == unit.tag), 0)


def _is_complete(unit: Unit, engines: Sequence[Engine]) -> bool:
    return all(commit_of(engine, unit) for engine in engines)


def commit_checkpoint(engine: Engine, extra: dict[str, Any], tag: str) -> int:
    """Commit the rows of a checkpoint, and with them that they come from it from now on."""
    was, engine.checkpoint = engine.checkpoint, tag
    try:
        return engine.commit(extra, tag)
    except BaseException:  # the next save still follows the checkpoint before
        engine.checkpoint = was
        raise


def go_back(engine: Engine, unit: Unit) -> None:
    engine.go_to(commit_of(engine, unit))
    engine.checkpoint = unit.tag


def before(folder: Folder, engines: Sequence[Engine], unit: Unit) -> int:
    """Return the number of the checkpoint that the training of ``unit`` has saved or restored last."""
    numbers = [folder.number_of(engine.checkpoint) for engine in engines]
    return min(unit.number - 1 if number is None else number for number in numbers)


def in_order_of_use(folder: Folder, engines: Sequence[Engine]) -> list[Unit]:
    """Return the whole checkpoints in the order in which they may go: first those of abandoned branches, made
    after a checkpoint that was restored later, then those that the newest one comes from; oldest first."""
    lineage, abandoned, first = [], [], math.inf
    for unit in reversed(folder.units()):
        if not _is_complete(unit, engines):
            continue
        if unit.number > first:
            abandoned.append(unit)
        else:
            lineage.append(unit)
            first = _number_before(unit, engines[0])
    return [*reversed(abandoned), *reversed(lineage)]


def _number_before(unit: Unit, engine: Engine) -> int:
    """Return what :func:`before` did when ``unit`` was saved."""
    meta = next(commit.meta for commit in engine.commits() if commit.tag == unit.tag)
    return int(json.loads(meta)["extra"].get(AFTER, unit.number - 1))


def forget_old(folder: Folder, engines: Sequence[Engine], keep: int) -> None:
    kept = in_order_of_use(folder, engines)[-keep:]
    try:
        folder.remove_all_but(kept)
    except OSError as error:  # the new checkpoint is safe, and the next save tries again
        logger.warning("removing old checkpoints of %s: %s", folder.path, error)
        return
    tags = {unit.tag for unit in kept}
    for engine in engines:
        for commit in engine.commits():
            if folder.owns(commit.tag) and commit.tag not in tags:
                engine.drop_commit(commit.id)


def choose(folder: Folder, engines: Sequence[Engine], step: int | None) -> Unit | None:
    units = [unit for unit in folder.units() if step is None or unit.step == step]
    for unit in reversed(units):
        if _is_complete(unit, engines):
            return unit
    if step is not None:
        steps = sorted({unit.step for unit in folder.units() if _is_complete(unit, engines)})
        raise StoreMismatchError(
            f"{folder.path} has no checkpoint of step {step} of these tables; it has steps {steps}"
        )
    committed = [unit for unit in units if unit.committed]
    for engine in engines:
        where = engine.config.where
        if committed and not _comes_from(engine, folder):
            raise StoreMismatchError(
                f"{where} is not the store that {committed[-1].path} was saved from "
                f"({_paths(committed[-1])}); build the model with that path, or give another folder of "
                "checkpoints"
            )
        if engine.commits():
            raise StoreMismatchError(
                f"{folder.path} has no whole checkpoint, but the store {where} has a commit of its own; "
                f"give the folder of its checkpoints, or remove {where} to start anew"
            )
    return None


def _paths(unit: Unit) -> str:
    return ", ".join(str(store["path"]) for store in unit.read_state()["stores"])
