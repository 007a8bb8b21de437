"""``tierstore bench plan-vs-torchrec --train``: both planners' plans trained with, on ranks of this machine.

Both planners are told the same tables, memories and rates. Their plans are carried out by tierstore's
sharded collections, and torchrec's also by its own where all is in memory (its kernels for CPUs have no
tiers). Every training has new processes, plans take turns, and rounds may be split: a command adds to what
earlier ones measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.errors import ConfigError
from tierstore.placement import ShardingPlan
from tierstore.planner import EmbeddingShardingPlanner, TableSpec, Topology, Workload
from tierstore.planner.costs import (
    INDEX_BYTES_PER_ROW,
    POLICY_BYTES_PER_SLOT,
    POLICY_FIXED_BYTES,
    POLICY_FIXED_SLOTS,
    RANK_BUFFERS,
    TIER_BYTES_PER_SLOT,
)
from tierstore.planner.planner import Solution, placements
from tierstore.planner.tables import prepared, row_bytes, spec_of_config
from tierstore.result_file import JsonFile

from ._neighbours import LOUD
from ._ranks import on_ranks
from ._rounds import chosen, due, read_records
from ._their_plan import as_our_plan, their_plan, with_our_tiers
from ._trained_plan import DEPTH, WINDOW, Budget, Tables, Turns
from ._trained_ranks import Parts, dense_seconds_of, trained_by_tierstore, trained_by_torchrec

RANKS = 2
OPTIMIZER = "sgd"
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

    def data(self) -> Parts:
        return Parts(self.tables, self.bags, self.batch_size, RANKS)

    def specs(self) -> list[TableSpec]:
        return [
            replace(spec_of_config(config, "bags"), pooling_factor=float(bag), optimizer=OPTIMIZER)
            for config, bag in zip(self.data().configs, self.bags, strict=True)
        ]

    def machine(self, rates: Mapping[str, Any]) -> Topology:
        """``rates``: of a Topology, all but its sizes."""
        specs = self.specs()
        slots = [row_bytes(spec.embedding_dim, OPTIMIZER) for spec in specs]
        beside = TIER_BYTES_PER_SLOT + POLICY_BYTES_PER_SLOT
        total = sum(spec.rows * (slot + beside) for spec, slot in zip(specs, slots, strict=True))
        examples = self.batch_size * RANKS
        buffers = int(sum(examples * (20 * s.pooling_factor + 12 * s.embedding_dim) for s in specs))
        buffers += len(set(slots)) * POLICY_FIXED_SLOTS * POLICY_FIXED_BYTES
        stored = sum(spec.rows for spec in specs) * INDEX_BYTES_PER_ROW + RANK_BUFFERS * RANKS
        return Topology(
            1,
            RANKS,
            int(self.budget.hbm * total / RANKS) + buffers,
            int(self.budget.uvm * total) + buffers * RANKS + (stored if self.budget.ssd else 0),
            int(20 * total) if self.budget.ssd else 0,
            device="cpu",
            **rates,
        )


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
    group = parser.add_argument_group("with --train")
    group.add_argument("--pairs", default="", help=f"which, by number below {len(PAIRS)}: 0-2 (default: all)")
    group.add_argument("--rounds", type=int, default=1, help="times that all is measured (default: 1)")
    group.add_argument("--warm", type=int, default=60, help="steps before the first turn (default: 60)")
    group.add_argument("--turns", type=int, default=2, help="turns of a plan and round (default: 2)")
    group.add_argument("--steps", type=int, default=24, help="steps of a turn (default: 24)")
    group.add_argument("--topology", type=Path, help="rates, as tierstore bench device --ranks 2 writes them")
    group.add_argument("--seconds", type=float, default=3600, help="begin nothing later; go on another time")


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
    pair: Pair, rates: Mapping[str, Any], search_seconds: float, dense_seconds: float = 0.0
) -> dict[str, Any]:
    """By name of a way to train: its plan (or, for torchrec's runtime, sharding types and ranks), the step
    that our planner predicts, and notes. ``dense_seconds``: what the rest of the model takes per step."""
    machine = pair.machine(rates)
    work = Workload(pair.batch_size, dense_seconds=dense_seconds, depth=DEPTH, window=WINDOW)
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
    """Rounds that other processes disturbed are left out where there are others."""
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
