"""``tierstore bench baselines``: the same training in plain PyTorch, fbgemm-gpu and tierstore, in turns."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from tierstore.result_file import machine

from ._training_arguments import add_training_arguments, load_dataset

SUMMARY = "train one model by nn.EmbeddingBag, fbgemm-gpu and tierstore in turns; compare speed and AUC"

DEFAULT_SYSTEMS = "torch-sparse,fbgemm,in-memory,tiered"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    training = add_training_arguments(parser, "flights", batch_size=1024, dim=32)
    training.add_argument("--steps", type=int, metavar="N", help="batches to train on (default: one epoch)")
    tiers = parser.add_argument_group("tiers of the system 'tiered'")
    tiers.add_argument(
        "--hbm", default="1/37", metavar="SIZE", help="bytes, or a fraction of the tables' (default: 1/37)"
    )
    tiers.add_argument("--store", metavar="DIR", help="folder of the row store (default: a temporary one)")
    tiers.add_argument(
        "--policy", default="lookahead", metavar="NAME", help="eviction policy (default: lookahead)"
    )
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--systems",
        default=DEFAULT_SYSTEMS,
        metavar="A,B",
        help=f"systems to train with (default: {DEFAULT_SYSTEMS}; also: torch-dense)",
    )
    measuring.add_argument(
        "--rounds", type=int, default=8, metavar="N", help="turns of each system (default: 8)"
    )
    measuring.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    from tierstore.errors import ConfigError

    from ._checks import check_batches, check_known, check_store, use_threads
    from ._systems import SYSTEMS, check_in_memory, check_setting

    names = args.systems.split(",")
    check_known("--systems", names, list(SYSTEMS))
    use_threads(args.threads)
    check_store(args.store)
    dataset = load_dataset(args)
    steps = args.steps or (dataset.num_train and -(-dataset.num_train // args.batch_size))
    if not steps:
        raise ConfigError(f"data {args.data!r} does not tell its length; give --steps")
    setting = _setting(args, dataset)
    check_setting(setting)
    if names != ["tiered"]:
        check_in_memory(setting.tables)
    check_batches(dataset, args.batch_size, -(-steps // args.rounds), "--batch-size, --steps")
    systems: dict[str, Any] = dict.fromkeys(names)
    try:
        for name in sorted(names, key="tiered".__ne__):  # which refuses more than the others do
            systems[name] = SYSTEMS[name](setting)
        rounds = _take_turns(systems, dataset, args, steps)
        result = _result(systems, rounds, dataset, args)
    finally:
        for system in filter(None, systems.values()):
            system.close()
    _print(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _setting(args: argparse.Namespace, dataset: Any) -> Any:
    from ._systems import Setting, table_configs, tier_bytes

    tables = table_configs(dataset, args.dim)
    hbm = tier_bytes(args.hbm, tables)
    return Setting(tables, dataset.dense_dim, args.lr, args.seed, hbm, args.store, args.policy)


def _take_turns(
    systems: dict[str, Any], dataset: Any, args: argparse.Namespace, steps: int
) -> list[dict[str, float]]:
    """Train each system on the same batches, a round's share at a time; return examples/s by system.

    The batches of a round are drawn before its clock starts. The order turns, so that no system is always
    first.
    """
    batches = islice(dataset.train(args.batch_size, epochs=1), steps)
    per_round = -(-steps // args.rounds)
    rounds: list[dict[str, float]] = []
    while drawn := list(islice(batches, per_round)):
        examples = sum(len(batch) for batch in drawn)
        names = list(systems)
        turn = len(rounds) % len(names)
        speeds = {}
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            systems[name].train(drawn)
            speeds[name] = examples / (time.perf_counter() - start)
        rounds.append(speeds)
        shown = ", ".join(f"{name} {speeds[name]:,.0f}" for name in names)
        print(f"round {len(rounds)}: examples/s: {shown}", file=sys.stderr, flush=True)
    return rounds


def _result(
    systems: dict[str, Any], rounds: list[dict[str, float]], dataset: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """Return figures by system; the first round, which also warms up, counts only if there is no other."""
    counted = rounds[1:] or rounds
    base = next(iter(systems))
    figures = {}
    for name, system in systems.items():
        figures[name] = {
            "examples_per_s": statistics.median(speeds[name] for speeds in counted),
            f"ratio_to_{base}": statistics.median(speeds[name] / speeds[base] for speeds in counted),
            "examples_per_s_by_round": [speeds[name] for speeds in rounds],
            "auc": system.auc(dataset.test(args.batch_size)),
            "last_loss": statistics.fmean(system.losses[-100:]),
        }
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "run"}
    return {"options": options, "machine": machine(), "systems": figures}


def _print(result: dict[str, Any]) -> None:
    ratio = next(key for figures in result["systems"].values() for key in figures if key.startswith("ratio"))
    print(f"{'system':<14}{'examples/s':>12}{ratio.replace('_', ' '):>24}{'AUC':>10}{'last loss':>11}")
    for name, figures in result["systems"].items():
        print(
            f"{name:<14}{figures['examples_per_s']:>12,.0f}{figures[ratio]:>24.2f}"
            f"{figures['auc']:>10.4f}{figures['last_loss']:>11.4f}"
        )
