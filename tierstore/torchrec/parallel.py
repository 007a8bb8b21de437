"""torchrec's DistributedModelParallel, over tierstore's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torchrec.distributed import model_parallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from tierstore import sharding
from tierstore.config import TierConfig
from tierstore.default_config import given_default
from tierstore.errors import ConfigError
from tierstore.modules.collection import Collection
from tierstore.optim.specs import NotGiven
from tierstore.placement import ShardingPlan
from tierstore.planner import ParameterConstraints
from tierstore.sharding import CommsConfig
from tierstore.sharding.arguments import own_config
from tierstore.sharding.optimizer import KeyedFusedOptimizer
from tierstore.sharding.parallel import Settings
from tierstore.sharding.touched_rows import TouchedRows, check_touched, planned, twice_held
from tierstore.torchrec.optimizers import KeyedTablesOptimizer
from tierstore.torchrec.planning import EmbeddingShardingPlanner, settle_optimizers
from tierstore.torchrec.sharders import EmbeddingCollectionSharder, TieredSharder, sharder_of, sharders_of


class DistributedModelParallel(sharding.DistributedModelParallel):
    """:class:`tierstore.sharding.DistributedModelParallel` with torchrec's arguments.

    Without ``plan`` it asks EmbeddingShardingPlanner. Tiers are the default configuration if there is one,
    and the collections' own otherwise; ``config`` and ``touched_rows`` are tierstore's own arguments.
    ``init_parameters`` gives dense parameters on the meta device values by ``reset_parameters()``; tables
    have their initial values in any case. ``data_parallel_wrapper`` and ``model_tracker_configs`` must be
    left out (ConfigError).
    """

    optimizer_type: ClassVar[type[KeyedFusedOptimizer]] = KeyedTablesOptimizer

    def __init__(
        self,
        module: nn.Module,
        env: Any = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[object] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: object = None,
        model_tracker_configs: object = None,
        *,
        config: TierConfig | None = None,
        touched_rows: Mapping[str, int] | None = None,
    ) -> None:
        _check(data_parallel_wrapper, model_tracker_configs)
        env, allowed = sharding.ShardingEnv.of(env), sharders_of(sharders)
        found = {name: child for name, child in module.named_modules() if isinstance(child, Collection)}
        collections = list(found.values())
        with env.shared_errors():
            check_touched(touched_rows, found)
            settle_optimizers(collections, allowed)
        if init_parameters:
            fill_meta_parameters(module, torch.device("cpu") if device is None else torch.device(device))
        own = given_default() if config is None else config
        if plan is None and collections:
            path = getattr(own or own_config(collections), "path", None)
            held = partial(twice_held, found, env, path)
            plan = planned(lambda t: _plan_of(module, env, allowed, config, t), touched_rows, held)
        elif isinstance(plan, ShardingPlan):
            plan = _with_demands(plan, collections, allowed)
        # nn.Module's constructor keeps these, which it does not know
        self.sharders, self._waits = allowed, not init_data_parallel
        super().__init__(module, env, device, plan, config=own)
        self.device = torch.device("cpu") if device is None else torch.device(device)

    @property
    def _plan(self) -> ShardingPlan:
        """The plan, where scripts of torchrec look for it."""
        return self.plan

    def settings_of(
        self, collection: Collection, config: TierConfig | None, comms: CommsConfig | None
    ) -> Settings:
        """Return what the collection's sharder says; an optimizer that was applied to tables comes first."""
        settings = super().settings_of(collection, config, comms)
        sharder = sharder_of(collection, self.sharders)
        if sharder is None:
            return settings
        chosen = sharder.settings.optimizer_of(collection.table_names())
        if isinstance(settings.optimizer, NotGiven) and chosen is not None:
            settings = replace(settings, optimizer=chosen)
        return replace(settings, comms=_comms(sharder))

    def _parallel(self, module: nn.Module, dense: str, find_unused_parameters: bool) -> nn.Module:
        if self._waits:
            return module
        return super()._parallel(module, dense, find_unused_parameters)

    def init_data_parallel(self) -> None:
        """Replicate the dense parameters, which ``init_data_parallel=False`` has put off."""
        if self._waits:
            self._waits = False
            self._wrapped = self._parallel(self._wrapped, "ddp", False)


def _plan_of(
    module: nn.Module,
    env: sharding.ShardingEnv,
    sharders: Sequence[TieredSharder],
    config: TierConfig | None,
    touched_rows: TouchedRows,
) -> ShardingPlan:
    demands = {name: ParameterConstraints(touched_rows=rows) for name, rows in touched_rows.items()}
    planner = EmbeddingShardingPlanner(constraints=demands, config=config)
    return planner.collective_plan(module, sharders, env.process_group)


def _with_demands(
    plan: ShardingPlan, collections: Sequence[Collection], sharders: Sequence[TieredSharder]
) -> ShardingPlan:
    """Return a given plan with what sharders say of tables and the plan does not: places and bytes are its
    own."""
    demanded: dict[str, dict[str, Any]] = {}
    for child in collections:
        sharder = sharder_of(child, sharders)
        demands = {} if sharder is None else sharder.settings.demands
        own = {name: demands[name] for name in ("stochastic_rounding", "bounds_check") if name in demands}
        demanded |= dict.fromkeys(child.table_names(), own)
    tables = []
    for table in plan.tables:
        new = {
            name: value
            for name, value in demanded.get(table.name, {}).items()
            if getattr(table, name) is None
        }
        tables.append(replace(table, **new))
    return replace(plan, tables=tuple(tables))


def _comms(sharder: TieredSharder) -> CommsConfig | None:
    dedup = isinstance(sharder, EmbeddingCollectionSharder) and sharder.use_index_dedup
    return replace(sharder.comms or CommsConfig(), dedup=True) if dedup else sharder.comms


def _check(data_parallel_wrapper: object, model_tracker_configs: object) -> None:
    if model_tracker_configs is not None:
        raise ConfigError("model_tracker_configs: use touched_ids() of the sharded collections; leave it out")
    plain = data_parallel_wrapper is None or type(data_parallel_wrapper) is DefaultDataParallelWrapper
    if not plain or (
        data_parallel_wrapper is not None
        and vars(data_parallel_wrapper) != vars(DefaultDataParallelWrapper())
    ):
        raise ConfigError(
            "data_parallel_wrapper: dense parameters are in DistributedDataParallel with its defaults; leave "
            'it out, or use tierstore.sharding.DistributedModelParallel, which has dense="fsdp2"'
        )


def fill_meta_parameters(module: nn.Module, device: torch.device) -> None:
    """Give dense parameters on the meta device memory on ``device``, and the values of their modules.

    Raises ConfigError for a module that has no ``reset_parameters()``.
    """
    inside = {
        id(part) for child in module.modules() if isinstance(child, Collection) for part in child.modules()
    }
    for name, child in module.named_modules():
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if id(child) in inside or not any(tensor.is_meta for tensor in own):
            continue
        reset = getattr(child, "reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"{name or 'the model itself'} is a {type(child).__name__} on the meta device without "
                "reset_parameters(), which would give it values; build it on the device"
            )
        child.to_empty(device=device, recurse=False)
        reset()


# torchrec's pipelines look for the model inside of its own class, before they trace it.
model_parallel.DistributedModelParallel.register(sharding.DistributedModelParallel)
