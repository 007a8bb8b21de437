"""Train with plans, ours and torchrec's, on ranks of this machine; compare predicted with measured steps.

Both planners are told the same tables, memories and rates: those of ``--topology``, which ``tierstore bench
device`` measures with other tables, so that nothing that is predicted is fitted to what is measured here.
Miss curves come from a recorded part of the data that training does not see. Torchrec's cuts and ranks get
our division of the memories, which can only help them. (``tierstore bench sharding`` compares torchrec's own
collections.) Every training has new processes and plans take turns. With ``--json`` a later command adds to
what earlier ones measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import kendalltau

import tierstore
from tierstore import TierConfig, optim
from tierstore.cache.engine import Table
from tierstore.initializers import constant
from tierstore.placement import ShardingPlan
from tierstore.planner import Workload
from tierstore.planner.planner import plan_of
from tierstore.planner.solver import Solution
from tierstore.result_file import JsonFile, option_errors
from tierstore.sharding import DistributedModelParallel
from tierstore.sharding.planning import tiers_of_rank

from .._neighbours import LOUD, Neighbours
from .._ranks import on_ranks
from .._rounds import chosen, due, read_records
from .._runtime_costs import load_zeros, one_thread, planning_seconds
from . import Results, main, training
from .their_plan import our_plan, their_plan, with_our_tiers
from .training import Budget, Case, Data, Job, Model, dense_seconds

ByCase, Records = Mapping[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]
"""What is known of each plan of each case, and what was measured."""
OURS, THEIR_CUTS = "ours", "torchrec's cuts"
_SUMMED = ("cpu", "misses", "reads")
_FOUR = [(300_000, 32, 1.0), (120_000, 32, 0.8), (240_000, 64, 1.05), (100_000, 64, 0.7)]
_MIXED = [
    *((300_000, 32, 1.0), (120_000, 64, 0.8), (60_000, 32, 1.1), (200_000, 16, 0.9), (30_000, 64, 1.0)),
    *((8_000, 32, 0.7), (2_000, 16, 1.0), (100_000, 32, 1.05), (500, 64, 0.5), (15_000, 16, 0.9)),
]
_MIXED_BAGS = (20, 4, 1, 8, 12, 2, 30, 6, 1, 3)
_BUDGETS: dict[str, Budget] = {
    "all in hbm": (1.5, 0.0, False),
    "half": (0.5, 0.7, False),
    "quarter": (0.25, 1.0, False),
    "eighth": (0.125, 1.1, False),
    "0.65 + ssd": (0.65, 0.02, True),
    "0.5 + ssd": (0.5, 0.1, True),
    "0.25 + ssd": (0.25, 0.02, True),
    "0.125 + 0.5 + ssd": (0.125, 0.5, True),
    "0.125 + 0.2 + ssd": (0.125, 0.2, True),
    "0.125 + ssd": (0.125, 0.02, True),
}
CASES = {
    name: Case(_FOUR, (8,) * 4, budget, 1024, 1, "rowwise_adagrad") for name, budget in _BUDGETS.items()
} | {
    "even, in memory": Case([(50_000, 32, 0.9)] * 12, (8,) * 12, (1.5, 0.0, False)),
    "one giant": Case(
        [(1_000_000, 64, 1.0), *[(20_000, 32, 0.9)] * 5], (10, 4, 4, 4, 4, 4), (1.3, 0.0, False)
    ),
    "mixed, in memory": Case(_MIXED, _MIXED_BAGS, (1.5, 0.0, False)),
    "mixed, tight hbm": Case(_MIXED, _MIXED_BAGS, (0.35, 1.1, False)),
    "needs the ssd": Case(_FOUR, (8,) * 4, (0.25, 0.2, True)),
}
"""On one rank the budgets by which the cost model is judged, on two ranks comparisons with torchrec."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default="", help=f"by number below {len(CASES)}: 0-2 (default: all)")
    parser.add_argument("--rounds", type=int, default=1, help="times that all is measured (default: 1)")
    parser.add_argument("--warm", type=int, default=120, help="steps before those measured (default: 120)")
    parser.add_argument("--steps", type=int, default=96, help="steps that are measured (default: 96)")
    parser.add_argument("--topology", type=Path, help="of tierstore bench device with the cases' --ranks")
    parser.add_argument("--search-seconds", type=float, default=2.0, help="of our planner (default: 2)")


def run(args: argparse.Namespace, target: JsonFile | None) -> Results:
    made = {"rates": {}, "plans": {}, "records": [], **read_records(args.json)}
    plans, records = made["plans"], made["records"]
    if args.topology and not made["rates"]:
        with option_errors("--topology", args.topology):
            made["rates"] = json.loads(args.topology.read_text())
    names = [list(CASES)[i] for i in chosen(args.cases, len(CASES), "--cases")]
    for name in names:
        if name not in plans:
            dense = on_ranks(CASES[name].ranks, dense_seconds, CASES[name])
            plans[name] = plans_of(CASES[name], made["rates"], args.search_seconds, dense)
    keys = [{"case": name, "by": by} for name in names for by in plans[name]]
    for key in (keys[i] for _ in range(args.rounds) for i in due(keys, records)):
        case, plan = CASES[key["case"]], plans[key["case"]][key["by"]]["plan"]
        records.append({**key, **on_ranks(case.ranks, _train, case, plan, args.warm, args.steps)})
        if target is not None:
            target.write(made)
    made["cases"] = compared(plans, records)
    _print(made["cases"], plans)
    return summary(made["cases"], plans, records), made


def plans_of(case: Case, rates: Mapping[str, Any], search_seconds: float, dense: float) -> dict[str, Any]:
    """Return the plans by name, with notes and what our planner predicts. ``dense``: seconds that the rest of
    the model takes per step."""
    machine = case.machine(rates)
    if case.ranks == 1:
        dense += rates.get("measured", {}).get("step_s", 0.0)
    ahead = {"depth": training.DEPTH, "window": training.WINDOW, "read_ahead": training.READ_AHEAD}
    work = Workload(case.batch_size, dense_seconds=dense, **ahead)
    options = {"workload": work, "stats": Data(case).stats(), "search_seconds": search_seconds}
    ours = our_plan(case.specs(), machine, **options)
    result = {OURS: _described(ours)}
    if case.ranks == 1:
        return result
    theirs, notes = their_plan(ours.problem), []
    if theirs is None:
        larger, notes = replace(machine, host_memory_per_host=1 << 40), ["torchrec has no plan"]
        theirs = their_plan(replace(ours.problem, topology=larger))
    cuts = None if theirs is None else with_our_tiers(theirs, ours)
    return result if cuts is None else {**result, THEIR_CUTS: {**_described(cuts), "notes": notes}}


def _described(solution: Solution) -> dict[str, Any]:
    caches, found = solution.caches, solution.prediction
    misses, reads = (float((caches.field("unique") * share).sum()) for share in solution.missed)
    stages = {"compute": found.ranks[:, 0], "fetch": found.ranks[:, 5], "ssd": found.ssd_s}
    return {
        **{"plan": plan_of(solution).to_dict(), "predicted": found.step, "misses": misses, "reads": reads},
        **{name: float(seconds.max()) for name, seconds in stages.items()},
    }


def _train(case: Case, plan: dict[str, Any], warm: int, steps: int) -> Any:
    """Return, per step after ``warm`` steps, seconds of the slowest rank, CPU seconds and rows of all ranks,
    what other processes took of the machine (``others``), and the loss at the end."""
    one_thread()
    neighbours = Neighbours(lambda value: _over_ranks("cpu", value))
    with job_of(case, plan, warm + steps + training.WINDOW + training.DEPTH + 2) as job:
        job.train(warm)
        neighbours.share()
        before, loss, after = job.counters(), job.train(steps), job.counters()
        figures = {name: _over_ranks(name, after[name] - before[name]) / steps for name in after}
        return {**figures, "others": _over_ranks("others", neighbours.share()), "loss": loss}


@contextmanager
def job_of(case: Case, described: Mapping[str, Any], drawn: int = 0) -> Iterator[Job]:
    """Make a job with the shards and tiers of a plan, whose rows begin as zeros, and are there.

    ``drawn``: batches that are drawn before the first step, since drawing is no part of a step.
    """
    torch.manual_seed(0)
    plan = ShardingPlan.from_dict(described)
    stored = any(shard.ssd_bytes for table in plan.tables for shard in table.shards)
    config = TierConfig(ssd="10GiB" if stored else 0)
    optimizer = optim.specs.make(case.optimizer, lr=training.LR)
    if case.ranks == 1:
        tables = [Table(c.name, c.num_embeddings, c.embedding_dim, constant(0.0)) for c in case.configs]
        config = replace(config, **tiers_of_rank(plan.tables, 0, tables, config, optimizer))
        bags: Any = tierstore.EmbeddingBagCollection(case.configs, config=config, optimizer=optimizer)
        model: Any = Model(bags, case.width)
        close = partial(bags.close, commit=False)
    else:
        every = TierConfig(hbm="all")
        bags = tierstore.EmbeddingBagCollection(case.configs, config=every, optimizer=optimizer)
        model = DistributedModelParallel(Model(bags, case.width), plan=plan, config=config)
        (bags,), close = model.sharded.values(), model.close
    load_zeros(bags, case.configs)

    def counters() -> dict[str, float]:
        tiers = bags.engine.stats()["tiers"]
        return {
            **{"step": time.perf_counter(), "compute": time.thread_time(), "cpu": time.process_time()},
            "fetch": planning_seconds(bags),
            "misses": tiers["hbm"]["rows"] - tiers["hbm"]["row_hits"],
            "reads": tiers["ssd"]["row_hits"] if "ssd" in tiers else 0,
        }

    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = Data(case).batches(rank)
    job = Job(model, chain(list(islice(batches, drawn)), batches), counters)
    try:
        yield job
    finally:
        job.batches.close()
        close()


def _over_ranks(name: str, value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total, dist.ReduceOp.SUM if name in _SUMMED else dist.ReduceOp.MAX)
    return float(total)


def compared(plans: ByCase, records: Records) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by case and plan, medians per step of the rounds that no other process disturbed (of all rounds
    if each was disturbed), and the seconds of our plan over the seconds of that plan."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for name, ways in plans.items():
        for by in ways:
            every = [record for record in records if (record["case"], record["by"]) == (name, by)]
            same = [record for record in every if record["others"] < LOUD] or every
            if same:
                counted = [key for key, value in same[0].items() if isinstance(value, int | float)]
                found: dict[str, Any] = {key: float(np.median([one[key] for one in same])) for key in counted}
                found |= {"steps": [one["step"] for one in same], "rounds": len(every)}
                result.setdefault(name, {})[by] = found
                found["ratio"] = result[name][OURS]["step"] / found["step"]
    return result


def summary(cases: ByCase, plans: ByCase, records: Records) -> dict[str, float]:
    """Return how well our plans' steps, and the rows that they miss and read, are predicted."""
    pairs = [(plans[name][OURS], ways[OURS]) for name, ways in cases.items()]
    predicted, measured = [one["predicted"] for one, _ in pairs], [two["step"] for _, two in pairs]
    errors = np.abs(np.array(predicted) / measured - 1)
    wrong = {
        name: [abs(one[name] / two[name] - 1) for one, two in pairs if two.get(name, 0) > 10]
        for name in ("misses", "reads")
    }
    return {
        "plans_trained": len(pairs),
        "step_error.median": float(np.median(errors)) if pairs else 0.0,
        "step_error.worst": float(errors.max(initial=0.0)),
        "within_15_percent": int((errors <= 0.15).sum()),
        "kendall_tau": float(kendalltau(predicted, measured).statistic) if len(pairs) > 1 else 0.0,
        "miss_error.worst": max(wrong["misses"], default=0.0),
        "read_error.worst": max(wrong["reads"], default=0.0),
        "measured": len(records),
        "disturbed": sum(record["others"] >= LOUD for record in records),
    }


def _print(cases: ByCase, plans: ByCase) -> None:
    """Print a line for every plan; ``--json`` has what else is known of it."""
    for name, ways in cases.items():
        for by, found in ways.items():
            plan, ratio = plans[name][by], f"ours over it {found['ratio']:.2f}"
            step = f"{1e3 * found['step']:.1f} ms, {1e3 * plan['predicted']:.1f} ms predicted"
            print(f"{name:<20} {by:<16} {step:>32}, {ratio}", *plan.get("notes", ()))


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
