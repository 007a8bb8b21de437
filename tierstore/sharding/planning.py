"""Makes a plan for the ranks of a job, and a rank's budgets from a plan."""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import psutil
from torch import nn

from tierstore.cache.engine import Table
from tierstore.cache.opening import read_ahead_bytes
from tierstore.cache.tiers.sizes import MIN_SLOTS, bytes_for
from tierstore.config import TableOverride, TierConfig
from tierstore.default_planner import plan_job
from tierstore.errors import ConfigError
from tierstore.modules.collection import Collection
from tierstore.placement import (
    MOST_STORE_BYTES,
    STORE_SLACK,
    Job,
    ShardingPlan,
    ShardPlacement,
    TablePlacement,
    record_bytes,
)
from tierstore.row_format import WIDE, RowFormat
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.table_sharding import configs_of

logger = logging.getLogger("tierstore")

_ROUNDING = 1024  # bytes per table, so that a layout that is to hold all rows does


def plan_of(
    module: nn.Module, env: ShardingEnv, config: TierConfig | None, batch_size: int | None = None
) -> ShardingPlan:
    """Return the planner's plan for the collections of ``module`` on the ranks of ``env``; all ranks call it.

    The budgets, and how far ahead batches are fetched, come from ``config``, the same for each rank, or from
    all collections' own configurations together. ``batch_size``: examples per rank and step, the planner's
    default if None. Rates of the machines are assumed: measure them and call the planner yourself for a
    better plan.
    """
    collections = [child for child in module.modules() if isinstance(child, Collection)]
    if not collections:
        raise ConfigError("the module has no embedding collection to plan; give tierstore's")
    budgets = [config] if config is not None else [child.engine.config for child in collections]
    rows = sum(table.num_embeddings for child in collections for table in configs_of(child))
    ahead = {
        name: max(value)
        for name in ("depth", "window")
        if (value := [getattr(budget, name) for budget in budgets if getattr(budget, name) != "auto"])
    }
    ahead["read_ahead_bytes"] = _read_ahead(collections, config, env.world_size)
    job = replace(job_of(env, budgets, rows), batch_size=batch_size, **ahead)
    plan = plan_job(module, job, env.process_group)
    if env.rank == 0:
        logger.info(
            "planned %d tables on %d ranks, with assumed rates; tierstore bench device measures them, and "
            "EmbeddingShardingPlanner(topology).collective_plan(model) takes them",
            len(plan.tables),
            env.world_size,
        )
    if any(budget.keeps_all for budget in budgets):
        return without_bytes(plan)
    return within(plan, sum(int(budget.uvm) for budget in budgets))


def _read_ahead(collections: Sequence[Collection], config: TierConfig | None, ranks: int) -> int:
    """Return the bytes that a rank has for rows read ahead; ``config``: of all collections together."""
    sizes = [
        sum(t.num_embeddings * child.engine.optimizer.row_bytes(t.embedding_dim) for t in configs_of(child))
        for child in collections
    ]
    if config is not None:
        return read_ahead_bytes(config, sum(sizes) // ranks)
    each = zip(collections, sizes, strict=True)
    return sum(read_ahead_bytes(child.engine.config, size // ranks) for child, size in each)


def job_of(env: ShardingEnv, budgets: Sequence[TierConfig], rows: int) -> Job:
    """Return the ranks of a job as a planner needs to know them. All ranks call it.

    ``budgets``: of one rank. ``rows``: of all tables.
    """
    local = _ranks_per_host(env)
    if any(budget.keeps_all for budget in budgets):
        hbm, uvm, ssd = psutil.virtual_memory().total // local, 0, 0
    else:
        hbm, uvm = (sum(int(getattr(budget, tier)) for budget in budgets) for tier in ("hbm", "uvm"))
        ssd = sum(budget.ssd_cap for budget in budgets)
    processors = (psutil.cpu_count() or 2) / local
    return Job(env.world_size // local, local, processors, hbm, uvm, ssd, rows)


def _ranks_per_host(env: ShardingEnv) -> int:
    """Return torchrun's number if it divides the ranks; else the number of ranks with one host name; 1 if
    hosts differ."""
    names = env.gather_objects((os.uname().nodename, os.environ.get("LOCAL_WORLD_SIZE")))
    local = int(names[0][1] or 0)
    if local and env.world_size % local == 0:
        return local
    runs = {name: sum(other[0] == name[0] for other in names) for name in names}
    counts = set(runs.values())
    return counts.pop() if len(counts) == 1 else 1


def without_bytes(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan's cuts and ranks alone: budgets are those of TierConfig."""

    def bare(table: TablePlacement) -> TablePlacement:
        none = {f"{tier}_bytes": 0 for tier in ("hbm", "uvm", "ssd")} | {"hbm_rows": 0, "uvm_rows": 0}
        none["read_ahead_bytes"] = 0
        return replace(table, shards=tuple(replace(shard, **none) for shard in table.shards))

    return replace(plan, tables=tuple(map(bare, plan.tables)))


def within(plan: ShardingPlan, uvm: int) -> ShardingPlan:
    """Return the plan with at most ``uvm`` bytes in the host tier of each rank."""
    used = [0] * plan.world_size
    for table in plan.tables:
        for shard in table.shards:
            used[shard.rank] += shard.uvm_bytes - shard.read_ahead_bytes  # which is beside uvm

    def fitted(shard: ShardPlacement) -> ShardPlacement:
        share = min(1.0, uvm / max(1, used[shard.rank]))
        ahead = shard.read_ahead_bytes
        size = int((shard.uvm_bytes - ahead) * share) + ahead
        return replace(shard, uvm_bytes=size, uvm_rows=int(shard.uvm_rows * share))

    tables = (replace(table, shards=tuple(map(fitted, table.shards))) for table in plan.tables)
    return replace(plan, tables=tuple(tables))


def tiers_of_rank(
    placements: Iterable[TablePlacement], rank: int, tables: Sequence[Table], config: TierConfig, spec: Any
) -> dict[str, Any]:
    """Return fields of the TierConfig of one rank: the budgets of its shards, if the plan states any.

    A plan's bytes include buffers, which the budgets of tiers do not; so a shard that states rows brings what
    its slots take. ``spec``: of the optimizer.
    """
    shards = [(table, shard) for table in placements for shard in table.shards if shard.rank == rank]
    if not any(shard.hbm_bytes for _, shard in shards):
        return {}
    overrides = {
        name: replace(config.tables.get(name, TableOverride()), hbm=None, uvm=None)
        for name in sorted({t.name for t, _ in shards})
    }
    sizes = {"hbm": _row_bytes(WIDE, spec), "uvm": _row_bytes(config.uvm_format, spec)}
    budgets = {
        tier: _divided(shards, tier, tables, overrides, config.policy, size) for tier, size in sizes.items()
    }
    if ahead := sum(shard.read_ahead_bytes for _, shard in shards):
        budgets["read_ahead"] = ahead if config.read_ahead == "auto" else min(ahead, int(config.read_ahead))
    return {"tables": {**config.tables, **overrides}, **budgets, "ssd": _ssd_bytes(shards, spec, config)}


def _row_bytes(format: RowFormat, spec: Any) -> Callable[[int], int]:
    """Return the function that tells the bytes of a row of so many columns."""
    return lambda dim: format.row_bytes(dim, spec.state_floats(dim))


def _divided(
    shards: Sequence[tuple[TablePlacement, ShardPlacement]],
    tier: str,
    tables: Sequence[Table],
    overrides: dict[str, TableOverride],
    policy: Any,
    row_bytes: Callable[[int], int],
) -> int:
    """Return the budget of a tier; write into ``overrides`` each table's own bytes, or its weight."""
    pieces = Counter(table.origin or table.name for table in tables)
    own = 0
    for name, size in _own_bytes(shards, tier, policy, row_bytes).items():
        overrides[name] = replace(overrides[name], **{tier: size * pieces[name]})
        own += size * pieces[name]
    shards = [(table, shard) for table, shard in shards if getattr(overrides[table.name], tier) is None]
    rows: dict[int, int] = defaultdict(int)
    stated: dict[int, int] = defaultdict(int)
    for _, shard in shards:
        rows[shard.columns] += getattr(shard, f"{tier}_rows")
        stated[shard.columns] += 0 if shard.hbm_rows else getattr(shard, f"{tier}_bytes")
    if not any(rows.values()) and not any(stated.values()):
        for name in {table.name for table, _ in shards}:
            overrides[name] = replace(overrides[name], **{f"{tier}_share": 0})
        return own
    # Every row layout takes a few slots of a tier, even if no table of it brings any.
    minimum = {dim: bytes_for(MIN_SLOTS, row_bytes(dim), policy) for dim in rows}
    sizes = {dim: bytes_for(rows[dim] + MIN_SLOTS, row_bytes(dim), policy) + stated[dim] for dim in rows}
    brought: dict[str, float] = defaultdict(float)
    for table, shard in shards:
        weight = getattr(shard, f"{tier}_rows") + 1
        total = rows[shard.columns] + sum(other.columns == shard.columns for _, other in shards)
        brought[table.name] += (sizes[shard.columns] - minimum[shard.columns]) * weight / total
    for name, share in brought.items():
        overrides[name] = replace(overrides[name], **{f"{tier}_share": int(share / max(1, pieces[name]))})
    return own + sum(sizes.values()) + _ROUNDING * len(tables)


def _own_bytes(
    shards: Sequence[tuple[TablePlacement, ShardPlacement]],
    tier: str,
    policy: Any,
    row_bytes: Callable[[int], int],
) -> dict[str, int]:
    """Return bytes of a tier for each piece of the tables that have slots of their own.

    The engine divides a table's bytes equally among its pieces on this rank."""
    sizes: dict[str, int] = {}
    for table, shard in shards:
        rows = getattr(shard, f"{tier}_rows")
        if shard.own and rows:
            # No policy decides about a shard whose rows are all there; its bytes would go to other tables.
            decided = None if tier == "hbm" and rows >= shard.rows else policy
            size = bytes_for(max(rows, MIN_SLOTS), row_bytes(shard.columns), decided)
            sizes[table.name] = max(sizes.get(table.name, 0), size)
    return sizes


def _ssd_bytes(shards: Sequence[tuple[TablePlacement, ShardPlacement]], spec: Any, config: TierConfig) -> int:
    """Return the plan's bytes, and with a path to commit to also room for the rows that stay in memory."""
    total = sum(shard.ssd_bytes for _, shard in shards)
    if config.path is not None:
        row_bytes = _row_bytes(config.lower_format, spec)
        held = [shard for _, shard in shards if not shard.ssd_bytes]
        records = [shard.rows * record_bytes(row_bytes(shard.columns)) for shard in held]
        total += int(sum(records) * MOST_STORE_BYTES)
    return total + STORE_SLACK if total else 0
