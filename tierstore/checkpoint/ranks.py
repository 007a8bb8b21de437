"""Checkpoints of models whose collections are sharded: all ranks save and restore together.

Rank 0 writes the files. The commit of all ranks (``ShardedCollection.commit``) names them and is the atomic
step: it is restored by new collections, on any number of ranks, and says which files belong to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from tierstore.checkpoint.folder import Folder, Unit
from tierstore.checkpoint.state import DenseState, Parts, capture, own_state
from tierstore.errors import ConfigError, StoreMismatchError, TierStoreError
from tierstore.modules.base import TieredModule

Result = TypeVar("Result")

NO_STORES = (
    "the sharded tables have no lasting stores to commit their rows to; give TierConfig(path=..., ssd=...)"
)
IN_USE = "sharded tables do not go back while they are in use: build the model anew to restore it"


def save(folder: Folder, parts: Parts, modules: Mapping[str, TieredModule], step: int, keep: int) -> Path:
    """Save on all ranks; see :func:`tierstore.checkpoint.save`."""
    collection = one_of(modules)
    if keep != 1:
        raise ConfigError(
            f"keep is {keep}; of sharded tables the last commit of all ranks is kept: use keep=1"
        )
    if collection.commits is None:
        raise ConfigError(NO_STORES)
    with collection.env.shared_errors():
        own = own_state(parts.loader)
    everyone = collection.env.gather_objects(own)

    def write() -> Unit:
        with folder.locked():
            return folder.add(step, {"stores": [], "state": state}, tensors)

    with collection.env.shared_errors():
        _check_whole(parts.model)
        state, tensors = capture(parts, {"ranks": everyone})
    unit = on_rank_0(collection.env, write)
    number = collection.commit(
        {"checkpoint": unit.tag, "step": step, "commit": collection.commits.number + 1}
    )

    def finish() -> None:
        with folder.locked():
            unit.note_committed([{"path": str(collection.commits.path), "commit": number}])
            folder.remove_all_but([unit])

    on_rank_0(collection.env, finish)
    return unit.path


def restore(
    folder: Folder, parts: Parts, modules: Mapping[str, TieredModule], step: int | None
) -> tuple[int, Any, Path] | None:
    """Restore on all ranks; return step, extra and path. See :func:`tierstore.checkpoint.restore`."""
    collection = one_of(modules)
    if step not in (None, (kept := collection.committed_extra().get("step"))):
        raise StoreMismatchError(f"there is no checkpoint of step {step}; restore step {kept}")

    def read() -> tuple[dict[str, Any], Any, Path] | None:
        unit = named_unit(folder, collection)
        return None if unit is None else (unit.read_state(), unit.read_tensors(), unit.path)

    found = on_rank_0(collection.env, read)
    if found is None:
        return None
    state, tensors, path = found
    dense = DenseState(state["state"], tensors)
    if not dense.is_of_the_rows_of(parts.model):
        raise ConfigError(IN_USE)
    dense.check(parts.model)
    dense.choose_rank(collection.env.rank, collection.env.world_size)
    dense.apply(parts)
    return state["step"], dense.extra, path


def _check_whole(model: nn.Module) -> None:
    sharded = [name for name, value in model.named_parameters() if hasattr(value, "full_tensor")]
    if sharded:
        raise ConfigError(
            f"parameters are sharded over the ranks ({sharded[0]} and others): save them by "
            "torch.distributed.checkpoint with tierstore.checkpoint.dcp"
        )


def extra_of(unit: Unit, number: int) -> dict[str, Any]:
    """Return the description of its checkpoint in commit ``number`` of all ranks."""
    return {"checkpoint": unit.tag, "step": unit.step, "commit": number}


def named_unit(folder: Folder, collection: Any) -> Unit | None:
    """Return the checkpoint of the last commit of all ranks; None if nothing was ever committed."""
    extra, commits = collection.committed_extra(), collection.commits
    if "checkpoint" not in extra:
        if commits is not None and commits.number:
            raise StoreMismatchError(
                f"{commits.path} has a commit that belongs to no checkpoint; remove it to start anew, or go "
                "on from it without restore()"
            )
        return None
    if extra["commit"] != commits.number:
        raise StoreMismatchError(
            f"{commits.path} was committed after the checkpoint of step {extra['step']}, whose rows are gone "
            "by that; commit by checkpoint.save alone"
        )
    for unit in folder.units():
        if unit.tag == extra["checkpoint"]:
            return unit
    raise StoreMismatchError(
        f"{folder.path} does not hold the checkpoint of step {extra['step']} that {commits.path} was "
        "committed with; give the folder that it was saved in"
    )


def on_rank_0(env: Any, work: Callable[[], Result]) -> Result:
    """Return the result of ``work`` on rank 0, on all ranks, which also raise its error."""
    found: list[Any] = [None, None]
    if env.rank == 0:
        try:
            found[0] = work()
        except (TierStoreError, OSError) as error:
            found[1] = error
        except Exception as error:  # the error itself might not be picklable
            found[1] = ConfigError(f"rank 0: {type(error).__name__}: {error}")
    env.broadcast_objects(found)
    if found[1] is not None:
        raise found[1]
    result: Result = found[0]
    return result


def one_of(modules: Mapping[str, TieredModule]) -> Any:
    """Return a collection; all collections share one commit."""
    others = [path for path, module in modules.items() if not module.collective]
    if others:
        raise ConfigError(f"{others} are tiered and not sharded, beside sharded collections; shard them too")
    collections: list[Any] = list(modules.values())
    if len({id(collection.commits) for collection in collections}) > 1:
        raise ConfigError(
            "the collections were sharded one by one, so their commits are not one; shard them together by "
            "DistributedModelParallel(model, config=TierConfig(path=...))"
        )
    return collections[0]
