"""Makes a plan for the ranks of a job, and a rank's budgets from a plan."""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
from tierstore.modules.gpu import gpu_memory
from tierstore.optim import OptimizerSpec
from tierstore.placement import (
    MOST_STORE_BYTES,
    STORE_SLACK,
    Job,
    ShardingPlan,
    ShardPlacement,
    TablePlacement,
)
from tierstore.rounds import record_bytes
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.table_sharding import configs_of

logger = logging.getLogger("tierstore")

_ROUNDING = 1024  # bytes per table, so that a layout that is to hold all rows does


def plan_of(
    module: nn.Module,
    env: ShardingEnv,
    config: TierConfig | None,
    batch_size: int | None = None,
    touched_rows: Mapping[str, int] | None = None,
    on_gpu: bool = False,
) -> ShardingPlan:
    """Return the planner's plan for the collections of ``module`` on the ranks of ``env``; all ranks call it.

    The budgets, and how far ahead batches are fetched, come from ``config``, the same for each rank, or from
    all collections' own configurations together. ``batch_size``: examples per rank and step, the planner's
    default if None. ``touched_rows``: rows that training will ever use, by table; else all. ``on_gpu``: the
    fast tier is a GPU's. Rates of the machines are assumed: measure them and call the planner yourself for a
    better plan.
    """
    collections = [child for child in module.modules() if isinstance(child, Collection)]
    if not collections:
        raise ConfigError("the module has no embedding collection to plan; give tierstore's")
    job = job_of(collections, config, env.world_size, _ranks_per_host(env), touched_rows or {})
    job = replace(job, batch_size=batch_size)
    if on_gpu:
        job = replace(job, device="cuda")
        if any(budget.keeps_all for budget in _budgets(collections, config)):
            job = replace(job, hbm_bytes=gpu_memory())
    plan = plan_job(module, job, env.process_group)
    if env.rank == 0:
        logger.info(
            "planned %d tables on %d ranks, with assumed rates; tierstore bench device measures them, and "
            "EmbeddingShardingPlanner(topology).collective_plan(model) takes them",
            len(plan.tables),
            env.world_size,
        )
    if any(budget.keeps_all for budget in _budgets(collections, config)):
        return without_bytes(plan)
    return within(plan, job.uvm_bytes)


def _budgets(collections: Sequence[Collection], config: TierConfig | None) -> list[TierConfig]:
    return [config] if config is not None else [child.engine.config for child in collections]


def _read_ahead(
    collections: Sequence[Collection], config: TierConfig | None, ranks: int, touched_rows: Mapping[str, int]
) -> int:
    """Return the bytes that a rank has for rows read ahead; ``config``: of all collections together."""
    sizes = [
        sum(
            touched_rows.get(t.name, t.num_embeddings)
            * RowBytes(child.engine.config, child.engine.optimizer).whole(t)
            for t in map(child.engine.tables.__getitem__, child.table_numbers)
        )
        for child in collections
    ]
    if config is not None:
        return read_ahead_bytes(config, sum(sizes) // ranks)
    each = zip(collections, sizes, strict=True)
    return sum(read_ahead_bytes(child.engine.config, size // ranks) for child, size in each)


def job_of(
    collections: Sequence[Collection],
    config: TierConfig | None,
    world_size: int,
    ranks_per_host: int,
    touched_rows: Mapping[str, int],
) -> Job:
    """Return the ranks of a job as a planner needs to know them.

    ``config``: the tiers of one rank for all collections together; None: each has its own. ``touched_rows``:
    rows that training will ever use, by table; else all.
    """
    local, budgets = ranks_per_host, _budgets(collections, config)
    tables = [table for child in collections for table in configs_of(child)]
    rows = sum(touched_rows.get(table.name, table.num_embeddings) for table in tables)
    if any(budget.keeps_all for budget in budgets):
        hbm, uvm, ssd = psutil.virtual_memory().total // local, 0, 0
    else:
        hbm, uvm = (sum(int(getattr(budget, tier)) for budget in budgets) for tier in ("hbm", "uvm"))
        ssd = sum(budget.ssd_cap for budget in budgets)
    processors = (psutil.cpu_count() or 2) / local
    ahead = {
        name: max(value)
        for name in ("depth", "window")
        if (value := [getattr(budget, name) for budget in budgets if getattr(budget, name) != "auto"])
    }
    ahead["read_ahead_bytes"] = _read_ahead(collections, config, world_size, touched_rows)
    sizes = hbm, uvm, ssd, rows
    return Job(
        world_size // local, local, processors, *sizes, tiers=config, touched_rows=touched_rows, **ahead
    )


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
    """Return the plan's cuts and ranks alone; TierConfig has the budgets."""

    def bare(table: TablePlacement) -> TablePlacement:
        none = {f"{tier}_bytes": 0 for tier in ("hbm", "uvm", "ssd")} | {"hbm_rows": 0, "uvm_rows": 0}
        none["read_ahead_bytes"] = 0
        return replace(table, shards=tuple(replace(shard, **none) for shard in table.shards))

    return replace(plan, tables=tuple(map(bare, plan.tables)))


def within(plan: ShardingPlan, uvm: int) -> ShardingPlan:
    """Return the plan with at most ``uvm`` bytes in that tier of each rank."""
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


Layout = tuple[int, str, bool, int, str]
"""What rows that share tiers have in common: columns, dtype, whether they are rounded at random, and the
optimizer: its floats of state, and its identity."""


class RowBytes:
    """The bytes of rows in each tier under a configuration. ``spec``: the optimizer of tables without one of
    their own."""

    def __init__(self, config: TierConfig, spec: OptimizerSpec) -> None:
        self._config, self._spec = config, spec

    def layout(self, table: Table, columns: int) -> Layout:
        """Return the row layout of ``columns`` columns of a table."""
        rounds = self._config.rounds_stochastically(table.origin or table.name, table.dtype)
        spec = table.optimizer or self._spec
        return columns, table.dtype, rounds, spec.state_floats(columns), str(spec.identity)

    def whole(self, table: Table) -> int:
        """Return the bytes of a row of all columns of a table in ``hbm``."""
        return self("hbm", self.layout(table, table.embedding_dim))

    def __call__(self, tier: str, layout: Layout) -> int:
        """Return the bytes of a row of ``layout`` in ``tier``."""
        columns, dtype, _, floats, _ = layout
        return self._config.formats(dtype)[tier].row_bytes(columns, floats)


class Held:
    """The shards of one rank, with their row layouts, and the bytes of their rows in each tier."""

    def __init__(
        self, placements: Iterable[TablePlacement], rank: int, tables: Sequence[Table], sizes: RowBytes
    ) -> None:
        self.shards = [(table, shard) for table in placements for shard in table.shards if shard.rank == rank]
        self.sizes = sizes
        self.pieces = Counter(table.origin or table.name for table in tables)
        self._of = {table.origin or table.name: table for table in tables}

    def layout(self, table: TablePlacement, shard: ShardPlacement) -> Layout:
        return self.sizes.layout(self._of[table.name], shard.columns)

    def row_bytes(self, tier: str, table: TablePlacement, shard: ShardPlacement) -> int:
        return self.sizes(tier, self.layout(table, shard))


def tiers_of_rank(
    placements: Iterable[TablePlacement],
    rank: int,
    tables: Sequence[Table],
    config: TierConfig,
    spec: OptimizerSpec,
) -> dict[str, Any]:
    """Return fields of the TierConfig of one rank: the budgets of its shards, if the plan states any, and how
    their rows are rounded.

    A plan's bytes include buffers, which the budgets of tiers do not; so a shard that states rows brings what
    its slots take. ``spec``: the optimizer of tables without one of their own.
    """
    rounding = {t.name: t.stochastic_rounding for t in placements if t.stochastic_rounding is not None}
    here = {table.origin or table.name for table in tables}
    rounded = {
        name: replace(config.table(name), stochastic_rounding=chosen)
        for name, chosen in rounding.items()
        if name in here
    }
    config = replace(config, tables={**config.tables, **rounded})
    held = Held(placements, rank, tables, RowBytes(config, spec))
    if not any(shard.hbm_bytes for _, shard in held.shards):
        return {"tables": config.tables} if rounded else {}
    overrides = {
        name: replace(config.table(name), hbm=None, uvm=None)
        for name in sorted({t.name for t, _ in held.shards})
    }
    budgets = {tier: _divided(held, tier, overrides, config.policy, len(tables)) for tier in ("hbm", "uvm")}
    if ahead := sum(shard.read_ahead_bytes for _, shard in held.shards):
        budgets["read_ahead"] = ahead if config.read_ahead == "auto" else min(ahead, int(config.read_ahead))
    return {"tables": {**config.tables, **overrides}, **budgets, "ssd": _ssd_bytes(held, config)}


def _divided(held: Held, tier: str, overrides: dict[str, TableOverride], policy: Any, tables: int) -> int:
    """Return the budget of a tier; write into ``overrides`` each table's own bytes, or its weight."""
    own, pieces = 0, held.pieces
    for name, size in _own_bytes(held, tier, policy).items():
        _set(overrides, name, tier, size * pieces[name])
        own += size * pieces[name]
    shards = [(t, shard) for t, shard in held.shards if getattr(overrides[t.name], tier) is None]
    layouts = [held.layout(table, shard) for table, shard in shards]
    rows: dict[Layout, int] = defaultdict(int)
    stated: dict[Layout, int] = defaultdict(int)
    for layout, (_, shard) in zip(layouts, shards, strict=True):
        rows[layout] += getattr(shard, f"{tier}_rows")
        stated[layout] += 0 if shard.hbm_rows else getattr(shard, f"{tier}_bytes")
    if not any(rows.values()) and not any(stated.values()):
        for name in {table.name for table, _ in shards}:
            _set(overrides, name, f"{tier}_share", 0)
        return own
    # Every row layout takes a few slots of a tier, even if no table of it brings any.
    each = {layout: held.sizes(tier, layout) for layout in rows}
    minimum = {layout: bytes_for(MIN_SLOTS, each[layout], policy) for layout in rows}
    sizes = {
        layout: bytes_for(count + MIN_SLOTS, each[layout], policy) + stated[layout]
        for layout, count in rows.items()
    }
    brought: dict[str, float] = defaultdict(float)
    for layout, (table, shard) in zip(layouts, shards, strict=True):
        weight = getattr(shard, f"{tier}_rows") + 1
        total = rows[layout] + layouts.count(layout)
        brought[table.name] += (sizes[layout] - minimum[layout]) * weight / total
    for name, share in brought.items():
        _set(overrides, name, f"{tier}_share", int(share / max(1, pieces[name])))
    return own + sum(sizes.values()) + _ROUNDING * tables


def _set(overrides: dict[str, TableOverride], name: str, field: str, value: int) -> None:
    given: dict[str, Any] = {field: value}
    overrides[name] = replace(overrides[name], **given)


def _own_bytes(held: Held, tier: str, policy: Any) -> dict[str, int]:
    """Return bytes of a tier for each piece of the tables that have slots of their own.

    The engine divides a table's bytes equally among its pieces on this rank."""
    sizes: dict[str, int] = {}
    for table, shard in held.shards:
        rows = getattr(shard, f"{tier}_rows")
        if shard.own and rows:
            # No policy decides about a shard whose rows are all there; its bytes would go to other tables.
            decided = None if tier == "hbm" and rows >= shard.rows else policy
            size = bytes_for(max(rows, MIN_SLOTS), held.row_bytes(tier, table, shard), decided)
            sizes[table.name] = max(sizes.get(table.name, 0), size)
    return sizes


def _ssd_bytes(held: Held, config: TierConfig) -> int:
    """Return the plan's bytes, and room for shards without any: those whose rows have not all a slot, since
    :func:`within` took some or the plan counts fewer, and with a path to commit to all. With that room it is
    no more than the configuration's ``ssd``."""
    planned = total = sum(shard.ssd_bytes for _, shard in held.shards)
    for table, shard in held.shards:
        lacks = config.ssd_cap and 0 < shard.hbm_rows + shard.uvm_rows < shard.rows
        if not shard.ssd_bytes and (lacks or config.path is not None):
            record = record_bytes(held.row_bytes("ssd", table, shard))
            total += int(shard.rows * record * MOST_STORE_BYTES)
    if config.ssd_cap:
        total = max(planned, min(total, config.ssd_cap))
    return total + STORE_SLACK if total else 0
