"""``tierstore bench planning``: how fast lookups are deduplicated, announced and planned, by threads.

A GPU's training step takes milliseconds, so planning must not take longer. What is measured is what a
prefetch does before rows move, by the timers of ``stats()``: "announce" removes repeated ids and tells the
tiers what comes, and "plan" decides where rows go. The rows are short, nothing is updated, and each forward
pass ends before the next plan begins. The first batches, which fill the cache, are not measured: planning
without evictions is cheaper, so the rows that a plan misses and evicts are reported with its milliseconds.
Threads take turns, each with tables of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from tierstore.errors import ConfigError
from tierstore.result_file import JsonFile, machine

from ._checks import check_batches, use_threads

SUMMARY = "milliseconds of planning a lookup, stage by stage, and ids per second by threads"
_DIM = 4
_EPOCHS = 1 << 20
_ROWS = ("unique_rows", "missed_rows", "evicted_rows")
_STAGES = ("announce_seconds", "plan_seconds", "policy_seconds", "fetch_seconds", "move_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default="synthetic:criteo", help="data set (default: synthetic:criteo)")
    parser.add_argument("--rows", type=int, metavar="N", help="synthetic: rows per table")
    parser.add_argument("--tables", type=int, metavar="N", help="synthetic: number of tables")
    parser.add_argument(
        "--batch-size", type=int, default=65_536, metavar="N", help="examples per batch (default: 65536)"
    )
    parser.add_argument(
        "--hbm", default="1/37", metavar="SIZE", help="bytes, or fraction of the tables' (default: 1/37)"
    )
    parser.add_argument(
        "--policy", default="lookahead", metavar="NAME", help="eviction policy (default: lookahead)"
    )
    parser.add_argument(
        "--threads", default="1,2", metavar="A,B", help="numbers of threads, in turns (default: 1,2)"
    )
    parser.add_argument(
        "--window", type=int, default=16, metavar="N", help="batches known ahead (default: 16)"
    )
    parser.add_argument(
        "--run-in", type=int, default=96, metavar="N", help="batches before those measured (default: 96)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each (default: 5)")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="plans of a turn (default: 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    from tierstore.data import load

    try:
        threads = [int(part) for part in args.threads.split(",")]
    except ValueError:
        raise ConfigError(f"--threads {args.threads!r}: give numbers, such as 1,2") from None
    if min(args.run_in, *threads) < 1:
        raise ConfigError("--threads and --run-in must be at least 1")
    out = JsonFile(args.json) if args.json else None
    dataset = load(args.data, rows=args.rows, tables=args.tables)
    for count in threads:
        use_threads(count)
    check_batches(dataset, args.batch_size, args.steps + args.window, "--batch-size, --steps, --window")
    batches = (batch.sparse for batch in dataset.train(args.batch_size, epochs=_EPOCHS))
    result = measured(args, dataset, batches, threads)
    _print(result)
    if out:
        out.write(result)
    return 0


def measured(args: argparse.Namespace, dataset: Any, batches: Any, threads: list[int]) -> dict[str, Any]:
    """Return the figures of planning ``batches``, an iterator of KeyedJaggedTensors of ``dataset``."""
    import tierstore

    turns: dict[int, list[dict[str, float]]] = {count: [] for count in threads}
    with ExitStack() as stack:
        planners = {count: stack.enter_context(_Planner(args, dataset)) for count in threads}
        for turn in range(-(-args.run_in // args.steps) + args.rounds):
            print(f"\rplanned {turn * args.steps} batches", end="", file=sys.stderr, flush=True)
            given = list(islice(batches, args.steps))
            for count, planner in planners.items():
                tierstore.set_num_threads(count)
                turns[count].append(planner.plan(given))
        print(file=sys.stderr)
        stats = next(iter(planners.values())).stats()
    return _result(args, {count: taken[-args.rounds :] for count, taken in turns.items()}, stats)


class _Planner:
    """A collection whose lookups are planned ahead and then dropped. A context manager."""

    def __init__(self, args: argparse.Namespace, dataset: Any) -> None:
        import tierstore

        from ._systems import table_configs, tier_bytes

        tables = table_configs(dataset, _DIM)
        config = tierstore.TierConfig(
            hbm=tier_bytes(args.hbm, tables), engine="memory", policy=args.policy, read_ahead=0
        )
        self._tables = tierstore.EmbeddingBagCollection(
            tables=tables, config=config, optimizer=tierstore.optim.SGD(lr=0.1)
        )
        self._window = args.window

    def __enter__(self) -> _Planner:
        return self

    def __exit__(self, *_: object) -> None:
        self._tables.engine.close()

    def plan(self, batches: list[Any]) -> dict[str, float]:
        """Plan lookups of ``batches``; return milliseconds of each stage, ids and rows per lookup."""
        import tierstore

        tables, before = self._tables, self._counted()
        for batch in tierstore.prefetch(
            batches, tables, inputs={tables: lambda batch: (batch,)}, depth=0, window=self._window
        ):
            tables(batch)
        after = self._counted()
        ids = sum(batch.values().numel() for batch in batches)
        return {"ids": ids / len(batches)} | {
            name: (after[name] - before[name]) / len(batches) for name in after
        }

    def _counted(self) -> dict[str, float]:
        stats = self.stats()
        hbm = stats["tiers"]["hbm"]
        return {
            "unique_rows": hbm["rows"],
            "missed_rows": hbm["rows"] - hbm["row_hits"],
            "evicted_rows": stats["evicted_rows"],
            **{stage.replace("_seconds", "_ms"): 1e3 * stats[stage] for stage in _STAGES},
        }

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._tables.engine.stats()
        return stats


def _per_plan(taken: dict[str, float]) -> float:
    return taken["announce_ms"] + taken["plan_ms"]


def _result(
    args: argparse.Namespace, turns: dict[int, list[dict[str, float]]], stats: dict[str, Any]
) -> dict[str, Any]:
    threads = {}
    for count, all_ in turns.items():
        ms = median(map(_per_plan, all_))
        figures = {name: median(taken[name] for taken in all_) for name in all_[0]}
        threads[str(count)] = {"planned_ms": ms, "ids_per_s": 1e3 * figures["ids"] / ms, **figures}
    first = next(iter(threads.values()))
    result: dict[str, Any] = {
        "threads": threads,
        **{name: first[name] for name in ("ids", *_ROWS)},
        "slots": sum(group["slots"] for group in stats["groups"].values()),
        "config": json.loads(json.dumps(vars(args), default=str)),
        "machine": machine(),
    }
    if 1 in turns:
        for count in turns.keys() - {1}:
            pairs = zip(turns[count], turns[1], strict=True)
            key = "ratio.planned_vs_one_thread" + ("" if len(turns) == 2 else f".{count}")
            result[key] = median(_per_plan(own) / _per_plan(one) for own, one in pairs)
    return result


def _print(result: dict[str, Any]) -> None:
    print(
        f"{result['ids']:,.0f} ids a lookup, {result['unique_rows']:,.0f} of them distinct rows, of which "
        f"{result['missed_rows']:,.0f} missed hbm; {result['evicted_rows']:,.0f} rows evicted"
    )
    if not result["evicted_rows"]:
        print("No row was evicted, so these figures flatter: give a larger --run-in or a smaller --hbm.")
    print(f"{'threads':>7} {'ms a plan':>10} {'M ids/s':>8} {'announce':>9} {'plan':>7} {'policy':>7}")
    for count, row in result["threads"].items():
        first = f"{count:>7} {row['planned_ms']:>10.1f} {row['ids_per_s'] / 1e6:>8.1f}"
        print(f"{first} {row['announce_ms']:>9.1f} {row['plan_ms']:>7.1f} {row['policy_ms']:>7.1f}")
    for key, value in result.items():
        if key.startswith("ratio."):
            print(f"{key} {value:.2f}")
