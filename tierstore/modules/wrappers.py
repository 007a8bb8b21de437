"""Finds wrappers and drivers of models that do not know of rows, before they train the rows wrong."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, Protocol, TypeVar
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
_replicated: WeakSet[nn.Module] = WeakSet()
"""Modules that a DistributedDataParallel of several ranks has called in training mode."""


def ranks() -> int:
    """Return how many processes train together; 0 if torch has not been told of any."""
    if _group is None or _group.WORLD is None:
        return 0
    return torch.distributed.get_world_size()


def refuse_replicas(
    module: nn.Module, tables: Sequence[str], parameters_are_ours: bool, updates: bool
) -> None:
    """Raise ConfigError where several ranks train an unsharded module as one model.

    ``parameters_are_ours``: no wrapper has replaced the module's parameters, as FSDP does; ``updates``: False
    for a lookup that only reads, which may come before one that trains: a reentrant checkpoint calls forward
    in the backward pass once more, outside of its wrapper.
    """
    ddp = active_ddp()
    name = f"a {type(module).__name__} (tables {', '.join(tables)})"
    if ddp is not None and ddp.process_group.size() > 1 and _is_inside(module, ddp):
        _replicated.add(module)
    if not updates:
        return
    if module in _replicated:
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


class _Trainer(Protocol):
    """What Lightning's Trainer says of a training."""

    training: bool
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    lightning_module: nn.Module


Found = TypeVar("Found")


class _Objects(Generic[Found]):
    """The objects of some classes in this process. A search for them takes 50 ms. Every object counts as a
    reference to its class, so a search is made only when a class's count of references has changed, or when
    an object that was found is gone."""

    def __init__(self, kinds: Callable[[], list[type]]) -> None:
        self._kinds = kinds
        self._references: list[int] = []
        self._found: list[weakref[Found]] = []

    def all(self) -> list[Found]:
        """Return the objects that are there."""
        references = [sys.getrefcount(kind) for kind in self._kinds()]
        if references != self._references or any(found() is None for found in self._found):
            # Signals that come more often than this takes would keep it from its end.
            uninterrupted(lambda: self._find(references))
        return [one for found in self._found if (one := found()) is not None]

    def _find(self, references: list[int]) -> None:
        kinds = self._kinds()
        objects = gc.get_referrers(*kinds) if kinds else []
        found: list[Any] = [one for one in objects if isinstance(one, tuple(kinds))]
        self._found = list(map(weakref, found))
        self._references = references


def _scaler_kinds() -> list[type]:
    kinds: list[type] = [torch.amp.GradScaler]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return kinds


def _trainer_kinds() -> list[type]:
    names = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
    return [found.Trainer for name in names if (found := sys.modules.get(name)) is not None]


_scalers: _Objects[torch.amp.GradScaler] = _Objects(_scaler_kinds)
_trainers: _Objects[_Trainer] = _Objects(_trainer_kinds)


def scaler_in_use() -> bool:
    """Return whether this process scales a loss, so that gradients may arrive multiplied by a scale."""
    return any(scaler.is_enabled() and scaler._scale is not None for scaler in _scalers.all())


def refuse_drivers(
    module: object, tables: Callable[[], Sequence[str]], *, scaled: bool, at_once: bool
) -> None:
    """Raise ConfigError where what drives the training of ``module`` would make its update wrong.

    ``scaled``: whether a GradScaler would; ``at_once``: whether the rows are updated in this backward pass,
    so that who accumulates or clips gradients would do so to dense parameters alone. ``tables``: their names.
    """
    if scaled and scaler_in_use():
        refuse_scaled(tables())
    if at_once:
        _refuse_accumulating(module, tables)


def _refuse_accumulating(module: object, tables: Callable[[], Sequence[str]]) -> None:
    for trainer in _trainers.all():
        acts = trainer.accumulate_grad_batches != 1 or trainer.gradient_clip_val
        if acts and trainer.training and _drives(trainer, module):
            _refuse_driver("accumulate_grad_batches and gradient_clip_val of Lightning's Trainer", tables())
    state = sys.modules.get("accelerate.state")
    if state is not None and not state.GradientState().sync_gradients:
        _refuse_driver("gradient_accumulation_steps of Accelerate", tables())


def _drives(trainer: _Trainer, module: object) -> bool:
    model = trainer.lightning_module
    return bool(model.automatic_optimization) and any(one is module for one in model.modules())


def _refuse_driver(what: str, tables: Sequence[str]) -> NoReturn:
    raise ConfigError(
        f"this backward pass would update the rows of tables {', '.join(tables)}, so {what} would act on "
        "dense parameters alone: leave it out, and use `with tierstore.accumulate(model) as rows:` around "
        "the backward passes (with Lightning, in a training_step with automatic_optimization = False)"
    )


def refuse_scaled(tables: Sequence[str]) -> NoReturn:
    """Raise ConfigError that says how rows wait for a GradScaler."""
    raise ConfigError(
        f"a GradScaler is in use, and tables {', '.join(tables)} would be updated with scaled gradients: "
        "use `with tierstore.accumulate(model) as rows:` around backward(), scaler.step(rows) and "
        "scaler.update(). If the scaler is for other losses, set refuse_scaled = False of the tables' module"
    )
