"""``tierstore bench steady``: training speed once every row of the tables was written and caches are warm.

In a short training most rows have never been written when they are asked for, so that no device is read.
This benchmark writes and commits all rows first, and trains until the misses, requests and writes of a step
stay the same, also while the store compacts. Losses of training with tiers must equal the losses of training
in memory, bit for bit, unless the store holds rows in fewer bytes than float32.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from tierstore.config import format_bytes
from tierstore.errors import ConfigError
from tierstore.result_file import JsonFile, machine

from ._training_arguments import add_dtypes, add_training_arguments, load_dataset

if TYPE_CHECKING:
    from ._steady import Trainee, Turn
    from ._systems import Setting, System

SUMMARY = "train tables of which every row is written, in turns with training in memory and fbgemm-gpu"

_MOST_WARM_UP = 4000
_DEVICE_BYTES = 512 << 20
_DEVICE_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_arguments(parser, "synthetic:zipf:0.8", batch_size=2048, dim=64)
    tiers = parser.add_argument_group("tiers")
    tiers.add_argument(
        "--hbm",
        default="1/37",
        metavar="A,B",
        help="bytes, or fractions of the tables', each trained by itself (default: 1/37)",
    )
    tiers.add_argument("--window", default="auto", metavar="N", help="batches known ahead (default: auto)")
    tiers.add_argument(
        "--read-ahead",
        default="auto",
        metavar="SIZE",
        help="bytes beside the budget, or a fraction of the tables', for rows read ahead; 0 for none "
        "(default: auto)",
    )
    add_dtypes(tiers)
    tiers.add_argument(
        "--tiered-threads",
        type=int,
        metavar="N",
        help="threads to compute with where tiers train, which leave a processor to planning and reading "
        "(default: --threads)",
    )
    tiers.add_argument("--store", metavar="DIR", help="folder for the row stores (default: a temporary one)")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--no-fbgemm", action="store_true", help="leave fbgemm-gpu out")
    measuring.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="turns of each system (default: 5)"
    )
    measuring.add_argument(
        "--steps", type=int, default=100, metavar="N", help="steps of a turn (default: 100)"
    )
    measuring.add_argument(
        "--run-in",
        type=int,
        default=200,
        metavar="N",
        help="steps before each turn that do not count (default: 200)",
    )
    measuring.add_argument(
        "--tolerance",
        type=float,
        default=0.02,
        metavar="X",
        help="change of misses, requests and bytes written at which warm-up ends (default: 0.02)",
    )
    measuring.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    import torch

    from ._checks import check_store, use_threads
    from ._steady import Trainee, take_turns, touch_all, warm_up

    threads = torch.get_num_threads() if args.threads is None else args.threads
    tiered_threads = threads if args.tiered_threads is None else args.tiered_threads
    for count in (tiered_threads, threads):  # refused before anything begins
        use_threads(count)
    check_store(args.store)
    out = JsonFile(args.json) if args.json else None
    dataset = load_dataset(args)
    with ExitStack() as stack:
        folder = args.store or stack.enter_context(tempfile.TemporaryDirectory(prefix="tierstore-steady-"))
        systems = _systems(_settings(args, dataset, Path(folder)), stack)
        batches = _draw(dataset, args)
        trainees = [
            Trainee(name, system, batches, ahead, tiered_threads if ahead else threads)
            for name, system in systems.items()
            for ahead in [name.startswith("tiered")]
        ]
        for trainee in trainees:
            stack.callback(trainee.close)
        for trainee in trainees:
            if trainee.name != "fbgemm":  # its rows are in memory from the start
                touch_all(trainee.system)
        span = args.run_in + args.steps
        steady = {t.name: warm_up(t, span, _MOST_WARM_UP, args.tolerance) for t in trainees if t.ahead}
        most = max(trainee.steps for trainee in trainees)
        for trainee in trainees:
            trainee.train(most - trainee.steps)
        take_turns(trainees, args.rounds, args.run_in, args.steps)
        result = _result(args, trainees, steady, _device(Path(folder)))
    _print(result)
    if out:
        out.write(result)
    return _check(result)


def _count(args: argparse.Namespace) -> int:
    """Return the batches of the run."""
    return _MOST_WARM_UP + args.rounds * (args.run_in + args.steps) + args.steps


def _draw(dataset: Any, args: argparse.Namespace) -> list[Any]:
    """Return all batches of the run: they are drawn before any clock starts."""
    from ._steady import say

    count = _count(args)
    say(f"drawing {count} batches of {args.batch_size} examples")
    per_epoch = dataset.num_train and -(-dataset.num_train // args.batch_size)
    epochs = -(-count // per_epoch) if per_epoch else 1
    return list(islice(dataset.train(args.batch_size, epochs=epochs), count))


def _settings(args: argparse.Namespace, dataset: Any, folder: Path) -> dict[str, Setting]:
    """Return the settings of the systems, by name. Raises ConfigError for options that cannot be, and for
    tables or batches that this process has no memory for."""
    from ._checks import check_batches
    from ._systems import Setting, check_in_memory, check_setting, table_configs, tier_bytes

    tables = table_configs(dataset, args.dim)
    check_in_memory(tables)
    options = "--batch-size, --rounds, --run-in, --steps"
    check_batches(dataset, args.batch_size, _count(args), options)
    window = args.window
    if window != "auto" and not window.isdecimal():
        raise ConfigError(f"--window is a number of batches or auto, not {window!r}")
    window = window if window == "auto" else int(window)
    read_ahead = tier_bytes(args.read_ahead, tables, "--read-ahead")
    setting = Setting(tables, dataset.dense_dim, args.lr, args.seed, 0, window=window, read_ahead=read_ahead)
    settings = {name: setting for name in ["in-memory", "fbgemm"][: 1 if args.no_fbgemm else 2]}
    given = [(hbm, dtype) for hbm in args.hbm.split(",") for dtype in args.ssd_dtype.split(",")]
    for number, (hbm, dtype) in enumerate(given):
        settings[f"tiered {hbm}" + (f" {dtype}" if dtype != "fp32" else "")] = replace(
            setting,
            hbm=tier_bytes(hbm, tables),
            path=str(folder / str(number)),
            ssd_dtype=dtype,
            state_dtype=args.state_dtype,
        )
    for name, own in settings.items():
        if name.startswith("tiered"):
            check_setting(own)
    return settings


def _systems(settings: dict[str, Setting], stack: ExitStack) -> dict[str, System]:
    """Open the systems, until ``stack`` closes; first those that may refuse their setting."""
    from ._systems import SYSTEMS

    opened = {}
    for name in sorted(settings, key=lambda name: not name.startswith("tiered")):
        opened[name] = SYSTEMS[name.split()[0]](settings[name])
        stack.callback(opened[name].close)
    return {name: opened[name] for name in settings}


def _device(folder: Path) -> dict[str, float]:
    """Measure the device of ``folder``: random reads of 4 KiB per second, and bytes per second of 64 KiB."""
    from ._drive import Device

    path = folder / "device"
    try:
        device = Device(path, _DEVICE_BYTES, _DEVICE_SECONDS)
        device.writes()
        curve = dict(device.read_curve(_DEVICE_SECONDS))
    finally:
        path.unlink(missing_ok=True)
    return {
        "requests_per_s": curve[min(curve)],
        "bytes_per_s": max(size * rate for size, rate in curve.items()),
    }


def _result(
    args: argparse.Namespace, trainees: Sequence[Trainee], steady: dict[str, bool], device: dict[str, float]
) -> dict[str, Any]:
    by_name = {trainee.name: trainee for trainee in trainees}
    memory = by_name["in-memory"]
    figures: dict[str, Any] = {name: _figures(trainee.turns) for name, trainee in by_name.items()}
    for name, trainee in by_name.items():
        figures[name]["threads"] = trainee.threads
        if trainee.ahead:
            figures[name]["is_steady"] = steady[name]
            figures[name].update(_memory(trainee))
            figures[name]["bound_ms"] = _bounds(trainee, memory, device)
            figures[name]["ratio"] = _ratios(trainee, memory, device)
            figures[name].update(_losses(trainee, memory))
    first = next(trainee.name for trainee in trainees if trainee.ahead)
    ratio = dict(figures[first]["ratio"])
    if "fbgemm" in by_name:
        ratio["in_memory_vs_fbgemm"] = _speed_ratio(memory, by_name["fbgemm"])
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "run"}
    return {
        "options": options,
        "machine": machine(),
        "device": device,
        "touched_share": 1.0,
        "ratio": ratio,
        "systems": figures,
    }


def _figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return medians over the turns; what is counted is per step."""
    threads = sorted({name for turn in turns for name, seconds in turn.cpu.items() if any(seconds)})
    result: dict[str, Any] = {
        "examples_per_s": median(turn.examples_per_s for turn in turns),
        "examples_per_s_by_round": [turn.examples_per_s for turn in turns],
        "step_ms": median(turn.seconds / turn.steps for turn in turns) * 1e3,
        "cpu_ms": {
            name: [
                median(turn.cpu.get(name, (0, 0))[kind] / turn.steps for turn in turns) * 1e3
                for kind in (0, 1)
            ]
            for name in threads
        },
    }
    for name in turns[0].counted:
        if name != "stall_seconds":
            result[name] = median(turn.counted[name] / turn.steps for turn in turns)
        else:
            result["stall"] = median(turn.counted[name] / turn.seconds for turn in turns)
    return result


def _memory(trainee: Trainee) -> dict[str, int]:
    """Return the bytes of the budget, and the bytes that rows read ahead take beside it now."""
    engine = trainee.system.embeddings.engine
    return {
        "budget_bytes": engine.config.hbm,
        "read_ahead_bytes": engine.stats()["memory"]["read_ahead"],
    }


def _losses(trainee: Trainee, memory: Trainee) -> dict[str, Any]:
    """Return how the losses differ from the losses of training in memory: whether at all, if rows are the
    same bits everywhere."""
    pairs = list(zip(trainee.system.losses, memory.system.losses, strict=True))
    config = trainee.system.embeddings.engine.config
    if config.lower_format.is_wide:
        return {"equal_losses": all(one == other for one, other in pairs)}
    return {
        "mean_loss": mean(one for one, _ in pairs),
        "mean_loss_in_memory": mean(other for _, other in pairs),
        "row_bytes": max(spec.row_bytes for spec in trainee.system.embeddings.engine.specs),
    }


def _bounds(trainee: Trainee, memory: Trainee, device: dict[str, float]) -> dict[str, float]:
    turns = [_bound(*pair, device) for pair in zip(trainee.turns, memory.turns, strict=True)]
    return {name: median(bound[name] for bound in turns) * 1e3 for name in turns[0]}


def _ratios(trainee: Trainee, memory: Trainee, device: dict[str, float]) -> dict[str, float]:
    longer = [
        turn.seconds / turn.steps / max(_bound(turn, other, device).values())
        for turn, other in zip(trainee.turns, memory.turns, strict=True)
    ]
    return {"tiered_vs_in_memory": _speed_ratio(trainee, memory), "step_vs_bound": median(longer)}


def _bound(turn: Turn, memory: Turn, device: dict[str, float]) -> dict[str, float]:
    """Return the least seconds of a step by what could limit it."""
    return {
        "compute": memory.seconds / memory.steps,
        "requests": turn.counted["read_requests"] / turn.steps / device["requests_per_s"],
        "bytes": turn.counted["read_bytes"] / turn.steps / device["bytes_per_s"],
        "cpu": turn.cpu_seconds / turn.steps / len(os.sched_getaffinity(0)),
    }


def _speed_ratio(one: Trainee, other: Trainee) -> float:
    pairs = zip(one.turns, other.turns, strict=True)
    return median(a.examples_per_s / b.examples_per_s for a, b in pairs)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="every row written; medians; per step")
    for column in (
        "system",
        "examples/s",
        "of in memory",
        "misses",
        "requests",
        "MB read",
        "stall",
        "of bound",
    ):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, figures in result["systems"].items():
        cells = [name, f"{figures['examples_per_s']:,.0f}"]
        if "ratio" in figures:
            cells += [
                f"{figures['ratio']['tiered_vs_in_memory']:.2f}",
                f"{figures['misses']:,.0f}",
                f"{figures['read_requests']:,.0f}",
                f"{figures['read_bytes'] / 1e6:,.1f}",
                f"{figures['stall']:.2f}",
                f"{figures['ratio']['step_vs_bound']:.2f}",
            ]
        table.add_row(*cells)
    Console().print(table)
    for name, figures in result["systems"].items():
        if "budget_bytes" in figures:
            budget, ahead = (format_bytes(figures[f"{what}_bytes"]) for what in ("budget", "read_ahead"))
            print(f"{name}: budget {budget}; rows read ahead take {ahead} beside it")
        if "mean_loss" in figures:
            losses = f"{figures['mean_loss']:.6f}, in memory {figures['mean_loss_in_memory']:.6f}"
            print(f"{name}: rows of {figures['row_bytes']} bytes in the store; mean loss {losses}")
        if not figures.get("is_steady", True):
            print(f"{name}: misses, requests or writes still changed after {_MOST_WARM_UP} steps of warm-up")


def _check(result: dict[str, Any]) -> int:
    """Return the exit code: 1 if training with tiers was not bit for bit training in memory."""
    wrong = [name for name, figures in result["systems"].items() if not figures.get("equal_losses", True)]
    for name in wrong:
        print(
            f"{name}: its losses differ from those of training in memory; please report it", file=sys.stderr
        )
    return 1 if wrong else 0
