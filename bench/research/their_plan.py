"""torchrec's planner asked for a plan, and its plans told in our words."""

from __future__ import annotations

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
    machine, notes = ours.topology, []
    placed = [
        _table(
            table,
            theirs[table.name],
            machine,
            placed_as(ours.problem, i, theirs[table.name]).option.cost.floor,
        )
        for i, table in enumerate(ours.tables)
    ]
    used = [0] * machine.world_size
    for table in placed:
        for shard in table.shards:
            used[shard.rank] += shard.hbm_bytes
    for rank, size in enumerate(used):
        if size > machine.hbm_per_rank:
            notes.append(f"rank {rank} needs {size / machine.hbm_per_rank:.2f} times its hbm")
    below = sum(shard.uvm_bytes for table in placed for shard in table.shards)
    if below > machine.host_memory_per_host:
        notes.append(f"needs {below / machine.host_memory_per_host:.2f} times the host memory")
    shares = [min(1.0, machine.hbm_per_rank / max(1, size)) for size in used]
    tables = tuple(
        replace(table, shards=tuple(_lowered(shard, shares[shard.rank]) for shard in table.shards))
        for table in placed
    )
    return ShardingPlan(tables, machine.world_size, machine.ranks_per_host, machine.device), notes


def _table(spec: TableSpec, theirs: Any, machine: Topology, floor: float) -> TablePlacement:
    kind = ShardingType(theirs.sharding_type)
    if theirs.sharding_spec is None:
        every = range(machine.world_size)
        parts = [(rank, 0, spec.num_embeddings, 0, spec.embedding_dim) for rank in every]
    else:
        parts = [
            (shard.placement.rank(), shard.shard_offsets[0], shard.shard_sizes[0], *_columns(shard))
            for shard in theirs.sharding_spec.shards
        ]
    share = _cached_share(spec.name, theirs)
    shards = []
    for rank, row, rows, column, columns in parts:
        hbm = min(rows, max(math.ceil(share * rows), math.ceil(floor)))
        slot = slot_bytes(row_bytes(columns, spec.optimizer))
        sizes = int(hbm * slot), int((rows - hbm) * slot), 0, hbm, rows - hbm
        shards.append(ShardPlacement(rank, row, rows, column, columns, *sizes))
    size = spec.num_embeddings, spec.embedding_dim
    return TablePlacement(spec.name, kind, tuple(shards), 0.0, spec.module, *size)


def _columns(shard: Any) -> tuple[int, int]:
    return shard.shard_offsets[1], shard.shard_sizes[1]


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


def _lowered(shard: ShardPlacement, share: float) -> ShardPlacement:
    """With ``share`` of its rows in hbm, the others of them in uvm."""
    rows, size = int(shard.hbm_rows * share), int(shard.hbm_bytes * share)
    return replace(
        shard,
        hbm_rows=rows,
        hbm_bytes=size,
        uvm_rows=shard.uvm_rows + shard.hbm_rows - rows,
        uvm_bytes=shard.uvm_bytes + shard.hbm_bytes - size,
    )


def cuts_for_cpu(placed: Mapping[str, tuple[str, list[int]]]) -> Callable[[Any], dict[str, Any]]:
    """Sharding types and ranks of a plan for GPUs as torchrec's own cuts for CPUs: what
    :func:`sharded_by_torchrec` takes."""

    def cuts(plans: Any) -> dict[str, Any]:
        made: dict[str, Callable[[list[int]], Any]] = {
            "data_parallel": lambda _: plans.data_parallel(),
            "table_wise": lambda ranks: plans.table_wise(rank=ranks[0]),
            "column_wise": lambda ranks: plans.column_wise(ranks=ranks),
            "table_column_wise": lambda ranks: plans.column_wise(ranks=ranks),
            "row_wise": lambda _: plans.row_wise(),
            "table_row_wise": lambda _: plans.row_wise(),
        }
        return {name: made[kind](ranks) for name, (kind, ranks) in placed.items()}

    return cuts
