"""What may be sharded, checked before any rank changes anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import nn

from tierstore.cache.machine import check_machine
from tierstore.config import TierConfig
from tierstore.errors import ConfigError
from tierstore.modules.base import TieredModule
from tierstore.modules.collection import Collection
from tierstore.modules.embedding_bag_collection import EmbeddingBagCollection
from tierstore.modules.embedding_collection import EmbeddingCollection
from tierstore.modules.tables import placed
from tierstore.placement import ShardingPlan
from tierstore.sharding.collection import ShardedCollection
from tierstore.sharding.comms import CommsConfig
from tierstore.sharding.table_sharding import configs_of


def check_untouched(module: nn.Module) -> None:
    """Raise ConfigError for tables that no exchange would keep equal on all ranks."""
    for name, child in module.named_modules():
        if isinstance(child, ShardedCollection):
            raise ConfigError(
                f"{name or 'the model itself'} is sharded already; give DistributedModelParallel the "
                "unsharded model, or the rest of it to DistributedDataParallel"
            )
        if isinstance(child, TieredModule) and not child.frozen and not can_be_sharded(child):
            raise ConfigError(
                f"{name or 'the model itself'} is a {type(child).__name__}, which every rank would train for "
                "itself; make it an EmbeddingCollection or EmbeddingBagCollection, or freeze it"
            )


def check_module(module: Any, config: TierConfig | None, may_wait: bool = False) -> None:
    """Raise ConfigError for a module that is no collection, or whose rows are where ranks cannot share them.

    ``config``: what it is sharded with; None: its own. ``may_wait``: a folder of its own serves its shards if
    the collection has not opened it."""
    if not can_be_sharded(module):
        raise ConfigError(
            f"a {type(module).__module__}.{type(module).__name__} cannot be sharded; build an "
            "EmbeddingBagCollection or an EmbeddingCollection of tierstore"
        )
    if module.frozen_tables() and not module.frozen:
        raise ConfigError(
            "some tables of the collection are frozen and some are not: a sharded collection is trained or "
            "frozen as a whole, so put the frozen tables into a collection of their own"
        )
    module.engine.check_open()
    if [table.name for table in module.engine.tables] != [table.name for table in configs_of(module)]:
        raise ConfigError(
            "the collection is part of an offloaded model, whose tables have one engine; shard the model "
            "as it was before offload()"
        )
    path = module.engine.config.where
    if config is None and path and not (may_wait and module.engine.waits):
        raise ConfigError(
            f"the module's rows are in {path}; build it without a path on every rank and give "
            "shard(..., config=TierConfig(path=...)), below which each rank gets a folder of its own"
        )


def tiers_of(
    module: Collection, config: TierConfig | None, device: torch.device | str | None = None
) -> TierConfig:
    """Return what a collection is sharded with: ``config``, or else its own tiers, on ``device``, or else
    where the collection is."""
    own = module.engine.config
    if config is None:
        return placed(own, device)
    if config.device is None and device is None and own.on_gpu:
        return replace(config, device=own.device)
    return placed(config, device)


def own_config(collections: Sequence[Collection]) -> TierConfig | None:
    """Return the tiers of collections that are not opened yet and have one path, which is the model's."""
    configs = [child.engine.config for child in collections if child.engine.waits]
    same = configs and len(configs) == len(collections) and all(config == configs[0] for config in configs)
    return configs[0] if same and configs[0].path is not None else None


def can_be_sharded(module: nn.Module) -> TypeGuard[Collection]:
    return isinstance(module, EmbeddingBagCollection | EmbeddingCollection)


def check_arguments(plan: Any, config: Any, comms: Any, *, planned: bool = False) -> None:
    """Raise ConfigError for arguments of a wrong type. ``planned``: there is no plan yet."""
    for name, value, kind in (("config", config, TierConfig), ("comms", comms, CommsConfig)):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name} is {value!r}; use a {kind.__name__}, or None")
    if config is not None:
        check_machine(config)
    if not planned and not isinstance(plan, ShardingPlan):
        given = f"{type(plan).__module__}.{type(plan).__name__}"
        raise ConfigError(
            f"plan is a {given}; use a tierstore.sharding.ShardingPlan, of construct_plan(), of tierstore's "
            "planner or of ShardingPlan.load()"
        )
