"""``tierstore bench planning``: how fast lookups are deduplicated, announced and planned, by threads.

A GPU's training step takes milliseconds, so planning must not take longer. What is measured is what a
prefetch does before rows move, by the timers of ``stats()``: "announce" removes repeated ids and tells the
tiers what comes, and "plan" decides where rows go. The rows are short, nothing is updated, and each forward
pass ends before the next plan begins. Threads take turns, each with tables of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from tierstore.errors import ConfigError
from tierstore.result_file import JsonFile, machine

SUMMARY = "milliseconds of planning a lookup, stage by stage, and ids per second by threads"
_DIM = 4
_STAGES = ("announce_seconds", "plan_seconds", "policy_seconds", "fetch_seconds", "move_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default="synthetic:criteo", help="data set (default: synthetic:criteo)")
    parser.add_argument("--rows", type=int, metavar="N", help="synthetic: rows per table")
    parser.add_argument("--tables", type=int, metavar="N", help="synthetic: number of tables")
    parser.add_argument("--batch-size", type=int, default=65_536, metavar="N", help="(default: 65536)")
    parser.add_argument(
        "--hbm", default="1/37", metavar="SIZE", help="bytes, or fraction of the tables' (default: 1/37)"
    )
    parser.add_argument("--policy", default="lookahead", metavar="NAME", help="(default: lookahead)")
    parser.add_argument(
        "--threads", default="1,2", metavar="A,B", help="numbers of threads, in turns (default: 1,2)"
    )
    parser.add_argument(
        "--window", type=int, default=16, metavar="N", help="batches known ahead (default: 16)"
    )
    parser.add_argument("--batches", type=int, default=64, metavar="N", help="other batches (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each (default: 5)")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="plans of a turn (default: 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    import tierstore

    try:
        threads = [int(part) for part in args.threads.split(",")]
    except ValueError:
        raise ConfigError(f"--threads {args.threads!r}: give numbers, such as 1,2") from None
    if min(args.batch_size, args.batches, args.rounds, args.steps, *threads) < 1:
        raise ConfigError("--threads, --batch-size, --batches, --rounds and --steps must be at least 1")
    out = JsonFile(args.json) if args.json else None
    dataset, batches = _batches(args)
    turns: dict[int, list[dict[str, float]]] = {count: [] for count in threads}
    with ExitStack() as stack:
        planners = {count: stack.enter_context(_Planner(args, dataset, batches)) for count in threads}
        for turn in range(args.rounds + 1):
            for count, planner in planners.items():
                tierstore.set_num_threads(count)
                taken = planner.plan(args.steps if turn else args.batches)  # the first turn fills the cache
                if turn:
                    turns[count].append(taken)
        stats = next(iter(planners.values())).stats()
    result = _result(args, turns, stats)
    _print(result)
    if out:
        out.write(result)
    return 0


def _batches(args: argparse.Namespace) -> tuple[Any, list[Any]]:
    from tierstore.data import load

    dataset = load(args.data, rows=args.rows, tables=args.tables)
    print(f"drawing {args.batches} batches of {args.batch_size} examples", file=sys.stderr, flush=True)
    return dataset, [batch.sparse for batch in islice(dataset.train(args.batch_size), args.batches)]


class _Planner:
    """A collection whose lookups are planned ahead and then dropped. A context manager."""

    def __init__(self, args: argparse.Namespace, dataset: Any, batches: list[Any]) -> None:
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
        self._batches: Iterator[Any] = cycle(batches)

    def __enter__(self) -> _Planner:
        return self

    def __exit__(self, *_: object) -> None:
        self._tables.engine.close()

    def plan(self, steps: int) -> dict[str, float]:
        """Plan so many lookups; return the milliseconds of each stage per lookup, and the ids."""
        import tierstore

        tables, before, ids = self._tables, self.stats(), 0
        for batch in tierstore.prefetch(
            islice(self._batches, steps),
            tables,
            inputs={tables: lambda batch: (batch,)},
            depth=0,
            window=self._window,
        ):
            ids += batch.values().numel()
            tables(batch)
        after = self.stats()
        lookups = after["lookups"] - before["lookups"]
        taken = {stage: 1e3 * (after[stage] - before[stage]) / lookups for stage in _STAGES}
        return {**taken, "ids": ids / steps}

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._tables.engine.stats()
        return stats


def _result(
    args: argparse.Namespace, turns: dict[int, list[dict[str, float]]], stats: dict[str, Any]
) -> dict[str, Any]:
    def per_plan(taken: dict[str, float]) -> float:
        return taken["announce_seconds"] + taken["plan_seconds"]

    threads = {}
    for count, all_ in turns.items():
        ms = median(per_plan(taken) for taken in all_)
        stages = {
            stage.replace("_seconds", "_ms"): median(taken[stage] for taken in all_) for stage in _STAGES
        }
        threads[str(count)] = {"planned_ms": ms, "ids_per_s": 1e3 * all_[0]["ids"] / ms, **stages}
    tiers = stats["tiers"]["hbm"]
    result: dict[str, Any] = {
        "threads": threads,
        "ids": turns[next(iter(turns))][0]["ids"],
        "unique_rows": tiers["rows"] / stats["lookups"],
        "hit_rate": tiers["hit_rate"],
        "config": json.loads(json.dumps(vars(args), default=str)),
        "machine": machine(),
    }
    if 1 in turns:
        for count in turns.keys() - {1}:
            pairs = zip(turns[count], turns[1], strict=True)
            key = "ratio.planned_vs_one_thread" + ("" if len(turns) == 2 else f".{count}")
            result[key] = median(per_plan(own) / per_plan(one) for own, one in pairs)
    return result


def _print(result: dict[str, Any]) -> None:
    print(
        f"{result['ids']:,.0f} ids a lookup, {result['unique_rows']:,.0f} of them distinct; "
        f"{100 * result['hit_rate']['per_unique']:.1f} % of the distinct rows are in hbm"
    )
    print(f"{'threads':>7} {'ms a plan':>10} {'M ids/s':>8} {'announce':>9} {'plan':>7} {'policy':>7}")
    for count, row in result["threads"].items():
        first = f"{count:>7} {row['planned_ms']:>10.1f} {row['ids_per_s'] / 1e6:>8.1f}"
        print(f"{first} {row['announce_ms']:>9.1f} {row['plan_ms']:>7.1f} {row['policy_ms']:>7.1f}")
    for key, value in result.items():
        if key.startswith("ratio."):
            print(f"{key} {value:.2f}")
