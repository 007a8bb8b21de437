"""Our planner and torchrec's are asked for a plan; torchrec's cuts and ranks in our words."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tierstore.errors import ConfigError
from tierstore.planner import EmbeddingShardingPlanner, ParameterConstraints, TableSpec, Topology
from tierstore.planner.costs import Problem
from tierstore.planner.options import Placed, options_of
from tierstore.planner.solver import Solution, divided
from tierstore.planner.topology import ASSUMED_RATES


def our_plan(tables: Sequence[TableSpec], machines: Topology, **options: Any) -> Solution:
    """Return the solution of our planner with these options. Raises ConfigError if the tables do not fit."""
    ours = EmbeddingShardingPlanner(machines, **options).solve(tables)
    if ours.caches.missing:
        raise ConfigError(f"{len(tables)} tables do not fit: {ours.caches.missing}")
    return ours


def with_our_tiers(theirs: Mapping[str, Any], ours: Solution) -> Solution | None:
    """Return torchrec's cuts and ranks with our division of the memories, which can only make them faster.

    The result is None if they do not fit. ``ours``: a solution for the same tables and machine.
    """
    placed = [placed_as(ours.problem, i, theirs[table.name]) for i, table in enumerate(ours.problem.tables)]
    found = divided(ours.problem, placed)
    return None if found.caches.missing else found


def their_plan(problem: Problem) -> dict[str, Any] | None:
    """Return torchrec's ParameterSharding by table name, or None where torchrec's planner finds no plan.

    Raises ConfigError where torchrec cannot be imported.
    """
    from .._checks import importing
    from .._torchrec import collection_on_meta

    with importing("torchrec"):
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner as TheirPlanner
        from torchrec.distributed.planner import ParameterConstraints as TheirConstraints
        from torchrec.distributed.planner import Topology as TheirTopology
        from torchrec.distributed.planner.types import PlannerError

    tables, machines = problem.tables, problem.topology
    fast = machines.hbm_bw
    if machines.device == "cpu":  # an arena in host memory; what was fitted may count its bytes by the row
        fast = min(fast, ASSUMED_RATES["cpu"]["hbm_bw"])
    logging.disable(logging.WARNING)
    planner = TheirPlanner(
        topology=TheirTopology(
            world_size=machines.world_size,
            local_world_size=machines.ranks_per_host,
            compute_device="cuda",
            hbm_cap=machines.hbm_per_rank,
            ddr_cap=machines.host_memory_per_host // machines.ranks_per_host,
            hbm_mem_bw=fast / 1e3,  # these are bytes per millisecond
            hbm_to_ddr_mem_bw=machines.host_link_bw / 1e3,
            intra_host_bw=machines.intra_host_bw / 1e3,
            inter_host_bw=machines.inter_host_bw / 1e3,
        ),
        batch_size=problem.work.batch_size,
        constraints={t.name: TheirConstraints(pooling_factors=[t.pooling_factor]) for t in tables},
        debug=False,
    )
    sharder: Any = EmbeddingBagCollectionSharder()
    try:
        (by_table,) = planner.plan(collection_on_meta(tables), [sharder]).plan.values()
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
    columns = len(ranks) if "column" in kind else 1
    demands = list(problem.demands)
    demands[number] = ParameterConstraints([kind], min_partition=table.embedding_dim // columns)
    for option in options_of(replace(problem, demands=demands), number):
        if option.spread == "all" or option.shards == len(ranks):
            everyone = list(range(machines.world_size))
            return Placed(number, option, everyone if option.spread == "all" else ranks)
    raise ConfigError(f"no option of ours is like torchrec's {kind} of {table.name} on ranks {ranks}")
