"""Finds wrappers and drivers of models that do not know of rows, before they train the rows wrong."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn
from weakref import WeakSet
from weakref import ref as weakref

import torch
from torch import nn

from tierstore.cache.uninterrupted import uninterrupted
from tierstore.errors import ConfigError

logger = logging.getLogger("tierstore")

_group = torch.distributed.group if torch.distributed.is_available() else None
active_ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module
"""Returns the DistributedDataParallel whose forward call is under way, or None."""

_USE_OURS = (
    "every rank would train rows of its own. Make it an EmbeddingBagCollection or EmbeddingCollection and "
    "wrap the model in tierstore.sharding.DistributedModelParallel: it shards tables, and replicates the rest"
)
_warned: WeakSet[nn.Module] = WeakSet()
"""Modules that the user was warned of: every rank trains its own copy."""


def has_other_ranks() -> bool:
    """Return whether this process is one of several."""
    return _group is not None and _group.WORLD is not None and torch.distributed.get_world_size() > 1


def refuse_replicas(module: nn.Module, tables: Sequence[str], parameters_are_ours: bool) -> None:
    """Raise ConfigError where several ranks train an unsharded module as one model.

    ``parameters_are_ours``: no wrapper has replaced the module's parameters, as FSDP does.
    """
    ddp = active_ddp()
    name = f"a {type(module).__name__} (tables {', '.join(tables)})"
    if ddp is not None and ddp.process_group.size() > 1 and _is_inside(module, ddp):
        raise ConfigError(
            f"{name} is inside DistributedDataParallel, which knows nothing of rows: {_USE_OURS}"
        )
    if not parameters_are_ours:
        raise ConfigError(f"{name} is inside FSDP, which knows nothing of rows: {_USE_OURS}")
    if module not in _warned:
        _warned.add(module)
        logger.warning(
            "%s is trained by one of %d ranks, and is not sharded: the other ranks know nothing of its rows. "
            "If the ranks train one model together, %s. (said once)",
            name,
            torch.distributed.get_world_size(),
            _USE_OURS,
        )


def _is_inside(module: nn.Module, ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether ``ddp`` replicates ``module``. After an error in a forward call of a model that torch's
    composable ``replicate`` has changed, torch takes that call for active until the next one. ``replicate``
    knows parameters alone, and no modules."""
    own = {id(parameter) for parameter in module.parameters()}
    return any(one is module for one in ddp.module.modules()) or any(id(p) in own for p in ddp.parameters())


class _Scalers:
    """The GradScalers of this process. A search for the objects takes 50 ms. Every object counts as a
    reference to its class, so a search is made only when a class's count of references has changed, or when a
    scaler that was found is gone."""

    def __init__(self) -> None:
        self._references: list[int] = []
        self._found: list[weakref[torch.amp.GradScaler]] = []

    def used(self) -> torch.amp.GradScaler | None:
        """Return a scaler that has scaled a loss, or None."""
        references = [sys.getrefcount(kind) for kind in self._kinds()]
        if references != self._references or any(found() is None for found in self._found):
            # Signals that come more often than this takes would keep it from its end.
            uninterrupted(lambda: self._find(references))
        if not self._found:
            return None
        scalers = (reference() for reference in self._found)
        return next((s for s in scalers if s is not None and s.is_enabled() and s._scale is not None), None)

    @staticmethod
    def _kinds() -> list[type]:
        kinds: list[type] = [torch.amp.GradScaler]
        for kind in kinds:
            kinds.extend(kind.__subclasses__())
        return kinds

    def _find(self, references: list[int]) -> None:
        objects = gc.get_referrers(*self._kinds())
        self._found = [weakref(one) for one in objects if isinstance(one, torch.amp.GradScaler)]
        self._references = references


_scalers = _Scalers()


def scaler_in_use() -> bool:
    """Return whether this process scales a loss, so that gradients may arrive multiplied by a scale."""
    return _scalers.used() is not None


def refuse_scaled(tables: Sequence[str]) -> NoReturn:
    """Raise ConfigError that says how rows wait for a GradScaler."""
    raise ConfigError(
        f"a GradScaler is in use, and tables {', '.join(tables)} would be updated with scaled gradients: "
        "use `with tierstore.accumulate(model) as rows:` around backward(), scaler.step(rows) and "
        "scaler.update(). If the scaler is for other losses, set refuse_scaled = False of the tables' module"
    )
