"""``tierstore bench plan``: how fast plans are made, how far they are from the optimum, and torchrec's."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.errors import ConfigError
from tierstore.planner import (
    EmbeddingShardingPlanner,
    MissCurve,
    ParameterConstraints,
    Popularity,
    TableSpec,
    Topology,
)
from tierstore.planner.allocate import Placed, allocate
from tierstore.planner.bound import optimum, relaxed
from tierstore.planner.cuts import cuts_of
from tierstore.planner.predict import predict
from tierstore.planner.tables import TableStats

SUMMARY = "time and quality of plans, against the optimum, an LP bound and torchrec"
_MACHINES = [(1, 2), (1, 3), (2, 2), (1, 4)]
_BATCH = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=50, help="random small cases against the MILP")
    parser.add_argument("--tables", type=int, default=1000, help="tables of the large plan")
    parser.add_argument("--hosts", type=int, default=16, help="of 8 ranks each, of the large plan")
    parser.add_argument("--bound-tables", type=int, default=100, help="tables of the plan that the LP bounds")
    parser.add_argument("--torchrec-tables", type=int, default=0, help="time torchrec on so many, on 8 ranks")
    parser.add_argument("--json", type=Path, help="write the figures there")


def run(args: argparse.Namespace) -> int:
    figures: dict[str, float] = {}
    if args.cases:
        ratios = [against_optimum(seed) for seed in range(args.cases)]
        known = [ratio for ratio in ratios if ratio is not None]
        figures |= {"optimum.cases": len(known), "optimum.infeasible": len(ratios) - len(known)}
        figures |= {"optimum.median": float(np.median(known)), "optimum.worst": max(known)}
    if args.bound_tables:
        figures |= against_bound(args.bound_tables)
    if args.tables:
        machines, tables = large_topology(args.hosts), large_tables(args.tables)
        start = time.perf_counter()
        plan = EmbeddingShardingPlanner(machines, batch_size=4096).plan(tables)
        figures["large.tables"], figures["large.ranks"] = args.tables, machines.world_size
        figures["large.plan_s"] = time.perf_counter() - start
        figures["large.predicted_step_s"] = plan.report["predicted_step_s"]
    if args.torchrec_tables:
        figures |= against_torchrec(args.torchrec_tables)
    for key, value in figures.items():
        print(f"{key:<32} {value:>12,.4f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


def small_case(seed: int) -> tuple[Topology, list[TableSpec]]:
    """A few tables with recorded curves on two to four ranks; budgets from tight to ample."""
    random = np.random.default_rng(seed)
    hosts, per_host = _MACHINES[seed % 4]
    tables = [_table(f"t{i}", random, hosts * per_host) for i in range(int(random.integers(3, 6)))]
    total = sum(table.rows * table.embedding_dim * 4 for table in tables)
    machines = Topology(
        hosts,
        per_host,
        int(total * 10 ** random.uniform(-1.6, 0.3) / (hosts * per_host) + 60e6),
        int(total * 10 ** random.uniform(-1, 0.3) / hosts + 400e6),
        int(total * 10 ** random.uniform(-0.2, 1)) if seed % 5 else 3 * total,
        ssd_read_iops=float(10 ** random.uniform(4.5, 6.5)),
        intra_host_bw=float(10 ** random.uniform(9, 11)),
        inter_host_bw=float(10 ** random.uniform(9, 10.5)),
        host_link_bw=float(10 ** random.uniform(9.3, 10.6)),
    )
    return machines, tables


def _table(name: str, random: np.random.Generator, world: int) -> TableSpec:
    rows, factor = int(10 ** random.uniform(4, 7.5)), float(10 ** random.uniform(0, 1.3))
    accesses = _BATCH * world * factor
    sizes = np.array([0.01, 0.05, 0.2, 0.5])
    misses = np.clip(1 - sizes ** random.uniform(0.2, 1) * random.uniform(0.7, 1), 0, 1)
    curve = MissCurve.through((sizes * rows).tolist(), misses.tolist(), rows)
    stats = TableStats(min(rows, accesses) * random.uniform(0.2, 0.8), accesses, curve)
    return TableSpec(name, rows, int(random.choice([64, 128])), pooling_factor=factor, stats=stats)


def against_optimum(seed: int, search_seconds: float = 5.0, time_limit: float = 60.0) -> float | None:
    """Our step over the proven lower bound of the MILP; None where the tables do not fit."""
    machines, tables = small_case(seed)
    planner = EmbeddingShardingPlanner(machines, batch_size=_BATCH, search_seconds=search_seconds)
    solution = planner.solve(tables)
    if solution.caches.missing:
        return None
    cuts = [cuts_of(table, machines, planner.work, ParameterConstraints()) for table in tables]
    ranks = np.arange(machines.world_size)
    bound = optimum(machines, solution.work, cuts, [ranks] * len(tables), time_limit)
    return solution.prediction.step / bound.seconds


def large_topology(hosts: int) -> Topology:
    return Topology(hosts, 8, "80GiB", "1TiB", "30TB")


def large_tables(count: int, seed: int = 0) -> list[TableSpec]:
    """Tables like a large recommender's: rows from thousands to hundreds of millions."""
    random = np.random.default_rng(seed)
    return [
        TableSpec(
            f"t{i}",
            int(10 ** random.uniform(3, 8.6)),
            int(random.choice([64, 128])),
            pooling_factor=float(10 ** random.uniform(0, 1.5)),
            popularity=Popularity(float(random.uniform(0.7, 1.2)), float(random.uniform(0, 100))),
        )
        for i in range(count)
    ]


def against_bound(tables_count: int) -> dict[str, float]:
    """Our step over the LP bound on 64 ranks."""
    machines, tables = large_topology(8), large_tables(tables_count, 1)
    planner = EmbeddingShardingPlanner(machines, batch_size=4096)
    solution = planner.solve(tables)
    cuts = [cuts_of(table, machines, planner.work, ParameterConstraints()) for table in tables]
    bound = relaxed(machines, solution.work, cuts)
    return {"bound.tables": tables_count, "bound.ratio": solution.prediction.step / bound.seconds}


def against_torchrec(count: int) -> dict[str, float]:
    """Planning seconds of both for the same tables and machine (8 ranks on one host), and the step of both by
    our cost model; torchrec's cuts and ranks get our division of the memories, which can only help them."""
    import torch
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner as TheirPlanner
    from torchrec.distributed.planner import ParameterConstraints as TheirConstraints
    from torchrec.distributed.planner import Topology as TheirTopology

    tables, machines = large_tables(count), large_topology(1)
    ours = EmbeddingShardingPlanner(machines, batch_size=512)
    start = time.perf_counter()
    plan = ours.plan(tables)
    figures = {"torchrec.tables": count, "ours.plan_s": time.perf_counter() - start}
    configs = [
        torchrec.EmbeddingBagConfig(
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            name=table.name,
            feature_names=[table.name],
        )
        for table in tables
    ]
    module = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    sizes: dict[str, Any] = {"hbm_cap": machines.hbm_per_rank, "ddr_cap": machines.host_memory_per_host // 8}
    theirs = TheirPlanner(
        topology=TheirTopology(world_size=8, local_world_size=8, compute_device="cuda", **sizes),
        batch_size=512,
        constraints={t.name: TheirConstraints(pooling_factors=[t.pooling_factor]) for t in tables},
    )
    start = time.perf_counter()
    their_plan = theirs.plan(module, [EmbeddingBagCollectionSharder()])
    figures["torchrec.plan_s"] = time.perf_counter() - start
    (by_table,) = their_plan.plan.values()
    placed = [placed_as(i, table, by_table[table.name], ours, machines) for i, table in enumerate(tables)]
    caches = allocate(machines, ours.work, placed)
    figures["torchrec.fits"] = float(not caches.missing)
    figures["torchrec.step_s"] = predict(machines, ours.work, placed, caches).step
    figures["ours.step_s"] = plan.report["predicted_step_s"]
    return figures


def placed_as(
    number: int, table: TableSpec, theirs: Any, planner: EmbeddingShardingPlanner, machines: Topology
) -> Placed:
    """One of our tables, cut and placed as in a torchrec plan."""
    shards = len(theirs.ranks)
    columns = table.embedding_dim // shards if "column" in theirs.sharding_type else 1
    demand = ParameterConstraints([theirs.sharding_type], min_partition=columns)
    for cut in cuts_of(table, machines, planner.work, demand):
        if cut.shards == shards or cut.spread == "all":
            ranks = sorted(set(theirs.ranks)) if cut.spread != "all" else range(machines.world_size)
            return Placed(number, cut, list(ranks))
    raise ConfigError(f"no cut of ours is like {theirs.sharding_type} on {theirs.ranks}")
