"""Train with plans, ours and torchrec's, on ranks of this machine; compare predicted with measured steps.

Both planners are told the same tables, memories and rates: those of ``--topology``, which ``tierstore bench
device`` measures with other tables, so that nothing that is predicted is fitted to what is measured here.
Miss curves come from a recorded part of the data that training does not see. Plans are carried out by
tierstore's collections, and torchrec's also by its own where all is in memory (its kernels for CPUs have no
tiers). Every training has new processes and plans take turns. With ``--json`` a later command adds to what
earlier ones measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tierstore
from tierstore import TierConfig, optim
from tierstore.cache.engine import Table
from tierstore.errors import ConfigError
from tierstore.initializers import constant
from tierstore.placement import ShardingPlan
from tierstore.planner import EmbeddingShardingPlanner, Workload
from tierstore.planner.planner import placements
from tierstore.planner.solver import Solution
from tierstore.planner.tables import prepared
from tierstore.result_file import JsonFile, option_errors
from tierstore.sharding import DistributedModelParallel
from tierstore.sharding.planning import tiers_of_rank

from .._neighbours import LOUD
from .._ranks import on_ranks
from .._rounds import chosen, due, read_records
from .._runtime_costs import load_zeros, one_thread, planning_seconds
from .._torchrec import as_theirs, sharded_by_torchrec
from . import Results, main
from .their_plan import as_our_plan, cuts_for_cpu, their_plan, with_our_tiers
from .training import DEPTH, LR, WINDOW, Batches, Budget, Case, Data, Job, Model, Turns, dense_seconds

OURS, THEIRS, THEIR_CUTS, TORCHREC = "ours", "torchrec's", "its cuts, our tiers", "torchrec's, by torchrec"
_SUMMED = ("cpu", "misses", "reads", "bytes_sent")
_FOUR = [(300_000, 32, 1.0), (120_000, 32, 0.8), (240_000, 64, 1.05), (100_000, 64, 0.7)]
_MIXED = [
    *((300_000, 32, 1.0), (120_000, 64, 0.8), (60_000, 32, 1.1), (200_000, 16, 0.9), (30_000, 64, 1.0)),
    *((8_000, 32, 0.7), (2_000, 16, 1.0), (100_000, 32, 1.05), (500, 64, 0.5), (15_000, 16, 0.9)),
]
_MIXED_BAGS = (20, 4, 1, 8, 12, 2, 30, 6, 1, 3)
_BUDGETS = {
    "all in hbm": Budget(1.5, 0.0, False),
    "half": Budget(0.5, 0.7, False),
    "quarter": Budget(0.25, 1.0, False),
    "eighth": Budget(0.125, 1.1, False),
    "0.65 + ssd": Budget(0.65, 0.02, True),
    "0.5 + ssd": Budget(0.5, 0.1, True),
    "0.25 + ssd": Budget(0.25, 0.02, True),
    "0.125 + 0.5 + ssd": Budget(0.125, 0.5, True),
    "0.125 + 0.2 + ssd": Budget(0.125, 0.2, True),
    "0.125 + ssd": Budget(0.125, 0.02, True),
}
CASES = {
    name: Case(_FOUR, (8,) * 4, budget, 1024, 1, "rowwise_adagrad") for name, budget in _BUDGETS.items()
} | {
    "even, in memory": Case([(50_000, 32, 0.9)] * 12, (8,) * 12, Budget(1.5, 0.0, False)),
    "one giant": Case(
        [(1_000_000, 64, 1.0), *[(20_000, 32, 0.9)] * 5], (10, 4, 4, 4, 4, 4), Budget(1.3, 0.0, False)
    ),
    "mixed, in memory": Case(_MIXED, _MIXED_BAGS, Budget(1.5, 0.0, False)),
    "mixed, tight hbm": Case(_MIXED, _MIXED_BAGS, Budget(0.35, 1.1, False)),
    "needs the ssd": Case(_FOUR, (8,) * 4, Budget(0.25, 0.2, True)),
}
"""On one rank the budgets by which the cost model is judged, on two ranks comparisons with torchrec."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default="", help=f"by number below {len(CASES)}: 0-2 (default: all)")
    parser.add_argument("--rounds", type=int, default=1, help="times that all is measured (default: 1)")
    parser.add_argument("--warm", type=int, default=120, help="steps before the first turn (default: 120)")
    parser.add_argument("--turns", type=int, default=4, help="turns of a plan and round (default: 4)")
    parser.add_argument("--steps", type=int, default=24, help="steps of a turn (default: 24)")
    parser.add_argument(
        "--topology", type=Path, help="what tierstore bench device writes with the cases' --ranks"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="begin nothing later; go on another time")
    parser.add_argument("--search-seconds", type=float, default=2.0, help="of our planner (default: 2)")


def run(args: argparse.Namespace, target: JsonFile | None) -> Results:
    known = read_records(args.json)
    names = [list(CASES)[i] for i in chosen(args.cases, len(CASES), "--cases")]
    made: dict[str, Any] = {"rates": known.get("rates") or (_rates(args.topology) if args.topology else {})}
    plans: dict[str, Any] = made.setdefault("plans", known.get("plans", {}))
    for name in names:
        if name not in plans:
            dense = on_ranks(CASES[name].ranks, dense_seconds_of, CASES[name])
            plans[name] = plans_of(CASES[name], made["rates"], args.search_seconds, dense)
    records = made.setdefault("records", known.get("records", []))
    until = time.perf_counter() + args.seconds
    for _ in range(args.rounds):
        for record in measurements(names, plans, Turns(args.warm, args.turns, args.steps), records, until):
            records.append(record)
            if target is not None:
                target.write(made)
    made["cases"] = compared(plans, records)
    _print(made["cases"], plans)
    return summary(made["cases"], plans, records), made


def _rates(path: Path) -> dict[str, Any]:
    with option_errors("--topology", path):
        rates: dict[str, Any] = json.loads(path.read_text())
    return rates


def plans_of(case: Case, rates: Mapping[str, Any], search_seconds: float, dense: float) -> dict[str, Any]:
    """Return, by name of a way to train, its plan (for torchrec's runtime, sharding types and ranks), notes,
    and what our planner predicts. ``dense``: seconds that the rest of the model takes per step."""
    machine = case.machine(rates)
    if case.ranks == 1:
        dense += rates.get("measured", {}).get("step_s", 0.0)
    work = Workload(case.batch_size, dense_seconds=dense, depth=DEPTH, window=WINDOW)
    planner = EmbeddingShardingPlanner(machine, workload=work, search_seconds=search_seconds)
    ours = planner.solve(prepared(case.specs(), {}, Data(case).stats(), case.ranks))
    if ours.caches.missing:
        raise ConfigError(f"the tables do not fit: {ours.caches.missing}")
    result = {OURS: _described(ours)}
    if case.ranks == 1:
        return result
    theirs, notes = their_plan(ours.tables, machine, case.batch_size), []
    if theirs is not None:
        plan, notes = as_our_plan(theirs, ours)
        result[THEIRS] = {"plan": plan.to_dict(), "notes": notes}
    else:
        larger = replace(machine, host_memory_per_host=1 << 40)
        theirs, notes = their_plan(ours.tables, larger, case.batch_size), ["torchrec has no plan"]
    cuts = None if theirs is None else with_our_tiers(theirs, ours)
    if cuts is not None and any(table.compute_kernel not in ("dense", "fused") for table in theirs.values()):
        result[THEIR_CUTS] = {**_described(cuts), "notes": notes}
    elif cuts is not None and THEIRS in result:
        result[THEIRS]["predicted"] = cuts.prediction.step
        placed = {name: [str(table.sharding_type), table.ranks] for name, table in theirs.items()}
        result[TORCHREC] = {"placed": placed}
    return result


def _described(solution: Solution) -> dict[str, Any]:
    machine, caches, found = solution.topology, solution.caches, solution.prediction
    plan = ShardingPlan(placements(solution), machine.world_size, machine.ranks_per_host, machine.device)
    misses, reads = (
        float((caches.field("unique") * caches.misses(rows)).sum())
        for rows in (caches.hbm_rows, caches.memory_rows)
    )
    stages = {"compute": found.ranks[:, 0], "fetch": found.ranks[:, 5], "ssd": found.ssd_s}
    return {
        **{"plan": plan.to_dict(), "predicted": found.step, "binding": found.slowest()[0]},
        **{"misses": misses, "reads": reads},
        **{name: float(seconds.max()) for name, seconds in stages.items()},
    }


def measurements(
    names: Sequence[str],
    plans: Mapping[str, Mapping[str, Any]],
    turns: Turns,
    known: Sequence[Mapping[str, Any]],
    until: float,
) -> Iterator[dict[str, Any]]:
    """Measure one round, or the rest of one; begin nothing after ``until``."""
    keys = [{"case": name, "by": by} for name in names for by in plans[name]]
    for i in due(keys, known):
        if time.perf_counter() > until:
            break
        case, described = CASES[keys[i]["case"]], plans[keys[i]["case"]][keys[i]["by"]]
        job: Any = job_by_tierstore if "plan" in described else job_by_torchrec
        yield {**keys[i], **on_ranks(case.ranks, _train, job, case, described, turns)}


def _train(job_of: Callable[[Case, Any], Job], case: Case, described: dict[str, Any], turns: Turns) -> Any:
    """Return, per step, seconds of the slowest rank, CPU seconds and rows of all.

    ``loopback``: bytes of the loopback device, dense gradients and TCP's own included; ``bytes_sent``: what a
    rank's collections send on average, 0 where they do not count.
    """
    one_thread()
    job = job_of(case, described)
    try:
        figures = job.train(turns, lambda name, value: _over_ranks(value, name in _SUMMED))
    finally:
        job.close()
    return {**figures, "bytes_sent": round(figures["bytes_sent"] / case.ranks)}


def job_by_tierstore(case: Case, described: Mapping[str, Any]) -> Job:
    """Return a job with the shards and tiers of a plan, whose rows begin as zeros, and are there."""
    torch.manual_seed(0)
    plan = ShardingPlan.from_dict(described["plan"])
    stored = any(shard.ssd_bytes for table in plan.tables for shard in table.shards)
    config, optimizer = TierConfig(ssd="10GiB" if stored else 0), optim.specs.make(case.optimizer, lr=LR)
    if case.ranks == 1:
        tables = [Table(c.name, c.num_embeddings, c.embedding_dim, constant(0.0)) for c in case.configs]
        config = replace(config, **tiers_of_rank(plan.tables, 0, tables, config, optimizer))
        bags: Any = tierstore.EmbeddingBagCollection(case.configs, config=config, optimizer=optimizer)
        model: Any = Model(bags, case.width)
        close = partial(bags.close, commit=False)
    else:
        bags = tierstore.EmbeddingBagCollection(
            case.configs, config=TierConfig(hbm="all"), optimizer=optimizer
        )
        model = DistributedModelParallel(Model(bags, case.width), plan=plan, config=config)
        (bags,), close = model.sharded.values(), model.close
    load_zeros(bags, case.configs)

    def counters() -> dict[str, float]:
        tiers = bags.engine.stats()["tiers"]
        return _counters() | {
            "fetch": planning_seconds(bags),
            "misses": tiers["hbm"]["rows"] - tiers["hbm"]["row_hits"],
            "reads": tiers["ssd"]["row_hits"] if "ssd" in tiers else 0,
            "bytes_sent": bags.env.traffic.bytes_sent if case.ranks > 1 else 0,
        }

    return Job.prefetched(model, Batches(case, _rank()), counters, close)


def job_by_torchrec(case: Case, described: Mapping[str, Any]) -> Job:
    """Return a job with torchrec's own collections, all in memory, cut and placed as its plan says."""
    warnings.simplefilter("ignore")
    bags = sharded_by_torchrec(case.configs, cuts_for_cpu(described["placed"]), LR)
    model = Model(lambda features: bags(features).wait(), case.width)
    model.over = DistributedDataParallel(model.over)  # type: ignore[assignment]
    drawn = Batches(case, _rank(), as_theirs)
    return Job(model, drawn, iter(drawn), lambda: _counters() | {"bytes_sent": 0.0})


def dense_seconds_of(case: Case) -> float:
    """Return what the planner is told of the dense part, the exchange of gradients included."""
    one_thread()
    if case.ranks == 1:
        return dense_seconds(case, lambda over: over, time.thread_time)
    return _over_ranks(dense_seconds(case, DistributedDataParallel, time.process_time), False)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _counters() -> dict[str, float]:
    devices = psutil.net_io_counters(pernic=True)
    passed = sum(found.bytes_sent for name, found in devices.items() if name.startswith("lo"))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {"compute": time.thread_time(), "cpu": time.process_time(), "loopback": passed / ranks}


def _over_ranks(value: float, summed: bool) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total, dist.ReduceOp.SUM if summed else dist.ReduceOp.MAX)
    return float(total)


def compared(
    plans: Mapping[str, Mapping[str, Any]], records: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """By case and way: medians per step of all rounds, and our seconds over theirs, by round."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for name, ways in plans.items():
        found = {by: [r for r in records if (r["case"], r["by"]) == (name, by)] for by in ways}
        if found[OURS]:
            result[name] = {by: _figures(same, found[OURS]) for by, same in found.items() if same}
    return result


def _figures(same: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians of the rounds that no other process disturbed, of all where there are none."""
    rounds = list(zip(ours, same, strict=False))
    calm = [both for both in rounds if all(record["others"] < LOUD for record in both)] or rounds
    ratios = [own["step"] / other["step"] for own, other in calm]
    counted = [name for name, value in same[0].items() if isinstance(value, int | float)]
    return {
        **{name: float(np.median([other[name] for _, other in calm])) for name in counted},
        "steps": [other["step"] for _, other in calm],
        "ratio": float(np.median(ratios)),
        "ratio_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "rounds": len(ratios),
        "disturbed": len(rounds) - len(calm),
    }


def summary(
    cases: Mapping[str, Mapping[str, Any]],
    plans: Mapping[str, Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """Return how well our plans' steps, and the rows that they miss and read, are predicted."""
    from scipy.stats import kendalltau

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


def _print(cases: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]]) -> None:
    print(
        f"{'case':<18} {'plan':<24} {'step, of processes':>27} {'predicted':>9} {'misses':>13} {'reads':>13}"
        f" {'cpu':>7} {'bytes sent':>11} {'loopback':>11}  ours over it (quartiles)"
    )
    for name, ways in cases.items():
        for by, found in ways.items():
            plan, steps = plans[name][by], [1e3 * seconds for seconds in found["steps"]]
            rows = (f"{plan[n]:,.0f}/{found[n]:,.0f}" if n in plan else "-" for n in ("misses", "reads"))
            low, high = found["ratio_quartiles"]
            print(
                f"{name:<18} {by:<24} {1e3 * found['step']:>7.1f} ms ({min(steps):.1f} to {max(steps):.1f})"
                f" {1e3 * plan.get('predicted', 0.0):>9.1f} {next(rows):>13} {next(rows):>13}"
                f" {1e3 * found['cpu']:>7.1f} {found['bytes_sent']:>11,.0f} {found['loopback']:>11,.0f}"
                + ("" if by == OURS else f"  {found['ratio']:.2f} ({low:.2f} to {high:.2f})")
            )
            for note in plan.get("notes", ()):
                print(f"{'':<18} {by:<24} {note}")
    print("misses, reads: predicted/measured")


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
