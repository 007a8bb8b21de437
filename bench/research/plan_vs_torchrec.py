"""Simulate our plan and torchrec's for the same model and machine.

torchrec's planner is told the same sizes, rates and pooling factors. Its cuts and ranks get our division of
the memories, which can only help them; then both plans' steps are simulated event by event.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tierstore.planner import TableSpec, Topology, Workload
from tierstore.result_file import JsonFile

from . import Results, main
from .cluster import Simulation
from .plan import drawn_tables
from .their_plan import our_plan, their_plan, with_our_tiers

_BATCH_SIZE, _DEPTH, _BATCHES = 1024, 4, 40
MACHINES = {"2 ranks": (1, 2), "4 ranks": (1, 4), "8 ranks": (1, 8), "2 hosts x 4": (2, 4)}
SIZES = ("mixed", "one giant")
_HBM = {"ample": 1.5, "tight": 0.4}  # of the tables' bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=int, nargs="+", default=[4, 12, 40], help="numbers of tables")


def run(args: argparse.Namespace, _: JsonFile | None) -> Results:
    pairs = []
    for count, machine, sizes, hbm in itertools.product(args.tables, MACHINES, SIZES, _HBM):
        tables = model(count, sizes)
        machines = machines_for(tables, *MACHINES[machine], _HBM[hbm])
        pair = compared(tables, machines)
        pairs.append({"tables": count, "machine": machine, "sizes": sizes, "hbm": hbm, **pair})
        seconds = f"ours {pair['ours']:.6f} s, torchrec's {pair['theirs']:.6f} s {pair['why']}"
        print(f"{count:>3} {sizes:<10} {machine:<12} {hbm:<6} {seconds}", flush=True)
    ratios = [pair["ratio"] for pair in pairs if pair["ratio"]]
    figures = {
        "pairs": len(ratios),
        "ratio.median": float(np.median(ratios)) if ratios else 0.0,
        "ratio.worst": max(ratios, default=0.0),
        "torchrec_has_no_plan": len(pairs) - len(ratios),
    }
    return figures, {"compared": pairs}


def compared(tables: Sequence[TableSpec], machines: Topology) -> dict[str, Any]:
    """Return simulated seconds per step of both planners' plans, ours over theirs, and seconds of planning.

    ``theirs`` and ``ratio`` are 0 where torchrec has no plan; ``why`` says why.
    """
    work = Workload(_BATCH_SIZE, depth=_DEPTH)
    ours = our_plan(tables, machines, workload=work, search_seconds=2.0)
    start = time.perf_counter()
    plans = their_plan(ours.problem)
    seconds = {"ours_plan_s": ours.seconds, "theirs_plan_s": time.perf_counter() - start}
    theirs = None if plans is None else with_our_tiers(plans, ours)
    why = "finds none" if plans is None else "does not fit" if theirs is None else ""
    # The same batches are drawn for equal tables.
    own, other = (Simulation(one, _DEPTH, 0.05).run(_BATCHES) if one else 0.0 for one in (ours, theirs))
    return {"ours": own, "theirs": other, "ratio": own / other if other else 0.0, "why": why, **seconds}


def model(count: int, sizes: str) -> list[TableSpec]:
    """Return tables with thousands to tens of millions of rows, or with nearly all rows in one table."""
    random = np.random.default_rng([count, SIZES.index(sizes), 0])
    rows = 10 ** random.uniform(3, 7.5, count)
    if sizes == "one giant":
        rows = np.minimum(rows, 1e6)
        rows[0] = 6e7
    return drawn_tables(random, rows, (32, 64, 128), 0.8)


def machines_for(tables: Sequence[TableSpec], hosts: int, per_host: int, hbm: float) -> Topology:
    """Return machines with device memory for a share of the tables, and host memory for twice all tables."""
    total = sum(table.rows * (table.row_bytes() + 60) for table in tables)
    per_rank = int(hbm * total / hosts / per_host) + (1 << 28)
    return Topology(hosts, per_host, per_rank, int(2 * total / hosts) + (8 << 30), "30TB")


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
