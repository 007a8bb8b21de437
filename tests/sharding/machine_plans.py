"""Random shapes, plans and tiers of sharded collections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from tests.modules.machine_shapes import Shape, TableShape, shape_of
from tests.modules.module_sides import tiers_of
from tierstore import TierConfig, optim
from tierstore.sharding import (
    ShardingPlan,
    TableSharding,
    column_wise,
    construct_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)


def collection_shape(random: Random) -> Shape:
    """A collection whose tables have rows enough for several ranks, and all have optimizers."""
    shape = shape_of(random)
    while not shape.keyed:
        shape = shape_of(random)
    tables = tuple(replace(table, rows=2 * table.rows) for table in shape.tables)
    specs = {name: spec or optim.SGD(lr=0.1) for name, spec in shape.specs.items()}
    return replace(shape, tables=tables, specs=specs)


def plan_of(random: Random, shape: Shape, world: int, dedup: bool, name: str) -> ShardingPlan:
    """A plan whose cuts are allowed for the tables' optimizers and pooling."""
    local = random.choice([n for n in range(1, world + 1) if world % n == 0])
    cuts = {table.name: _cut_of(random, shape, table, world, local, dedup) for table in shape.tables}
    return construct_plan(shape.configs(), cuts, world, local, name)


def _cut_of(
    random: Random, shape: Shape, table: TableShape, world: int, local: int, dedup: bool
) -> TableSharding:
    cuts_rows = shape.kind == "rows" or table.pooling != "max" or dedup
    cuts_columns = table.dim > 1 and shape.specs[table.name].clip_grad_norm is None
    kinds = ["table", "replicas"]
    kinds += ["rows", "rows", "host rows"] * cuts_rows + ["columns", "columns", "host columns"] * cuts_columns
    kinds += ["grid"] * (cuts_rows and cuts_columns)
    hosts, rank = range(world // local), random.randrange(world)
    several = [random.randrange(world) for _ in range(random.randint(1, min(3, table.dim)))]
    cuts: dict[str, Any] = {
        "table": lambda: table_wise(rank),
        "replicas": data_parallel,
        "rows": lambda: row_wise(_sizes(random, table.rows, world)),
        "host rows": lambda: table_row_wise(random.choice(hosts), _sizes(random, table.rows, local)),
        "columns": lambda: column_wise(several, _sizes(random, table.dim, len(several))),
        "host columns": lambda: table_column_wise(random.choice(hosts), _sizes(random, table.dim, local)),
        "grid": lambda: grid_shard(
            [number // local for number in several], _sizes(random, table.dim, len(several))
        ),
    }
    cut: TableSharding = cuts[random.choice(kinds)]()
    return cut


def _sizes(random: Random, total: int, count: int) -> list[int] | None:
    """Sizes of consecutive parts, perhaps of none; None: equal ones."""
    if random.random() < 0.3:
        return None
    cuts = sorted(random.randint(0, total) for _ in range(count - 1))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]


def cuts_columns(plan: ShardingPlan, table: str) -> bool:
    placement = plan.table(table)
    return any(shard.columns < placement.embedding_dim for shard in placement.shards)


def rank_tiers(random: Random, shape: Shape, plan: ShardingPlan, rank: int, path: Path) -> TierConfig:
    """Tiers that rows of this rank's shards leave in most steps."""
    own = [(shape.specs[t.name], s.columns) for t in plan.tables for s in t.shards if s.rank == rank]
    return tiers_of(random, shape, path, own)
