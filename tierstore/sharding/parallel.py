"""Shards a collection (``shard``) or a model (DistributedModelParallel)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tierstore.config import TierConfig
from tierstore.errors import ConfigError
from tierstore.modules.collection import Collection
from tierstore.modules.embedding_bag_collection import EmbeddingBagCollection
from tierstore.modules.embedding_collection import EmbeddingCollection
from tierstore.modules.hooks import carry_hooks
from tierstore.modules.tables import check_device, without_rows
from tierstore.optim.tables import Optimizers
from tierstore.placement import ShardingPlan
from tierstore.sharding.arguments import (
    can_be_sharded,
    check_arguments,
    check_module,
    check_untouched,
    own_config,
    tiers_of,
)
from tierstore.sharding.collection import ShardedCollection
from tierstore.sharding.commits import Commits, end
from tierstore.sharding.comms import CommsConfig
from tierstore.sharding.dense_gradients import DenseGradients
from tierstore.sharding.embedding_bag_collection import ShardedEmbeddingBagCollection
from tierstore.sharding.embedding_collection import ShardedEmbeddingCollection
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.opening import ShardingOptions
from tierstore.sharding.optimizer import KeyedFusedOptimizer
from tierstore.sharding.planning import plan_of
from tierstore.sharding.rows_digest import RowsDigest
from tierstore.sharding.touched_rows import check_touched, planned, twice_held

logger = logging.getLogger("tierstore")


def shard(
    module: Collection,
    plan: ShardingPlan,
    env: ShardingEnv | None = None,
    *,
    config: TierConfig | None = None,
    comms: CommsConfig | None = None,
) -> ShardedCollection:
    """Return the sharded counterpart of an unsharded collection, which is closed. All ranks call it.

    A commit below the path of ``config`` is restored, also of another plan and number of ranks. Without a
    commit, rows that ``module`` has touched are taken over, on every rank from its own copy, which must be
    the same on all; other rows have the same initial values sharded and unsharded. ``config`` replaces the
    configuration of ``module``, in particular its ``path`` (below which every rank gets a folder): an
    unsharded module with a path can be open in one process only. ``comms``: how the ranks exchange rows;
    None: exactly.

    Raises ConfigError, on all ranks, for a plan that does not fit the module or the number of ranks.
    """
    env = ShardingEnv.of(env)
    with env.shared_errors():
        check_arguments(plan, config, comms)
        check_module(module, config, may_wait=True)
        settings = Settings(tiers_of(module, config), comms, module.chosen_optimizer())
    return _shard(module, plan, env, settings, None, "")


@dataclass(frozen=True)
class Settings:
    """What one collection is sharded with; None: exact exchanges, tables that are frozen."""

    config: TierConfig
    comms: CommsConfig | None
    optimizer: Optimizers


def _shard(
    module: Collection,
    plan: ShardingPlan,
    env: ShardingEnv,
    given: Settings,
    commits: Commits | None,
    name: str,
) -> ShardedCollection:
    """Shard the collection called ``name``, which takes part in ``commits``; see :func:`shard`."""
    options = ShardingOptions(
        config=given.config,
        optimizer=given.optimizer,
        seed=module.engine.seed,
        comms=CommsConfig() if given.comms is None else given.comms,
        commits=commits,
        name=name,
    )
    sharded = _sharded(module, plan, env, options)
    try:
        with env.shared_errors():
            sharded.take_gradient_hooks(module)
        hooks = module.rules.hooks.of
        found: dict[str, Any] = {"gradient hooks": sorted((t, len(own)) for t, own in hooks.items() if own)}
        if sharded.is_fresh:
            with env.shared_errors():
                found |= _take_over(sharded, module)
        env.check_same(found)
    except BaseException:
        sharded.close_here()
        raise
    module.close(commit=False)
    carry_hooks(module, sharded)
    return sharded.train(module.training)


def _sharded(
    module: Collection, plan: ShardingPlan, env: ShardingEnv, options: ShardingOptions
) -> ShardedCollection:
    """Return a collection with the tables of ``module``, and none of its rows."""
    if isinstance(module, EmbeddingBagCollection):
        weighted = module.is_weighted()
        return ShardedEmbeddingBagCollection(module.configs, plan, env, weighted, options)
    assert isinstance(module, EmbeddingCollection)
    return ShardedEmbeddingCollection(module.configs, plan, env, module.need_indices(), options)


def _take_over(sharded: ShardedCollection, module: Collection) -> dict[str, Any]:
    """Copy the rows of ``module`` to this rank's shards, if it has any. Return digests of these rows and the
    optimizer's state, which must be equal on all ranks, since each rank copies from its own module."""
    found: dict[str, Any] = {}
    same = module.fused_optimizer.spec.identity == sharded.fused_optimizer.spec.identity
    for table in [] if module.engine.waits else module.table_names():
        digest = RowsDigest()
        for ids in module.touched_ids(table):
            rows, state = module.rows(ids, table), module.optimizer_rows(ids, table)
            digest.add(ids, [rows, *state.values()])
            sharded.load_own_rows(ids, rows, state if same else None, table)
        found[f"rows of table {table!r}"] = digest.value
    with without_rows():  # whose digests are in ``found``
        state = found["optimizer state"] = module.fused_optimizer.state_dict()
        if state["name"] == sharded.fused_optimizer.spec.name:
            sharded.fused_optimizer.load_state_dict(state)
    return found


class DistributedModelParallel(nn.Module):
    """A model whose collections are sharded, and whose other parameters DDP replicates, or FSDP2 shards.

    ``module`` is changed in place. State dicts and parameters keep the names of ``module``.

    Args:
        module: with collections of tierstore, the same on all ranks.
        env: the ranks; the default process group if None. A process group or torchrec's ShardingEnv works,
        too.
        device: of the tables' fast tier and kernels, where ``config`` names none: "cpu", "cuda" (each rank's
        own GPU, the one with its LOCAL_RANK) or "cuda:1". None: where the collections are. The rest of the
        model is moved by the user, before.
        plan: where the tables are; names of tables must differ over the whole model. If None, the planner's
            for the budgets of ``config`` and ``batch_size`` examples per rank and step
            (:func:`tierstore.sharding.planning.plan_of`).
        sharders: must be None, since each collection is sharded in one way.
        config: tiers of one rank; the collections' own tiers if None. Collections with a path must be on the
            meta device then, and have the same tiers.
        comms: how the ranks exchange rows; None: exactly.
        dense: "ddp" or "fsdp2", for all other parameters. With "fsdp2" they are DTensors, in state dicts too;
            make their optimizer afterwards.
        find_unused_parameters: as for DDP.
        batch_size: for the planner, where there is no ``plan``; 512 if None.
        touched_rows: for the planner, the rows that training will ever use, by table; all of the tables that
            it does not name. If these do not fit, twice the rows that the last commit has.
    """

    optimizer_type: ClassVar[type[KeyedFusedOptimizer]] = KeyedFusedOptimizer

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
        sharders: Any = None,
        *,
        config: TierConfig | None = None,
        comms: CommsConfig | None = None,
        dense: str = "ddp",
        find_unused_parameters: bool = False,
        batch_size: int | None = None,
        touched_rows: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.env = ShardingEnv.of(env)
        found = {name: child for name, child in module.named_modules() if can_be_sharded(child)}
        with self.env.shared_errors():
            for name, value in (("batch_size", batch_size), ("touched_rows", touched_rows)):
                if plan is not None and value is not None:
                    raise ConfigError(f"{name} is for the planner, and a plan is given: leave one out")
            check_touched(touched_rows, found)
            if dense not in ("ddp", "fsdp2"):
                raise ConfigError(f'dense is {dense!r}; use "ddp" or "fsdp2"')
            if device is not None:
                check_device(torch.device(device))
            if sharders:
                raise ConfigError("sharders must be None: every collection has one way to be sharded")
            check_arguments(plan, config, comms, planned=plan is None)
            check_untouched(module)
            for child in found.values():
                child.adopt_applied()
        self._device = device
        with self.env.shared_errors():
            config = own_config(list(found.values())) if config is None else config
            tiers = [tiers_of(child, config, device) for child in found.values()]
        tables = {name: child.table_names() for name, child in found.items()}
        path = None if config is None else config.path
        given = {"collections": tables, "plan": plan, "batch_size": batch_size, "dense": dense}
        touched = sorted((touched_rows or {}).items())
        self.env.check_same({**given, "touched_rows": touched, "path": path is not None})
        self.plan = plan or planned(
            partial(plan_of, module, self.env, config, batch_size, on_gpu=any(one.on_gpu for one in tiers)),
            touched_rows,
            partial(twice_held, found, self.env, path),
        )
        self._sharded: dict[str, ShardedCollection] = {}
        self._commits = None if path is None else Commits(path, self.env, list(found))
        try:
            module = self._shard_all(module, found, config, comms)
            self._fused_optimizer = self.optimizer_type(self._sharded)
            self._wrapped = self._parallel(module, dense, find_unused_parameters)
        except BaseException:
            self._close_here()
            raise
        self._register_load_state_dict_pre_hook(self._to_own_names)

    def _shard_all(
        self,
        module: nn.Module,
        found: dict[str, Collection],
        config: TierConfig | None,
        comms: CommsConfig | None,
    ) -> nn.Module:
        if not found:
            raise ConfigError(
                "the model has no collection to shard; build an EmbeddingBagCollection or an "
                "EmbeddingCollection of tierstore"
            )
        names = [table for child in found.values() for table in child.table_names()]
        unplanned = {table.name for table in self.plan.tables} - set(names)
        if unplanned or len(set(names)) < len(names):
            raise ConfigError(
                f"the plan's tables {sorted(unplanned)} are not in the model; its collections have {names}"
                if unplanned
                else f"names of tables must differ over the whole model: {names}"
            )
        for name, child in found.items():
            with self.env.shared_errors():
                check_module(child, config)
                settings = self.settings_of(child, config, comms)
            new = _shard(child, self.plan, self.env, settings, self._commits, name)
            self._sharded[name] = new
            if not name:
                return new
            for parent in list(module.modules()):  # a model may have a collection under several names
                for attribute, other in list(parent._modules.items()):
                    if other is child:
                        setattr(parent, attribute, new)
        return module

    def settings_of(
        self, collection: Collection, config: TierConfig | None, comms: CommsConfig | None
    ) -> Settings:
        """Return what a collection is sharded with."""
        return Settings(tiers_of(collection, config, self._device), comms, collection.chosen_optimizer())

    def _parallel(self, module: nn.Module, dense: str, find_unused_parameters: bool) -> nn.Module:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        group = self.env.process_group
        on_gpu = any(parameter.device.type == "cuda" for parameter in module.parameters())
        if dense == "fsdp2":
            if on_gpu:
                raise ConfigError('dense is "fsdp2", and the model has parameters on a GPU; use "ddp" there')
            # this takes a third of the time of importing this module
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import fully_shard

            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ranks",))
            fully_shard(module, mesh=mesh)
            return module
        if on_gpu and self.env.world_size > 1 and "nccl" not in str(dist.get_backend_config(group)):
            group = self.env.gpu_group("dense")
        ddp = DistributedDataParallel(
            module, process_group=group, find_unused_parameters=find_unused_parameters
        )
        self._gradients = DenseGradients(ddp, self.env)
        return ddp

    @property
    def module(self) -> nn.Module:
        """The model itself, without DDP."""
        wrapped = self._wrapped
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    @property
    def sharded(self) -> dict[str, ShardedCollection]:
        """The sharded collections by their path in the model."""
        return dict(self._sharded)

    @property
    def fused_optimizer(self) -> KeyedFusedOptimizer:
        """The optimizer of all sharded tables, which their backward passes apply: for schedulers, and to be
        combined with the optimizer of the dense parameters."""
        return self._fused_optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ddp = self._wrapped
        if isinstance(ddp, DistributedDataParallel) and not torch.compiler.is_compiling():
            self._gradients.meet_before_forward(ddp)
        return self._wrapped(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the unsharded model, on every rank; all ranks call it."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the unsharded model; all ranks call it, with the same rows."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Freeze the rows, too, or let them be trained again. All ranks call it."""
        for collection in self._sharded.values():
            collection.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def _to_own_names(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Rename the keys of a state dict that a module around this one has made and loads."""
        inner = f"{prefix}_wrapped." + ("" if self.module is self._wrapped else "module.")
        for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(inner)]:
            state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)

    def commit(self, extra: dict[str, Any] | None = None, tag: str | None = None) -> int:
        """Commit all collections; see :meth:`ShardedCollection.commit`."""
        if self._commits is None:
            raise ConfigError("there is no place to commit to; give config=TierConfig(path=...)")
        return self._commits.commit(extra, tag)

    def committed_extra(self) -> dict[str, Any]:
        """Return ``extra`` of the last commit of all ranks; {} if there is none."""
        return {} if self._commits is None else self._commits.extra

    def close(self, *, commit: bool = True) -> None:
        """Close all collections; see :meth:`ShardedCollection.close`."""
        if all(collection.engine.closed for collection in self._sharded.values()):
            return
        end(self.env.peers, self._commits, commit, self._close_here)

    def _close_here(self) -> None:
        for collection in self._sharded.values():
            collection.close_here()
        if self._commits is not None:
            self._commits.release()

    def __enter__(self) -> DistributedModelParallel:
        return self

    def __exit__(self, kind: Any, *exc: object) -> None:
        self.close(commit=kind is None)
