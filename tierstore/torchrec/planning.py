"""torchrec's planner interface, served by tierstore's planner from the budgets of the tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.types import ShardingPlanner

from tierstore import planner
from tierstore.config import TierConfig
from tierstore.default_config import given_default
from tierstore.errors import ConfigError
from tierstore.modules.collection import Collection
from tierstore.optim.specs import NotGiven
from tierstore.placement import Job, ShardingPlan
from tierstore.planner.constraints import constraints_of
from tierstore.planner.planner import machines_of, plan_on_rank_0, tables_of_module, workload_of
from tierstore.sharding.planning import job_of, within, without_bytes
from tierstore.sharding.table_sharding import configs_of
from tierstore.torchrec.machines import Reservation, Topology
from tierstore.torchrec.sharders import TieredSharder, get_default_sharders, sharder_of, sharders_of

_SEARCH_S = 5.0
_COPIES = 4
"""What tierstore's planner takes for a dense parameter: itself, its gradient and two moments."""


class EmbeddingShardingPlanner(ShardingPlanner):
    """Plans with torchrec's arguments: tables, ranks and budgets in, a ``tierstore`` ShardingPlan out.

    Budgets are the ``hbm_cap``, ``ddr_cap`` and ``ssd_cap`` of ``topology``; what it leaves out comes from
    the default configuration, or else from the collections' own. ``constraints`` may be torchrec's or
    tierstore's. The parts of torchrec's planner (``enumerator``, ``proposer``, ``partitioner``,
    ``performance_model``, ``stats``, ``callbacks``, ``plan_loader``) have no counterpart: ConfigError.
    ``debug`` has no effect; the plan's ``report`` says what was decided. ``config``, tierstore's own
    argument, is in place of the default configuration.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: object = None,
        storage_reservation: Reservation | None = None,
        proposer: object = None,
        partitioner: object = None,
        performance_model: object = None,
        stats: object = None,
        constraints: Mapping[str, Any] | None = None,
        debug: bool = True,
        callbacks: object = None,
        timeout_seconds: int | None = None,
        plan_loader: object = None,
        *,
        config: TierConfig | None = None,
    ) -> None:
        parts = (
            "enumerator",
            "proposer",
            "partitioner",
            "performance_model",
            "stats",
            "callbacks",
            "plan_loader",
        )
        given = locals()
        for name in parts:
            if given[name] is not None:
                raise ConfigError(
                    f"{name} is part of torchrec's planner, and tierstore's plans for tiers: leave it out"
                )
        if topology is not None and not isinstance(topology, Topology):
            raise ConfigError(
                "topology is not a tierstore.torchrec.distributed.planner.Topology; make it with that"
            )
        if storage_reservation is not None and not isinstance(storage_reservation, Reservation):
            kind = type(storage_reservation).__name__
            raise ConfigError(
                f"storage_reservation is a {kind}; use tierstore.torchrec's Heuristical-, FixedPercentage- "
                "or FixedAbsoluteStorageReservation"
            )
        self.config = config
        self.topology, self.batch_size, self.reservation = topology, batch_size, storage_reservation
        self.constraints = {name: constraints_of(one, name) for name, one in (constraints or {}).items()}
        self.search_seconds = _SEARCH_S if timeout_seconds is None else min(_SEARCH_S, float(timeout_seconds))

    def plan(self, module: nn.Module, sharders: Sequence[object] | None = None) -> ShardingPlan:
        """Return a plan for the collections of ``module`` that its sharders allow.

        Raises InfeasiblePlanError if the tables do not fit, ConfigError for demands that cannot be met.
        """
        topology = self.topology or _topology_of_job()
        collections, allowed = collections_of(module), sharders_of(sharders)
        settle_optimizers(collections, allowed)
        job, dense = self._job(topology, collections), self._dense_bytes(module)
        machines = replace(machines_of(job, dense, topology.compute_device), **topology.rates)
        plan = planner.EmbeddingShardingPlanner(
            machines,
            self._demands(collections, allowed, topology.compute_device),
            workload=replace(workload_of(job), dense_bytes=dense),
            batch_size=self.batch_size,
            search_seconds=self.search_seconds,
        ).plan(module)
        keeps_all = any(child.engine.config.keeps_all for child in collections)
        if keeps_all and topology.caps["hbm_cap"] is None:
            return without_bytes(plan)
        return within(plan, job.uvm_bytes)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[object] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan on rank 0 of ``pg`` (the default group if None), and return its plan on every rank."""
        world = (self.topology or _topology_of_job(pg)).world_size
        settle_optimizers(collections_of(module), sharders_of(sharders))
        return plan_on_rank_0(lambda: self.plan(module, sharders), world, pg)

    def _job(self, topology: Topology, collections: Sequence[Collection]) -> Job:
        """Return the job that the topology, the budgets and what is reserved describe."""
        config = given_default() if self.config is None else self.config
        touched = {
            name: demand.touched_rows for name, demand in self.constraints.items() if demand.touched_rows
        }
        job = job_of(collections, config, topology.world_size, topology.local_world_size, touched)
        names = {"hbm_bytes": "hbm_cap", "uvm_bytes": "ddr_cap", "ssd_bytes": "ssd_cap"}
        caps: dict[str, Any] = {
            field: cap for field, name in names.items() if (cap := topology.caps[name]) is not None
        }
        job = replace(job, **caps)
        if self.reservation is None:
            return job
        left = self.reservation.left_of(job.hbm_bytes)
        if left <= 0:
            raise ConfigError(
                f"storage_reservation leaves nothing of {job.hbm_bytes} bytes of hbm; reserve less"
            )
        return replace(job, hbm_bytes=left)

    def _dense_bytes(self, module: nn.Module) -> int:
        """Return the device memory of what is no table."""
        estimated = tables_of_module(module)[1]
        if self.reservation is None:
            return estimated
        reserved = self.reservation.dense_bytes(estimated // _COPIES)
        return estimated if reserved is None else reserved

    def _demands(
        self, collections: Sequence[Collection], sharders: Sequence[TieredSharder], device: str
    ) -> dict[str, planner.ParameterConstraints]:
        """Return the demands on every table: the script's, and what its collection's sharder says beside."""
        demands = dict(self.constraints)
        for child in collections:
            sharder = sharder_of(child, sharders)
            of_sharder = {} if sharder is None else sharder_demands(sharder, device)
            for table in configs_of(child):
                own = demands.get(table.name, planner.ParameterConstraints())
                demands[table.name] = _joined(own, of_sharder, table.name)
        return demands


def _topology_of_job(pg: dist.ProcessGroup | None = None) -> Topology:
    """Return the ranks of the running job, on the CPU."""
    if not dist.is_initialized():
        raise ConfigError(
            "there is no process group to plan for: give topology=Topology(world_size, compute_device)"
        )
    world = dist.get_world_size(pg)
    return Topology(world, "cpu", local_world_size=get_local_size(world))


def collections_of(module: nn.Module) -> list[Collection]:
    """Return the collections in a module. Raises ConfigError if there is none."""
    found = [child for child in module.modules() if isinstance(child, Collection)]
    if not found:
        raise ConfigError(
            "the module has no collection in tiers; build it with tierstore.torchrec's collections"
        )
    return found


def settle_optimizers(collections: Sequence[Collection], sharders: Sequence[TieredSharder]) -> None:
    """Give collections that are not opened the optimizer that was applied to them, or that of their sharder:
    plans depend on the bytes of its state. Raises ConfigError for optimizers of tables that are nowhere."""
    names = {name for child in collections for name in child.table_names()}
    for sharder in sharders:
        if unknown := [name for name in sharder.settings.tables_named() if name not in names]:
            raise ConfigError(f"fused_params: optimizer names tables {unknown}; there are {sorted(names)}")
    for child in collections:
        child.adopt_applied()
        own = sharder_of(child, sharders)
        spec = None if own is None else own.settings.optimizer_of(child.table_names())
        if spec is not None and child.engine.waits and isinstance(child.fused_optimizer.spec, NotGiven):
            child.take_optimizer(spec)


def sharder_demands(sharder: TieredSharder, device: str) -> dict[str, Any]:
    """Return the fields of ParameterConstraints that a sharder states by its parameters and its overrides."""
    demands: dict[str, Any] = dict(sharder.settings.demands)
    types, kernels = sharder.sharding_types(device), set()
    for kind in types:
        kernels |= set(sharder.compute_kernels(kind, device))
    default = next(one for one in get_default_sharders() if one.serves is sharder.serves)
    if set(types) != set(default.sharding_types(device)):
        demands["sharding_types"] = tuple(types)
    if kernels != set(default.compute_kernels("", device)):
        demands["compute_kernels"] = tuple(sorted(kernels))
    return demands


def _joined(
    own: planner.ParameterConstraints, of_sharder: Mapping[str, Any], table: str
) -> planner.ParameterConstraints:
    """Return a table's own demands, completed by the demands of its sharder; both must allow a sharding
    type."""
    more = dict(of_sharder)
    if own.sharding_types is not None and "sharding_types" in more:
        both = tuple(kind for kind in own.sharding_types if kind in more["sharding_types"])
        if not both:
            raise ConfigError(
                f"constraints of {table!r} allow {list(own.sharding_types)}, and its sharder "
                f"{list(more['sharding_types'])}: allow a sharding type in both"
            )
        return _joined(
            replace(own, sharding_types=both), {k: v for k, v in more.items() if k != "sharding_types"}, table
        )
    defaults = {item.name: item.default for item in fields(own)}
    if own.tiers is not None:
        more.pop("compute_kernels", None)
    unset = {name: value for name, value in more.items() if getattr(own, name) == defaults[name]}
    return replace(own, **unset)
