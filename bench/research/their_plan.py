"""torchrec's planner asked for a plan, and its plans told in our words."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tierstore.errors import ConfigError
from tierstore.placement import ShardingPlan, ShardingType, ShardPlacement, TablePlacement
from tierstore.planner import ParameterConstraints, TableSpec, Topology
from tierstore.planner.costs import Problem, slot_bytes
from tierstore.planner.options import Placed, options_of
from tierstore.planner.solver import Solution, divided
from tierstore.planner.tables import row_bytes
from tierstore.planner.topology import ASSUMED_RATES

LOAD_FACTOR = 0.2
"""torchrec's share of a table's rows that its cache has, where nothing says otherwise."""


def with_our_tiers(theirs: Mapping[str, Any], ours: Solution) -> Solution | None:
    """torchrec's cuts and ranks with our division of the memories, which can only help them; None if they do
    not fit. ``ours``: a solution for the same tables and machine."""
    placed = [placed_as(ours.problem, i, theirs[table.name]) for i, table in enumerate(ours.tables)]
    found = divided(ours.problem, placed)
    return None if found.caches.missing else found


def their_plan(tables: Sequence[TableSpec], machines: Topology, batch_size: int) -> dict[str, Any] | None:
    """ParameterSharding by table name; None where torchrec's planner finds no plan. Raises ConfigError where
    torchrec is not installed."""
    from .._torchrec import collection_on_meta, importing_torchrec

    with importing_torchrec():
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner as TheirPlanner
        from torchrec.distributed.planner import ParameterConstraints as TheirConstraints
        from torchrec.distributed.planner import Topology as TheirTopology
        from torchrec.distributed.planner.types import PlannerError

    module = collection_on_meta(tables)
    fast = machines.hbm_bw
    if machines.device == "cpu":  # an arena in host memory; what was fitted may count its bytes by the row
        fast = min(fast, ASSUMED_RATES["cpu"]["hbm_bw"])
    rates = {  # in bytes per millisecond
        "hbm_mem_bw": fast / 1e3,
        "hbm_to_ddr_mem_bw": machines.host_link_bw / 1e3,
        "intra_host_bw": machines.intra_host_bw / 1e3,
        "inter_host_bw": machines.inter_host_bw / 1e3,
    }
    logging.disable(logging.WARNING)
    planner = TheirPlanner(
        topology=TheirTopology(
            world_size=machines.world_size,
            local_world_size=machines.ranks_per_host,
            compute_device="cuda",
            hbm_cap=machines.hbm_per_rank,
            ddr_cap=machines.host_memory_per_host // machines.ranks_per_host,
            **rates,
        ),
        batch_size=batch_size,
        constraints={t.name: TheirConstraints(pooling_factors=[t.pooling_factor]) for t in tables},
        debug=False,
    )
    sharder: Any = EmbeddingBagCollectionSharder()
    try:
        (by_table,) = planner.plan(module, [sharder]).plan.values()
    except PlannerError:
        return None
    finally:
        logging.disable(logging.NOTSET)
    return dict(by_table.items())


def placed_as(problem: Problem, number: int, theirs: Any) -> Placed:
    """Return one of our tables, sharded and placed as in a torchrec plan."""
    table, machines = problem.tables[number], problem.topology
    kind, ranks = theirs.sharding_type, sorted(set(theirs.ranks))
    if len(ranks) == 1 and kind != "data_parallel":
        kind = "table_wise"  # shards of one rank are one
    if machines.hosts == 1:  # where we have one name for both
        kind = {"table_row_wise": "row_wise", "table_column_wise": "column_wise"}.get(kind, kind)
    columns = len(ranks) if "column" in kind else 1
    demands = list(problem.demands)
    demands[number] = ParameterConstraints([kind], min_partition=table.embedding_dim // columns)
    for option in options_of(replace(problem, demands=demands), number):
        if option.spread == "all" or option.shards == len(ranks):
            return Placed(
                number, option, list(range(machines.world_size)) if option.spread == "all" else ranks
            )
    raise ConfigError(f"no option of ours is like torchrec's {kind} of {table.name} on ranks {ranks}")


def as_our_plan(theirs: Mapping[str, Any], ours: Solution) -> tuple[ShardingPlan, list[str]]:
    """Return the same shards on the same ranks, and what had to be changed to keep to the memories, in words.

    torchrec's compute kernels say the bytes: all rows in hbm, or its cache's share there and the rest in uvm.
    ``ours``: a solution for the same tables and machine. Raises ConfigError for kernels that keep rows
    elsewhere.
    """
    machine = ours.topology
    floors = [placed_as(ours.problem, i, theirs[t.name]).option.cost.floor for i, t in enumerate(ours.tables)]
    sizes = list(zip(ours.tables, floors, strict=True))
    whole = [_table(table, theirs[table.name], machine, floor, {}) for table, floor in sizes]
    used = [0] * machine.world_size
    for shard in (shard for table in whole for shard in table.shards):
        used[shard.rank] += shard.hbm_bytes
    shares = {
        rank: machine.hbm_per_rank / size for rank, size in enumerate(used) if size > machine.hbm_per_rank
    }
    notes = [f"rank {rank} needs {1 / share:.2f} times its hbm" for rank, share in shares.items()]
    below = sum(shard.uvm_bytes for table in whole for shard in table.shards)
    if below > machine.host_memory_per_host:
        notes.append(f"needs {below / machine.host_memory_per_host:.2f} times the host memory")
    tables = tuple(_table(table, theirs[table.name], machine, floor, shares) for table, floor in sizes)
    return ShardingPlan(tables, machine.world_size, machine.ranks_per_host, machine.device), notes


def _table(
    spec: TableSpec, theirs: Any, machine: Topology, floor: float, shares: Mapping[int, float]
) -> TablePlacement:
    """Return torchrec's placement of a table, of whose rows in hbm only the share of its rank is there."""
    every, size = range(machine.world_size), (spec.num_embeddings, spec.embedding_dim)
    parts = [(rank, 0, size[0], 0, size[1]) for rank in every]
    if theirs.sharding_spec is not None:
        parts = [
            (cut.placement.rank(), *itertools.chain(*zip(cut.shard_offsets, cut.shard_sizes, strict=True)))
            for cut in theirs.sharding_spec.shards
        ]
    cached, shards = _cached_share(spec.name, theirs), []
    for rank, row, rows, column, columns in parts:
        hbm = int(min(rows, max(math.ceil(cached * rows), math.ceil(floor))) * shares.get(rank, 1.0))
        slot = slot_bytes(row_bytes(columns, spec.optimizer))
        sizes = int(hbm * slot), int((rows - hbm) * slot), 0, hbm, rows - hbm
        shards.append(ShardPlacement(rank, row, rows, column, columns, *sizes))
    return TablePlacement(
        spec.name, ShardingType(theirs.sharding_type), tuple(shards), 0.0, spec.module, *size
    )


def _cached_share(name: str, theirs: Any) -> float:
    """Return the share of the rows that is in device memory."""
    kernel = theirs.compute_kernel
    if kernel in ("dense", "fused"):
        return 1.0
    if kernel == "fused_uvm":
        return 0.0
    if kernel != "fused_uvm_caching":
        raise ConfigError(f"torchrec's plan has kernel {kernel!r} for {name}; its tiers are not known")
    given = theirs.cache_params.load_factor if theirs.cache_params else None
    return LOAD_FACTOR if given is None else float(given)


def cuts_for_cpu(placed: Mapping[str, tuple[str, list[int]]]) -> Callable[[Any], dict[str, Any]]:
    """Sharding types and ranks of a plan for GPUs as torchrec's own cuts for CPUs: what
    :func:`sharded_by_torchrec` takes."""

    def cut(plans: Any, kind: str, ranks: list[int]) -> Any:
        if kind == "data_parallel":
            return plans.data_parallel()
        if kind in ("row_wise", "table_row_wise"):
            return plans.row_wise()
        return plans.table_wise(rank=ranks[0]) if kind == "table_wise" else plans.column_wise(ranks=ranks)

    return lambda plans: {name: cut(plans, *cuts) for name, cuts in placed.items()}
