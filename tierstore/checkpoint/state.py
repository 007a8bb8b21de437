"""Everything of a training but its rows: dense parameters, optimizers, random generators, what the caller
adds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tierstore.cache.engine import Engine
from tierstore.checkpoint.tree import load_into, pack, unpack
from tierstore.errors import StoreMismatchError
from tierstore.modules.base import TieredModule
from tierstore.modules.tables import without_rows


def tiered_modules(model: nn.Module) -> dict[str, TieredModule]:
    """All tiered modules by their path in ``model``."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TieredModule)}


def engines_of(modules: Mapping[str, TieredModule]) -> list[Engine]:
    """Their engines, each once."""
    return list({id(module.engine): module.engine for module in modules.values()}.values())


def random_states() -> dict[str, Any]:
    """The state of python's, NumPy's and torch's global generators."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  (users' code may draw from it)
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Puts them back. States of CUDA devices that are not there are left out."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])


def capture(
    model: nn.Module, optimizer: Any, loader: Any, extra: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state as JSON and tensors."""
    with without_rows():
        dense = dict(model.state_dict())
    parts = {
        "model": dense,
        "fused": {name: module.fused_optimizer for name, module in tiered_modules(model).items()},
        "optimizer": optimizer,
        "loader": loader,
        "extra": extra,
        "random": random_states(),
    }
    tensors: dict[str, Tensor] = {}
    return {name: pack(part, name, tensors) for name, part in parts.items()}, tensors


class DenseState:
    """A captured state that was read back."""

    def __init__(self, packed: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._parts = {name: unpack(part, tensors) for name, part in packed.items()}

    @property
    def extra(self) -> Any:
        """``extra`` as it was given; objects with a state are their :class:`SavedState`."""
        return self._parts["extra"]

    def check(self, model: nn.Module) -> None:
        """``StoreMismatchError`` unless the dense parameters and buffers fit; changes nothing."""
        with without_rows():
            own = model.state_dict()
        different = list(_differences(self._parts["model"], own))
        if different:
            more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
            raise StoreMismatchError(
                f"the checkpoint is of another model: {'; '.join(different[:3])}{more}; build the model "
                "that was saved, or give another folder"
            )

    def apply(self, model: nn.Module, optimizer: Any, loader: Any, extra: Any) -> None:
        """Puts everything but the random generators back."""
        with without_rows():
            model.load_state_dict(self._parts["model"])
        load_into(
            {name: m.fused_optimizer for name, m in tiered_modules(model).items()},
            self._parts["fused"],
            "the model",
        )
        for target, part in ((optimizer, "optimizer"), (loader, "loader"), (extra, "extra")):
            if target is not None:
                load_into(target, self._parts[part], part)

    def apply_random(self) -> None:
        """Puts the random generators back."""
        set_random_states(self._parts["random"])


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
