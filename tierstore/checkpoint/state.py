"""The state of a training without its rows: dense parameters, optimizers, random generators, the caller's
extra."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tierstore.cache.engine import Engine
from tierstore.checkpoint.tree import load_into, pack, saved_state, unpack
from tierstore.errors import StoreMismatchError
from tierstore.modules.base import TieredModule
from tierstore.modules.tables import without_rows
from tierstore.optim.fused import FusedOptimizer

logger = logging.getLogger("tierstore")


@dataclass(frozen=True)
class Parts:
    """The parts of a training, as the caller gives them."""

    model: nn.Module
    optimizer: Any = None
    loader: Any = None
    extra: Any = None


def tiered_modules(model: nn.Module) -> dict[str, TieredModule]:
    """Return all tiered modules by their path in ``model``."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TieredModule)}


def engines_of(modules: Mapping[str, TieredModule]) -> list[Engine]:
    """Return the modules' engines, each once."""
    return list({id(module.engine): module.engine for module in modules.values()}.values())


def random_states() -> dict[str, Any]:
    """Return the state of python's, NumPy's and torch's global generators."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  (users' code may draw from it)
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states of all generators, except for CUDA devices that this machine lacks."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])


def own_state(loader: Any) -> dict[str, Any]:
    """Return the state that each process has for itself: its position in the data, its random generators."""
    return {"loader": saved_state(loader), "random": random_states()}


def capture(parts: Parts, own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state as JSON and tensors. ``own``: the result of :func:`own_state`, or ``ranks``, a list of
    the ranks' results."""
    tensors: dict[str, Tensor] = {}
    with without_rows():
        dense, fused = dict(parts.model.state_dict()), _fused(parts.model)
        state = {"model": dense, "fused": fused, "optimizer": parts.optimizer, "extra": parts.extra, **own}
        return {name: pack(value, name, tensors) for name, value in state.items()}, tensors


def fused_optimizers(modules: Mapping[str, TieredModule]) -> dict[str, FusedOptimizer]:
    """Return the modules' optimizers by path, or by tables for sharded collections: wrappers change paths."""
    return {
        ",".join(module.table_names()) if module.collective else path: module.fused_optimizer
        for path, module in modules.items()
    }


def _fused(model: nn.Module) -> dict[str, FusedOptimizer]:
    return fused_optimizers(tiered_modules(model))


class DenseState:
    """A captured state that was read back."""

    def __init__(self, packed: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._parts = {name: unpack(part, tensors) for name, part in packed.items()}

    @property
    def extra(self) -> Any:
        """Return ``extra`` as it was given, with a :class:`SavedState` in place of each object with a
        state."""
        return self._parts["extra"]

    def check(self, model: nn.Module) -> None:
        """Raise ``StoreMismatchError`` unless the dense parameters and buffers fit; change nothing."""
        with without_rows():
            own = model.state_dict()
        saved = self._parts["model"]
        different = list(_differences(saved, own)) or list(_different_ties(saved, own))
        if different:
            more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
            raise StoreMismatchError(
                f"the checkpoint is of another model: {'; '.join(different[:3])}{more}; build the model "
                "that was saved, or give another folder"
            )

    def apply(self, parts: Parts) -> None:
        """Restore all parts, the random generators last."""
        with without_rows():
            parts.model.load_state_dict(self._parts["model"])
            load_into(_fused(parts.model), self._parts["fused"], "the model")
            for name in ("optimizer", "loader", "extra"):
                target = getattr(parts, name)
                if target is not None and name in self._parts:
                    load_into(target, self._parts[name], name)
        if "random" in self._parts:
            set_random_states(self._parts["random"])

    def choose_rank(self, rank: int, world_size: int) -> None:
        """Make a state of several ranks the state of this rank.

        If the number of ranks has changed, no rank gets a position in the data or random states.
        """
        ranks = self._parts.pop("ranks")
        if len(ranks) == world_size:
            self._parts |= ranks[rank]
        else:
            logger.warning(
                "the checkpoint is of %d ranks and there are %d: positions in the data and random states "
                "are not restored",
                len(ranks),
                world_size,
            )

    def is_of_the_rows_of(self, model: nn.Module) -> bool:
        """Return whether the model's rows have had as many updates as the rows that belong to this state."""
        saved = {name: state["num_updates"] for name, state in self._parts["fused"].items()}
        return saved == {name: optimizer.num_updates for name, optimizer in _fused(model).items()}


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*saved, *own}):
        if name not in own:
            yield f"it has {name}, which the model has not"
        elif name not in saved:
            yield f"it has no {name}"
        elif isinstance(own[name], Tensor) and isinstance(saved[name], Tensor):
            was, now = saved[name], own[name]
            if was.shape != now.shape or was.dtype != now.dtype:
                here = f"{now.dtype} {tuple(now.shape)} in the model"
                yield f"{name} is {was.dtype} {tuple(was.shape)} there, {here}"


def _different_ties(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Yield names of tensors of equal shapes that are tied in the checkpoint only, or in the model only."""
    first_of: dict[int, str] = {}
    storages: dict[int, list[str]] = {}
    for name, tensor in own.items():
        dense = type(tensor) in (Tensor, nn.Parameter) and isinstance(saved[name], Tensor)
        if not dense or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            continue
        first = first_of.setdefault(id(saved[name]), name)
        if _memory(own[first]) != _memory(tensor):
            yield f"{first} and {name} are one tensor there, and two in the model"
        storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for names in storages.values():
        if len(names) > 1 and not _views_agree(names, saved, own):
            yield f"{' and '.join(names)} share memory in the model, and are different there"


def _memory(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _views_agree(names: list[str], saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Return whether views of one storage keep their saved values when all of these are written into it."""
    storage = own[names[0]].untyped_storage().clone()
    views = []
    for name in names:
        view = own[name]
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        views.append(empty.set_(storage, view.storage_offset(), view.shape, view.stride()))
        views[-1].copy_(saved[name])
    return all(_bits(v) == _bits(saved[name]) for v, name in zip(views, names, strict=True))


def _bits(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
