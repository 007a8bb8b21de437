"""Train with both planners' plans, ours and torchrec's, on ranks of this machine.

Both planners are told the same tables, memories and rates. Their plans are carried out by tierstore's
sharded collections, and torchrec's also by its own where all is in memory (its kernels for CPUs have no
tiers). Every training has new processes, plans take turns, and rounds may be split: a command adds to what
earlier ones measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tierstore
from tierstore import TierConfig
from tierstore.cache.engine import set_num_threads
from tierstore.errors import ConfigError
from tierstore.optim import SGD
from tierstore.placement import ShardingPlan
from tierstore.planner import EmbeddingShardingPlanner, TableSpec, Topology, Workload
from tierstore.planner.costs import slot_bytes
from tierstore.planner.planner import placements
from tierstore.planner.solver import Solution
from tierstore.planner.tables import prepared, spec_of_config
from tierstore.result_file import JsonFile
from tierstore.sharding import DistributedModelParallel

from .._neighbours import LOUD
from .._ranks import on_ranks
from .._rounds import chosen, due, read_records
from .._runtime_costs import load_zeros
from .._torchrec import as_theirs, sharded_by_torchrec
from . import main
from .their_plan import as_our_plan, cuts_for_cpu, their_plan, with_our_tiers
from .training import (
    DEPTH,
    LR,
    WINDOW,
    Batches,
    Budget,
    Data,
    Job,
    Model,
    Tables,
    Turns,
    dense_seconds,
    machine_for,
)

RANKS = 2
OURS, THEIRS, THEIR_CUTS, TORCHREC = "ours", "torchrec's", "its cuts, our tiers", "torchrec's, by torchrec"
_SIZES = ("hosts", "ranks_per_host", "hbm_per_rank", "host_memory_per_host", "ssd_per_host", "device")


@dataclass(frozen=True)
class Pair:
    """A model and a machine. ``bags``: ids of a bag, by table; ``budget``: shares of the tables' bytes in the
    memories of all ranks together."""

    tables: Tables
    bags: tuple[int, ...]
    budget: Budget
    batch_size: int = 512

    def data(self) -> Data:
        return Data(self.tables, self.bags, self.batch_size, RANKS)

    def specs(self) -> list[TableSpec]:
        return [
            replace(spec_of_config(config, "bags"), pooling_factor=float(bag), optimizer="sgd")
            for config, bag in zip(self.data().configs, self.bags, strict=True)
        ]

    def machine(self, rates: Mapping[str, Any]) -> Topology:
        """Return the host. ``rates``: of a Topology, all but its sizes."""
        return machine_for(self.specs(), self.budget, self.data(), slot_bytes(0), rates)


_MIXED = [
    *((300_000, 32, 1.0), (120_000, 64, 0.8), (60_000, 32, 1.1), (200_000, 16, 0.9), (30_000, 64, 1.0)),
    *((8_000, 32, 0.7), (2_000, 16, 1.0), (100_000, 32, 1.05), (500, 64, 0.5), (15_000, 16, 0.9)),
]
_MIXED_BAGS = (20, 4, 1, 8, 12, 2, 30, 6, 1, 3)
PAIRS = {
    "even, in memory": Pair([(50_000, 32, 0.9)] * 12, (8,) * 12, Budget(1.5, 0.0, False)),
    "one giant": Pair(
        [(1_000_000, 64, 1.0), *[(20_000, 32, 0.9)] * 5], (10, 4, 4, 4, 4, 4), Budget(1.3, 0.0, False)
    ),
    "mixed, in memory": Pair(_MIXED, _MIXED_BAGS, Budget(1.5, 0.0, False)),
    "mixed, tight hbm": Pair(_MIXED, _MIXED_BAGS, Budget(0.35, 1.1, False)),
    "needs the ssd": Pair(
        [(300_000, 32, 1.0), (120_000, 32, 0.8), (240_000, 64, 1.05), (100_000, 64, 0.7)],
        (8, 8, 8, 8),
        Budget(0.25, 0.2, True),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pairs", default="", help=f"which, by number below {len(PAIRS)}: 0-2 (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="times that all is measured (default: 1)")
    parser.add_argument("--warm", type=int, default=60, help="steps before the first turn (default: 60)")
    parser.add_argument("--turns", type=int, default=2, help="turns of a plan and round (default: 2)")
    parser.add_argument("--steps", type=int, default=24, help="steps of a turn (default: 24)")
    parser.add_argument(
        "--topology", type=Path, help="rates, as tierstore bench device --ranks 2 writes them"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="begin nothing later; go on another time")
    parser.add_argument("--search-seconds", type=float, default=2.0, help="of our planner (default: 2)")
    parser.add_argument("--json", type=Path, help="add to the measurements there, or begin them")


def run(args: argparse.Namespace) -> int:
    target = JsonFile(args.json) if args.json else None
    known = read_records(args.json)
    names = [list(PAIRS)[i] for i in chosen(args.pairs, len(PAIRS), "--pairs")]
    plans: dict[str, Any] = known.get("plans", {})
    rates = known.get("rates") or _rates(args.topology)
    for name in names:
        if name not in plans:
            dense = on_ranks(RANKS, dense_seconds_of, PAIRS[name].data())
            plans[name] = plans_of(PAIRS[name], rates, args.search_seconds, dense)
    records: list[dict[str, Any]] = known.get("records", [])
    until = time.perf_counter() + args.seconds
    turns = Turns(args.warm, args.turns, args.steps)
    for _ in range(args.rounds):
        for record in measurements(names, plans, turns, tuple(records), until):
            records.append(record)
            if target is not None:
                target.write({"rates": rates, "plans": plans, "records": records})
    figures = compared(plans, records)
    _print(figures, plans)
    if target is not None:
        target.write({"pairs": figures, "rates": rates, "plans": plans, "records": records})
    return 0


def _rates(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--topology {path}: {error}") from error
    known = {item.name for item in fields(Topology) if item.init} - set(_SIZES)
    return {key: value for key, value in values.items() if key in known}


def plans_of(
    pair: Pair, rates: Mapping[str, Any], search_seconds: float, dense: float = 0.0
) -> dict[str, Any]:
    """Return, by name of a way to train, its plan (for torchrec's runtime, sharding types and ranks), notes,
    and the step that our planner predicts. ``dense``: seconds that the rest of the model takes per step."""
    machine = pair.machine(rates)
    work = Workload(pair.batch_size, dense_seconds=dense, depth=DEPTH, window=WINDOW)
    planner = EmbeddingShardingPlanner(
        machine, workload=work, stats=pair.data().stats(), search_seconds=search_seconds
    )
    ours = planner.solve(prepared(pair.specs(), {}, planner.stats, RANKS))
    if ours.caches.missing:
        raise ConfigError(f"the tables do not fit: {ours.caches.missing}")
    result = {OURS: _described(ours)}
    theirs, notes = their_plan(ours.tables, machine, pair.batch_size), []
    if theirs is not None:
        plan, notes = as_our_plan(theirs, ours)
        result[THEIRS] = {"plan": plan.to_dict(), "notes": notes}
    else:
        larger = replace(machine, host_memory_per_host=1 << 40)
        theirs, notes = their_plan(ours.tables, larger, pair.batch_size), ["torchrec has no plan"]
    cuts = None if theirs is None else with_our_tiers(theirs, ours)
    if cuts is not None and any(table.compute_kernel not in ("dense", "fused") for table in theirs.values()):
        result[THEIR_CUTS] = {**_described(cuts), "notes": notes}
    elif cuts is not None and THEIRS in result:
        result[THEIRS]["predicted"] = cuts.prediction.step
        placed = {name: [str(table.sharding_type), table.ranks] for name, table in theirs.items()}
        result[TORCHREC] = {"placed": placed}
    return result


def _described(solution: Solution) -> dict[str, Any]:
    machine = solution.topology
    ranks = machine.world_size, machine.ranks_per_host, machine.device
    plan = ShardingPlan(placements(solution), *ranks).to_dict()
    return {"plan": plan, "predicted": solution.prediction.step, "binding": solution.prediction.slowest()[0]}


def measurements(
    names: Sequence[str],
    plans: Mapping[str, Mapping[str, Any]],
    turns: Turns,
    known: Sequence[Mapping[str, Any]],
    until: float,
) -> Iterator[dict[str, Any]]:
    """One round, or the rest of one; nothing begins after ``until``."""
    keys = [{"pair": name, "by": by} for name in names for by in plans[name]]
    for i in due(keys, known):
        if time.perf_counter() > until:
            break
        described, data = plans[keys[i]["pair"]][keys[i]["by"]], PAIRS[keys[i]["pair"]].data()
        if "plan" in described:
            plan = ShardingPlan.from_dict(described["plan"])
            found = on_ranks(RANKS, trained_by_tierstore, data, plan, turns)
        else:
            found = on_ranks(RANKS, trained_by_torchrec, data, described["placed"], turns)
        yield {**keys[i], **found}


def trained_by_tierstore(data: Data, plan: ShardingPlan, turns: Turns) -> dict[str, Any]:
    """Train with the shards and tiers of a plan; see :func:`_train`."""
    _one_thread()
    return _train(job_by_tierstore(data, plan), turns)


def job_by_tierstore(data: Data, plan: ShardingPlan) -> Job:
    """Return a job whose rows begin as zeros, and are there."""
    torch.manual_seed(0)
    bags = tierstore.EmbeddingBagCollection(data.configs, config=TierConfig(hbm="all"), optimizer=SGD(lr=LR))
    stored = any(shard.ssd_bytes for table in plan.tables for shard in table.shards)
    config = TierConfig(ssd="10GiB" if stored else 0)
    model = DistributedModelParallel(Model(bags, data.width), plan=plan, config=config)
    (sharded,) = model.sharded.values()
    load_zeros(sharded, data.configs)

    def counters() -> dict[str, float]:
        return _counters() | {"bytes_sent": sharded.env.traffic.bytes_sent / dist.get_world_size()}

    return Job.prefetched(model, Batches(data, dist.get_rank()), counters, model.close)


def trained_by_torchrec(
    data: Data, placed: Mapping[str, tuple[str, list[int]]], turns: Turns
) -> dict[str, Any]:
    """Train with torchrec's own collections, all in memory. ``placed``: sharding type and ranks by table."""
    _one_thread()
    warnings.simplefilter("ignore")
    bags = sharded_by_torchrec(data.configs, cuts_for_cpu(placed), LR)
    model = Model(lambda features: bags(features).wait(), data.width)
    model.over = DistributedDataParallel(model.over)  # type: ignore[assignment]
    drawn = Batches(data, dist.get_rank(), convert=as_theirs)
    return _train(Job(model, drawn, iter(drawn), lambda: _counters() | {"bytes_sent": 0.0}), turns)


def dense_seconds_of(data: Data) -> float:
    """Return what the planner is told of the dense part, the exchange of gradients included."""
    _one_thread()
    found = dense_seconds(data, DistributedDataParallel, time.process_time)
    return _over_ranks(found, dist.ReduceOp.MAX)


def _one_thread() -> None:
    torch.set_num_threads(1)
    set_num_threads(1)


def _train(job: Job, turns: Turns) -> dict[str, Any]:
    """Return, per step, seconds of the slowest rank, CPU seconds of all, and bytes of each.

    ``loopback``: of the loopback device, dense gradients and TCP's own included; ``bytes_sent``: what a
    rank's collections send on average, 0 where they do not count.
    """

    def reduced(name: str, value: float) -> float:
        return _over_ranks(value, dist.ReduceOp.SUM if name in ("cpu", "bytes_sent") else dist.ReduceOp.MAX)

    figures = job.train(turns, reduced)
    job.close()
    return {**figures, "bytes_sent": round(figures["bytes_sent"])}


def _counters() -> dict[str, float]:
    devices = psutil.net_io_counters(pernic=True)
    passed = sum(found.bytes_sent for name, found in devices.items() if name.startswith("lo"))
    return {"cpu": time.process_time(), "loopback": passed / dist.get_world_size()}


def _over_ranks(value: float, how: Any) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, how)
    return float(total)


def compared(
    plans: Mapping[str, Mapping[str, Any]], records: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """By pair and way: seconds per step of all rounds, bytes sent, and our seconds over theirs, by round."""
    result: dict[str, dict[str, Any]] = {}
    for name, ways in plans.items():
        found = {
            by: [record for record in records if (record["pair"], record["by"]) == (name, by)] for by in ways
        }
        if not found.get(OURS):
            continue
        result[name] = {by: _figures(same, found[OURS]) for by, same in found.items() if same}
    return result


def _figures(same: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians of the rounds that no other process disturbed, of all where there are none."""
    rounds = list(zip(ours, same, strict=False))
    calm = [both for both in rounds if all(record["others"] < LOUD for record in both)] or rounds
    ratios = [own["step"] / other["step"] for own, other in calm]
    steps = [other["step"] for _, other in calm]
    middle = {name: float(np.median([other[name] for _, other in calm])) for name in ("cpu", "loopback")}
    return {
        "step_s": float(np.median(steps)),
        "steps_s": steps,
        "cpu_s": middle["cpu"],
        "bytes_sent": same[-1]["bytes_sent"],
        "loopback": middle["loopback"],
        "ratio": float(np.median(ratios)),
        "ratio_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "rounds": len(ratios),
        "disturbed": len(rounds) - len(calm),
    }


def _print(figures: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]]) -> None:
    print(
        f"{'pair':<18} {'plan':<24} {'step, of processes':>27} {'predicted':>9} {'cpu':>8} {'bytes sent':>11}"
        f" {'loopback':>11}  ours over it (quartiles)"
    )
    for name, ways in figures.items():
        for by, found in ways.items():
            steps = [1e3 * seconds for seconds in found["steps_s"]]
            predicted = plans[name][by].get("predicted")
            shown = f"{1e3 * predicted:.1f}" if predicted else "-"
            low, high = found["ratio_quartiles"]
            ratio = "" if by == OURS else f"{found['ratio']:.2f} ({low:.2f} to {high:.2f})"
            print(
                f"{name:<18} {by:<24} {1e3 * found['step_s']:>7.1f} ms ({min(steps):.1f} to {max(steps):.1f})"
                f" {shown:>9} {1e3 * found['cpu_s']:>8.1f} {found['bytes_sent'] or '-':>11}"
                f" {found['loopback'] or '-':>11,.0f}  {ratio}"
            )
            for note in plans[name][by].get("notes", ()):
                print(f"{'':<18} {by:<24} {note}")


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
