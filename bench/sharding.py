"""``tierstore bench sharding``: one training step of a sharded collection, against torchrec's, in turns."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError

from ._checks import check_known, check_memory, check_ranks

SUMMARY = "time a step of a sharded EmbeddingBagCollection (gloo, CPU), and torchrec's in turns"

CUTS = ("table_wise", "row_wise", "column_wise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument(
        "--cuts",
        default=",".join(CUTS),
        metavar="A,B",
        help="sharding types to measure (default: all three)",
    )
    parser.add_argument("--tables", type=int, default=26, metavar="N", help="number of tables (default: 26)")
    parser.add_argument(
        "--rows", type=int, default=100_000, metavar="N", help="rows per table (default: 100000)"
    )
    parser.add_argument("--dim", type=int, default=64, metavar="D", help="embedding dimension (default: 64)")
    parser.add_argument(
        "--batch-size", type=int, default=1024, metavar="N", help="examples per rank (default: 1024)"
    )
    parser.add_argument("--pooling-factor", type=int, default=4, metavar="N", help="ids per bag (default: 4)")
    parser.add_argument(
        "--steps", type=int, default=30, metavar="N", help="steps that are measured (default: 30)"
    )
    parser.add_argument(
        "--precision", default="fp32", metavar="P", help="precision of sent vectors: fp32, bf16, fp16"
    )
    parser.add_argument("--dedup", action="store_true", help="tierstore asks for each id once")
    parser.add_argument("--no-torchrec", action="store_true", help="measure tierstore alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    from tierstore.sharding import CommsConfig

    from ._ranks import on_ranks
    from ._sharding_ranks import Setting, measure

    cuts = args.cuts.split(",")
    check_known("--cuts", cuts, CUTS)
    _check_sizes(args)
    try:
        comms = CommsConfig(args.precision, args.precision, args.dedup)
    except ConfigError as error:
        raise ConfigError(f"--precision: {error}") from error
    results = {}
    for cut in cuts:
        setting = Setting(
            cut,
            args.tables,
            args.rows,
            args.dim,
            args.batch_size,
            args.pooling_factor,
            args.steps,
            not args.no_torchrec,
            comms,
        )
        results[cut] = _figures(on_ranks(args.ranks, measure, setting))
        _print(cut, results[cut])
    if args.json:
        options = {key: str(value) for key, value in vars(args).items() if key != "run"}
        result = {"date": time.strftime("%Y-%m-%d"), "options": options, "cuts": results}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _check_sizes(args: argparse.Namespace) -> None:
    """Raise ConfigError for more ranks, rows or ids than this machine has room for."""
    check_ranks(args.ranks)
    rows = args.tables * args.rows * args.dim * 4 * (1 if args.no_torchrec else 2)
    check_memory(rows, "the rows", "--tables, --rows, --dim")
    ids = args.ranks * args.batch_size * args.tables * (8 * args.pooling_factor + 8 * args.dim)
    check_memory(ids, "the batches", "--ranks, --batch-size, --tables, --pooling-factor, --dim")


def _figures(measured: dict[str, Any]) -> dict[str, Any]:
    times = measured["seconds"]
    found: dict[str, Any] = {
        name: {
            "median_s": statistics.median(seconds),
            "quartiles_s": statistics.quantiles(seconds, n=4)[::2] if len(seconds) > 1 else seconds,
            "seconds": seconds,
            "median_cpu_s": statistics.median(measured["cpu_seconds"][name]),
        }
        for name, seconds in times.items()
    }
    found["bytes_sent"] = measured["bytes_sent"]
    if "torchrec" in times:
        pairs = zip(times["tierstore"], times["torchrec"], strict=True)
        found["ratio_of_medians"] = found["tierstore"]["median_s"] / found["torchrec"]["median_s"]
        found["median_of_ratios"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return found


def _print(cut: str, figures: dict[str, Any]) -> None:
    shown = []
    for name in ("tierstore", "torchrec"):
        if name in figures:
            low, high = (1e3 * figures[name]["quartiles_s"][at] for at in (0, -1))
            shown.append(
                f"{name} {1e3 * figures[name]['median_s']:.1f} ms ({low:.1f} to {high:.1f})"
                f", CPU {1e3 * figures[name]['median_cpu_s']:.1f} ms"
            )
    if "ratio_of_medians" in figures:
        shown.append(f"ratio {figures['ratio_of_medians']:.2f} (of pairs {figures['median_of_ratios']:.2f})")
    shown.append(f"{figures['bytes_sent']:,} bytes sent per rank")
    print(f"{cut:<12} {', '.join(shown)}", flush=True)
