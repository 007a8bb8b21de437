"""``tierstore bench plan-step``: trains a model under plans of many budgets; predicted against measured.

Every plan is trained with in a process of its own, in turns with the measurements of ``tierstore bench
device`` (other tables, and the drive alone), each in a process of its own, too: so that predictions are made
of what the machine could do in that very stretch of time. What is predicted is never used to fit anything.
Miss curves come from a recorded part of the data that training does not see. Turns that other processes
disturb are repeated. With ``--json`` a later command adds to what earlier ones measured; figures are medians
of all.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.config import parse_bytes
from tierstore.errors import ConfigError
from tierstore.result_file import JsonFile

from . import device
from ._neighbours import LOUD
from ._rounds import chosen, due, in_a_process, read_records
from ._runtime_costs import DIMS, KINDS, Sample, alone, fitted
from ._trained_plan import Budget, Data, Turns, measured_plan, planned, planner_for

SUMMARY = "predicted against measured steps of real training, under plans of many budgets"

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
# Plans are made with the assumed rates of a CPU, so that they are the same in every run; what they take is
# predicted by the rates that were measured beside them.
_PLANNED_BY = {"device": "cpu", "hbm_per_rank": 1, "host_memory_per_host": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=1024, help="examples per step (default: 1024)")
    parser.add_argument("--rounds", type=int, default=1, help="times that all is measured (default: 1)")
    parser.add_argument("--plans", default="", help="which plans, by number: 0-3 or 2,5 (default: all)")
    parser.add_argument("--warm", type=int, default=120, help="steps before the first turn (default: 120)")
    parser.add_argument("--turns", type=int, default=8, help="turns of a plan and round (default: 8)")
    parser.add_argument("--steps", type=int, default=24, help="steps of a turn (default: 24)")
    parser.add_argument(
        "--cost-steps", type=int, default=60, help="batches of a kind, for costs (default: 60)"
    )
    parser.add_argument("--file-size", default="512MiB", help="of the file that is read (default: 512MiB)")
    parser.add_argument(
        "--dir", type=Path, help="folder on the drive to measure (default: the temporary one)"
    )
    parser.add_argument("--probe", type=float, default=0.1, help="seconds of a size of reads (default: 0.1)")
    parser.add_argument("--no-measure", action="store_true", help="only compare what --json has")
    parser.add_argument(
        "--seconds", type=float, default=3600, help="begin nothing later; the next command goes on"
    )
    parser.add_argument("--json", type=Path, help="add to the measurements there, or begin them")


def run(args: argparse.Namespace) -> int:
    target = JsonFile(args.json) if args.json else None
    known = read_records(args.json)
    data = Data(TABLES, args.batch_size)
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


def measurements(
    args: argparse.Namespace, stats: dict[str, Any], known: Sequence[dict[str, Any]], until: float
) -> Iterator[dict[str, Any]]:
    """One round: plans, engine costs and the drive in turns, as evenly mixed as may be; of a round that a
    command before left unfinished, in ``known``, only the rest. Nothing begins after ``until``."""
    turns = Turns(args.warm, args.turns, args.steps)
    names = [list(BUDGETS)[i] for i in chosen(args.plans, len(BUDGETS))]
    plans = [
        ({"plan": name}, measured_plan, (TABLES, args.batch_size, BUDGETS[name], _PLANNED_BY, stats, turns))
        for name in names
    ]
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=args.dir) as folder:
        costs = [
            ({"costs": f"{mode}{dims}"}, alone, (mode, dims, args.cost_steps, folder))
            for mode in KINDS
            for dims in DIMS
        ]
        parts: Sequence[Sequence[tuple[dict[str, Any], Callable[..., Any], tuple[Any, ...]]]] = (plans, costs)
        mixed = [((i + 0.5) / len(part), *task) for part in parts for i, task in enumerate(part)]
        mixed.sort(key=lambda task: task[0])
        drive = device.Device(Path(folder) / "device", parse_bytes(args.file_size, "--file-size"), args.probe)
        yield {"writes": drive.writes(), "copies": device.memory_bandwidth(args.probe)}
        for i in due([key for _, key, *_ in mixed], known):
            _, key, work, arguments = mixed[i]
            if time.perf_counter() > until:
                break
            yield {"drive": drive.read_curve(args.probe)}
            yield {**key, **in_a_process(work, *arguments)}


def topology_of(records: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The machine by the median of what was measured of it; what ``bench device`` would write."""
    drives = [record["drive"] for record in records if "drive" in record]
    samples: dict[tuple[Any, ...], list[Sample]] = {}
    for record in records:
        for i, sample in enumerate(record.get("samples", ())):
            samples.setdefault((record["costs"], i), []).append(Sample.of(sample))
    if not drives or {key[0] for key in samples} != {f"{mode}{dims}" for mode in KINDS for dims in DIMS}:
        raise ConfigError("costs of the machine are missing: measure a whole round")
    rates = np.median([[rate for _, rate in curve] for curve in drives], axis=0).tolist()
    sizes = [size for size, _ in drives[0]]
    result = {
        **_PLANNED_BY,
        "ssd_read_curve": [list(point) for point in zip(sizes, rates, strict=True)],
        "ssd_bw": max(size * rate for size, rate in zip(sizes, rates, strict=True)),
        "ssd_write_bw": float(np.median([record["writes"] for record in records if "writes" in record])),
        "host_memory_bw": float(np.median([record["copies"] for record in records if "copies" in record])),
    }
    result |= fitted([Sample.median(same) for same in samples.values()])
    return result, {"step_s": result.pop("step_s")}


@dataclass
class Run:
    """One plan: seconds per step; seconds that the training thread computes (processor time), that the other
    one fetches (waits left out), that the drives are predicted to take, that all threads have of the
    processors. ``misses``: rows per step that were not in hbm, ``reads``: of them read from the store.
    ``slowest``, ``fastest``: processes' medians."""

    name: str
    binding: str
    predicted: float
    measured: float
    fastest: float
    slowest: float
    misses: float
    predicted_misses: float
    reads: float
    predicted_reads: float
    compute: float
    fetch: float
    process: float
    predicted_compute: float
    predicted_fetch: float
    predicted_ssd: float

    @property
    def miss_ratio(self) -> float:
        return self.predicted_misses / self.misses if self.misses else 1.0


def compared(
    records: Sequence[dict[str, Any]],
    data: Data,
    topology: dict[str, Any],
    stats: dict[str, Any],
    step_s: float,
) -> list[Run]:
    """The plans that were measured, in the order of :data:`BUDGETS`."""
    runs = []
    dense = float(np.median([record["dense"] for record in records if "plan" in record] or [0.0])) + step_s
    for name, budget in BUDGETS.items():
        same = [record for record in records if record.get("plan") == name]
        same = [record for record in same if record["calm"]] or same
        if not same:
            continue
        solution = planned(data, budget, _PLANNED_BY, stats)
        rows = {key: np.array(same[-1][key]) for key in ("hbm_rows", "memory_rows")}  # as was trained with
        solution = replace(solution, caches=replace(solution.caches, **rows))
        solution = planner_for(data, budget, topology, dense).priced(solution)
        caches, prediction = solution.caches, solution.prediction
        unique = caches.field("unique")
        middle = {
            name: float(np.median([record[name] for record in same]))
            for name in ("misses", "reads", "compute", "fetch", "process")
        }
        steps = [record["step"] for record in same]
        runs.append(
            Run(
                name=name,
                binding=prediction.slowest()[0],
                predicted=prediction.step,
                measured=float(np.median(steps)),
                fastest=min(steps),
                slowest=max(steps),
                predicted_misses=float((unique * caches.misses(caches.hbm_rows)).sum()),
                predicted_reads=float((unique * caches.reads()).sum()),
                predicted_compute=float(prediction.ranks[0, 0]),
                predicted_fetch=float(prediction.ranks[0, 5]),
                predicted_ssd=float(prediction.hosts[0, 0]),
                **middle,
            )
        )
    return runs


def summary(runs: Sequence[Run], records: Sequence[dict[str, Any]]) -> dict[str, float]:
    from scipy.stats import kendalltau

    predicted, measured = [run.predicted for run in runs], [run.measured for run in runs]
    errors = np.abs(np.array(predicted) / measured - 1)
    wrong = [abs(run.miss_ratio - 1) for run in runs if run.misses > 10]
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
    print(
        f"{'plan':<18} {'predicted':>9} {'measured, of processes':>25} {'ratio':>5} {'compute':>11} "
        f"{'fetch':>11} {'ssd':>5} {'cpu':>5} {'misses':>13} {'reads':>13}  set by"
    )
    for run in runs:
        ms = {key: f"{value * 1e3:.2f}" for key, value in vars(run).items() if isinstance(value, float)}
        pairs = {
            "compute": f"{ms['predicted_compute']}/{ms['compute']}",
            "fetch": f"{ms['predicted_fetch']}/{ms['fetch']}",
            "misses": f"{run.predicted_misses:,.0f}/{run.misses:,.0f}",
            "reads": f"{run.predicted_reads:,.0f}/{run.reads:,.0f}",
        }
        print(
            f"{run.name:<18} {ms['predicted']:>6} ms {ms['measured']:>7} ms"
            f" ({ms['fastest']:>5} to {ms['slowest']:>5}) {run.predicted / run.measured:>5.2f} "
            f"{pairs['compute']:>11} {pairs['fetch']:>11} {ms['predicted_ssd']:>5} {ms['process']:>5} "
            f"{pairs['misses']:>13} {pairs['reads']:>13}  {run.binding}"
        )
    print("compute, fetch, misses, reads: predicted/measured; ssd: predicted; cpu: measured, of all threads")
