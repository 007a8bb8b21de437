"""How fast plans are made, and how far they are from the optimum.

Random small cases are compared with the MILP, 100 tables on 64 ranks with the LP's bound. 1,000 tables on 128
ranks show how fast a large plan is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from tierstore.planner import EmbeddingShardingPlanner, MissCurve, Popularity, TableSpec, Topology
from tierstore.planner.tables import TableStats
from tierstore.result_file import JsonFile

from . import Results, main
from .bound import optimum, relaxed
from .their_plan import our_plan

_MACHINES = [(1, 2), (1, 3), (2, 2), (1, 4)]
_BATCH = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=50, help="random small cases against the MILP")


def run(args: argparse.Namespace, _: JsonFile | None) -> Results:
    ratios = [against_optimum(seed) for seed in range(args.cases)]
    known = [ratio for ratio in ratios if ratio is not None]
    bounded = our_plan(large_tables(100, 1), large_topology(8), batch_size=4096)
    large = our_plan(large_tables(1000), large_topology(16), batch_size=4096)
    figures = {
        **{"optimum.cases": len(known), "optimum.infeasible": len(ratios) - len(known)},
        **{"optimum.median": float(np.median(known)), "optimum.worst": max(known)},
        "bound.ratio": bounded.as_divided().step / relaxed(bounded.problem),
        **{"large.plan_s": large.seconds, "large.predicted_step_s": large.prediction.step},
    }
    return figures, {}


def small_case(seed: int) -> tuple[Topology, list[TableSpec]]:
    """Return a few tables with recorded curves on two to four ranks; budgets are from tight to ample."""
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
    """Return our step over the proven lower bound of the MILP; None where the tables do not fit."""
    machines, tables = small_case(seed)
    planner = EmbeddingShardingPlanner(machines, batch_size=_BATCH, search_seconds=search_seconds)
    solution = planner.solve(tables)
    if solution.caches.missing:
        return None
    return solution.as_divided().step / optimum(solution.problem, time_limit)


def large_topology(hosts: int) -> Topology:
    return Topology(hosts, 8, "80GiB", "1TiB", "30TB")


def large_tables(count: int, seed: int = 0) -> list[TableSpec]:
    """Return tables like a large recommender's, with thousands to hundreds of millions of rows."""
    random = np.random.default_rng(seed)
    return drawn_tables(random, (10 ** random.uniform(3, 8.6) for _ in range(count)), (64, 128), 0.7)


def drawn_tables(
    random: np.random.Generator, rows: Iterable[float], dims: Sequence[int], least_skew: float
) -> list[TableSpec]:
    """Return a table for each number of rows; its dimension, bags and popularity are drawn."""
    return [
        TableSpec(
            f"t{i}",
            int(count),
            int(random.choice(dims)),
            pooling_factor=float(np.round(10 ** random.uniform(0, 1.5), 1)),
            popularity=Popularity(float(random.uniform(least_skew, 1.2)), float(random.uniform(0, 100))),
        )
        for i, count in enumerate(rows)
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
