"""Train a model under plans of many budgets, and compare predicted with measured steps.

Every plan is trained with in a process of its own, in turns with the measurements of ``tierstore bench
device`` (other tables, and the drive alone), each in a process of its own, too: so that predictions are made
of what the machine could do in that very stretch of time. What is predicted is never used to fit anything.
Miss curves come from a recorded part of the data that training does not see. Turns that other processes
disturb are repeated. With ``--json`` a later command adds to what earlier ones measured; figures are medians
of all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tierstore
from tierstore import TierConfig
from tierstore.cache.engine import Table, set_num_threads
from tierstore.config import parse_bytes
from tierstore.errors import ConfigError
from tierstore.initializers import constant
from tierstore.optim import RowWiseAdagrad
from tierstore.planner import EmbeddingShardingPlanner, Workload
from tierstore.planner.planner import placements
from tierstore.planner.solver import Solution, priced
from tierstore.planner.tables import prepared, spec_of_config
from tierstore.result_file import JsonFile
from tierstore.sharding.planning import tiers_of_rank

from .. import device
from .._neighbours import LOUD
from .._rounds import chosen, due, in_a_process, read_records
from .._runtime_costs import DIMS, KINDS, Sample, alone, fitted, load_zeros, planning_seconds
from . import main
from .training import DEPTH, LR, WINDOW, Batches, Budget, Data, Job, Model, Turns, dense_seconds, machine_for

BUDGETS = {
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
TABLES = [(300_000, 32, 1.0), (120_000, 32, 0.8), (240_000, 64, 1.05), (100_000, 64, 0.7)]
_BAG, _SLOT = 8, 88
_STAGES = ("misses", "reads", "compute", "fetch", "process")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=1024, help="examples per step (default: 1024)")
    parser.add_argument("--rounds", type=int, default=1, help="times that all is measured (default: 1)")
    parser.add_argument("--plans", default="", help="which plans, by number: 0-3 or 2,5 (default: all)")
    parser.add_argument("--warm", type=int, default=120, help="steps before the first turn (default: 120)")
    parser.add_argument("--turns", type=int, default=8, help="turns of a plan and round (default: 8)")
    parser.add_argument("--steps", type=int, default=24, help="steps of a turn (default: 24)")
    parser.add_argument("--cost-steps", type=int, default=60, help="batches of a kind (default: 60)")
    parser.add_argument("--file-size", default="512MiB", help="of the file that is read (default: 512MiB)")
    parser.add_argument("--dir", type=Path, help="folder on the drive to measure")
    parser.add_argument("--probe", type=float, default=0.1, help="seconds of a size of reads (default: 0.1)")
    parser.add_argument("--no-measure", action="store_true", help="only compare what --json has")
    parser.add_argument("--seconds", type=float, default=3600, help="begin nothing later; go on another time")
    parser.add_argument("--json", type=Path, help="add to the measurements there, or begin them")


def run(args: argparse.Namespace) -> int:
    target = JsonFile(args.json) if args.json else None
    known = read_records(args.json)
    data = data_of(args.batch_size)
    stats = known.get("stats") or data.stats()
    records: list[dict[str, Any]] = list(known.get("records", []))
    until = time.perf_counter() + args.seconds
    for _ in range(0 if args.no_measure else args.rounds):
        for record in measurements(args, stats, tuple(records), until):
            records.append(record)
            if target is not None:
                target.write({"stats": stats, "records": records})
    topology, notes = topology_of(records)
    runs = compared(records, data, topology, stats, notes["step_s"])
    if not runs:
        raise ConfigError("nothing was measured yet: leave --no-measure out")
    _print(runs)
    figures = summary(runs, records)
    for key, value in figures.items():
        print(f"{key:<32} {value:>8.3f}")
    if target is not None:
        topology |= {"measured": notes}
        rows = [vars(run) for run in runs]
        target.write({**figures, "runs": rows, "topology": topology, "stats": stats, "records": records})
    return 0


def data_of(batch_size: int) -> Data:
    return Data(TABLES, [_BAG] * len(TABLES), batch_size)


def measurements(
    args: argparse.Namespace, stats: dict[str, Any], known: Sequence[dict[str, Any]], until: float
) -> Iterator[dict[str, Any]]:
    """Measure one round: plans, engine costs and the drive in turns, as evenly mixed as may be.

    Of a round that a command before left unfinished, in ``known``, only the rest is measured. Nothing begins
    after ``until``.
    """
    turns = Turns(args.warm, args.turns, args.steps)
    names = [list(BUDGETS)[i] for i in chosen(args.plans, len(BUDGETS))]
    Task = tuple[dict[str, Any], Callable[..., Any], tuple[Any, ...]]
    plans: list[Task] = [
        ({"plan": name}, measured_plan, (args.batch_size, name, stats, turns)) for name in names
    ]
    costs: list[Task] = [
        ({"costs": f"{mode}{dims}"}, alone, (mode, dims, args.cost_steps)) for mode in KINDS for dims in DIMS
    ]
    mixed = [((i + 0.5) / len(part), *task) for part in (plans, costs) for i, task in enumerate(part)]
    mixed.sort(key=lambda task: task[0])
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=args.dir) as folder:
        drive = device.Device(Path(folder) / "device", parse_bytes(args.file_size, "--file-size"), args.probe)
        yield {"writes": drive.writes()}
        for i in due([key for _, key, *_ in mixed], known):
            _, key, work, arguments = mixed[i]
            if time.perf_counter() > until:
                break
            yield {"drive": drive.read_curve(args.probe)}
            yield {**key, **in_a_process(work, *arguments)}


def topology_of(records: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the machine by the median of what was measured of it: what ``bench device`` would write."""
    drives = [record["drive"] for record in records if "drive" in record]
    samples: dict[tuple[Any, ...], list[Sample]] = {}
    for record in records:
        for i, sample in enumerate(record.get("samples", ())):
            samples.setdefault((record["costs"], i), []).append(Sample(**sample))
    if not drives or {key[0] for key in samples} != {f"{mode}{dims}" for mode in KINDS for dims in DIMS}:
        raise ConfigError("costs of the machine are missing: measure a whole round")
    rates = np.median([[rate for _, rate in curve] for curve in drives], axis=0).tolist()
    sizes = [size for size, _ in drives[0]]
    result = {
        **{"device": "cpu", "hbm_per_rank": 1, "host_memory_per_host": 1},
        "ssd_read_curve": [list(point) for point in zip(sizes, rates, strict=True)],
        "ssd_bw": max(size * rate for size, rate in zip(sizes, rates, strict=True)),
        "ssd_write_bw": float(np.median([record["writes"] for record in records if "writes" in record])),
    }
    result |= fitted([Sample.median(same) for same in samples.values()])
    return result, {"step_s": result.pop("step_s")}


@dataclass
class Run:
    """One plan: seconds per step, and rows per step that were not in hbm, that the store read.

    ``compute``: of the training thread's processor; ``fetch``: of the other thread, without waits;
    ``process``: of all threads' processors. ``slowest``, ``fastest``: processes' medians.
    """

    name: str
    binding: str
    predicted: float
    measured: float
    fastest: float
    slowest: float
    misses: float
    reads: float
    compute: float
    fetch: float
    process: float
    predicted_misses: float
    predicted_reads: float
    predicted_compute: float
    predicted_fetch: float
    predicted_ssd: float


def compared(
    records: Sequence[dict[str, Any]],
    data: Data,
    topology: dict[str, Any],
    stats: dict[str, Any],
    step_s: float,
) -> list[Run]:
    """Return the plans that were measured, in the order of :data:`BUDGETS`."""
    runs = []
    dense = float(np.median([record["dense"] for record in records if "plan" in record] or [0.0])) + step_s
    for name, budget in BUDGETS.items():
        same = [record for record in records if record.get("plan") == name]
        same = [record for record in same if record["calm"]] or same
        if not same:
            continue
        solution = planned(data, budget, stats)
        rows = {key: np.array(same[-1][key]) for key in ("hbm_rows", "memory_rows")}  # as was trained with
        solution = replace(solution, caches=replace(solution.caches, **rows))
        tables = list(solution.tables)
        solution = priced(planner_for(data, budget, topology, dense).problem(tables), solution)
        caches, prediction = solution.caches, solution.prediction
        unique, steps = caches.field("unique"), [record["step"] for record in same]
        runs.append(
            Run(
                name=name,
                binding=prediction.slowest()[0],
                predicted=prediction.step,
                measured=float(np.median(steps)),
                fastest=min(steps),
                slowest=max(steps),
                predicted_misses=float((unique * caches.misses(caches.hbm_rows)).sum()),
                predicted_reads=float((unique * caches.misses(caches.memory_rows)).sum()),
                predicted_compute=float(prediction.ranks[0, 0]),
                predicted_fetch=float(prediction.ranks[0, 5]),
                predicted_ssd=float(prediction.ssd_s[0]),
                **{name: float(np.median([record[name] for record in same])) for name in _STAGES},
            )
        )
    return runs


def summary(runs: Sequence[Run], records: Sequence[dict[str, Any]]) -> dict[str, float]:
    from scipy.stats import kendalltau

    predicted, measured = [run.predicted for run in runs], [run.measured for run in runs]
    errors = np.abs(np.array(predicted) / measured - 1)
    wrong = [abs(run.predicted_misses / run.misses - 1) for run in runs if run.misses > 10]
    wrong_reads = [abs(run.predicted_reads / run.reads - 1) for run in runs if run.reads > 10]
    others = [record["others"] for record in records if "others" in record]
    return {
        "plans": len(runs),
        "step_error.median": float(np.median(errors)),
        "step_error.worst": float(errors.max()),
        "within_15_percent": int((errors <= 0.15).sum()),
        "kendall_tau": float(kendalltau(predicted, measured).statistic),
        "miss_error.worst": max(wrong, default=0.0),
        "read_error.worst": max(wrong_reads, default=0.0),
        "measured": len(others),
        "disturbed": sum(share >= LOUD for share in others),
    }


def _print(runs: Sequence[Run]) -> None:
    print(f"{'plan':<18} {'predicted':>9} {'measured, of processes':>25} {'ratio':>5} ", end="")
    print(f"{'compute':>11} {'fetch':>11} {'ssd':>5} {'cpu':>5} {'misses':>13} {'reads':>13}  set by")
    for run in runs:
        ms = {key: f"{value * 1e3:.2f}" for key, value in vars(run).items() if isinstance(value, float)}
        compute, fetch = (f"{ms[f'predicted_{name}']}/{ms[name]}" for name in ("compute", "fetch"))
        misses = f"{run.predicted_misses:,.0f}/{run.misses:,.0f}"
        reads = f"{run.predicted_reads:,.0f}/{run.reads:,.0f}"
        print(
            f"{run.name:<18} {ms['predicted']:>6} ms {ms['measured']:>7} ms"
            f" ({ms['fastest']:>5} to {ms['slowest']:>5}) {run.predicted / run.measured:>5.2f} "
            f"{compute:>11} {fetch:>11} {ms['predicted_ssd']:>5} {ms['process']:>5} {misses:>13} {reads:>13}"
            f"  {run.binding}"
        )
    print("compute, fetch, misses, reads: predicted/measured; ssd: predicted; cpu: measured, of all threads")


def planner_for(data: Data, budget: Budget, rates: dict[str, Any], dense: float) -> EmbeddingShardingPlanner:
    """Return a planner for one rank of a machine with those rates, and bytes of memory."""
    specs = [replace(spec_of_config(config), pooling_factor=_BAG) for config in data.configs]
    work = Workload(data.batch_size, dense_seconds=dense, depth=DEPTH, window=WINDOW)
    machine = machine_for(specs, budget, data, _SLOT, rates)
    return EmbeddingShardingPlanner(machine, workload=work, search_seconds=0.5)


def planned(data: Data, budget: Budget, stats: dict[str, Any]) -> Solution:
    """Return the plan by assumed rates, so that it is the same in every run."""
    specs = [replace(spec_of_config(config), pooling_factor=_BAG) for config in data.configs]
    solution = planner_for(data, budget, {}, 0.0).solve(prepared(specs, {}, stats, 1))
    if solution.caches.missing:
        raise ConfigError(f"a plan with {budget} does not fit: {solution.caches.missing}")
    return solution


def measured_plan(batch_size: int, name: str, stats: dict[str, Any], turns: Turns) -> dict[str, Any]:
    """Train with a plan; return what :meth:`Job.train` does, and the rows that the plan gave."""
    torch.set_num_threads(1)
    set_num_threads(1)
    data = data_of(batch_size)
    dense, solution = dense_seconds(data), planned(data, BUDGETS[name], stats)
    bags = _collection(data, solution)
    caches = solution.caches

    def counters() -> dict[str, float]:
        tiers = bags.engine.stats()["tiers"]
        return {
            "compute": time.thread_time(),
            "process": time.process_time(),
            "fetch": planning_seconds(bags),
            "misses": tiers["hbm"]["rows"] - tiers["hbm"]["row_hits"],
            "reads": tiers["ssd"]["row_hits"] if "ssd" in tiers else 0,
        }

    job = Job.prefetched(Model(bags, data.width), Batches(data), counters, lambda: bags.close(commit=False))
    try:
        figures = job.train(turns)
    finally:
        job.close()
    rows = {"hbm_rows": caches.hbm_rows.tolist(), "memory_rows": caches.memory_rows.tolist()}
    return {"dense": dense, **rows, **figures}


def _collection(data: Data, solution: Solution) -> Any:
    """Return the tables with the plan's tiers; all rows begin as zeros, and are there."""
    optimizer = RowWiseAdagrad(lr=LR)
    tables = [Table(c.name, c.num_embeddings, c.embedding_dim, constant(0.0)) for c in data.configs]
    config = TierConfig(ssd="10GiB" if solution.topology.ssd_per_host else 0)
    budgets = tiers_of_rank(placements(solution), 0, tables, config, optimizer)
    config = replace(config, **budgets)
    bags = tierstore.EmbeddingBagCollection(data.configs, config=config, optimizer=optimizer)
    load_zeros(bags, data.configs)
    return bags


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
