"""``tierstore bench hit-rate``: which policy, and how much fast memory? Answered from a trace, before
training.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.errors import ConfigError
from tierstore.result_file import JsonFile
from tierstore.trace.options import add_source, open_source

if TYPE_CHECKING:
    from cache_policies import Policy, PreparedTrace

SUMMARY = "miss ratios of eviction policies by cache size, on a trace"
DEFAULT_POLICIES = "lookahead,lru,lfu,s3_fifo,w_tinylfu"
DEFAULT_SIZES = "1%,2%,5%,10%,20%,50%"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    what = parser.add_argument_group("what to simulate")
    what.add_argument(
        "--policies", default=DEFAULT_POLICIES, metavar="A,B", help=f"or all ({DEFAULT_POLICIES})"
    )
    what.add_argument(
        "--sizes",
        default=DEFAULT_SIZES,
        metavar="S,S",
        help=f"such as 1% of the rows used, 500 (rows), 64MiB ({DEFAULT_SIZES})".replace("%", "%%"),
    )
    what.add_argument("--window", default="auto", metavar="N", help="batches known ahead (default: auto)")
    what.add_argument("--depth", type=int, default=0, metavar="N", help="batches in flight (default: 0)")
    what.add_argument("--admission", default="always", metavar="NAME", help="always, counter(n) or bloom(n)")
    what.add_argument(
        "--sample",
        default="auto",
        metavar="R",
        help="share of the rows, or exact (default: exact if quick enough)",
    )
    what.add_argument(
        "--threads", type=int, default=2, metavar="N", help="simulations at a time (default: 2)"
    )
    cost = parser.add_argument_group("cost")
    cost.add_argument("--row-bytes", type=int, default=272, metavar="N", help="bytes per row (default: 272)")
    cost.add_argument("--iops", type=float, metavar="X", help="random reads/s (default: measured here)")
    cost.add_argument("--io-dir", metavar="DIR", help="folder on the device to measure (default: temporary)")
    cost.add_argument(
        "--examples-per-s", type=float, default=100_000, metavar="X", help="training speed (1e5)"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--per-table", action="store_true", help="LRU miss ratios of each table alone, too")
    out.add_argument("--recommend", action="store_true", help="say in words what to choose")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves: .png, .svg, .pdf or .html")
    out.add_argument(
        "--save-curves", type=Path, metavar="FILE", help="write every table's curve for planners (JSON)"
    )


def run(args: argparse.Namespace) -> int:
    from cache_policies import PolicyError

    try:
        return answer_all(args)
    except PolicyError as error:  # as for a policy or filter that does not exist
        raise ConfigError(str(error)) from error


def answer_all(args: argparse.Namespace) -> int:
    from cache_policies import get_admission, prepare

    from . import _hit_rate_plot as plot
    from . import _hit_rate_report as report
    from ._hit_rate_answer import parse_sample, parse_sizes, parse_window, simulate_all

    policies = chosen_policies(args.policies)
    sizes = parse_sizes(args.sizes)
    json_file = JsonFile(args.json) if args.json else None
    curves_file = JsonFile(args.save_curves, "--save-curves") if args.save_curves else None
    if args.plot:
        plot.check(args.plot)
    if args.row_bytes < 1 or args.examples_per_s <= 0 or args.iops == 0:
        raise ConfigError("--row-bytes, --examples-per-s and --iops must be positive")
    if args.depth < 0 or args.threads < 1:
        raise ConfigError("--depth must not be negative, and --threads at least 1")
    parse_window(args.window)
    parse_sample(args.sample)
    get_admission(args.admission)
    source = open_source(args)
    with report.progress() as bars:
        step = bars("reading", source.num_batches)
        prepared = prepare(counted(source.key_batches(), step))
        if not prepared.accesses:
            raise ConfigError(f"{source.name}: the trace has no accesses")
        policies = [informed(policy, prepared) for policy in policies]
        answer = simulate_all(args, source, prepared, policies, sizes, bars)
        tables = None
        if args.per_table or args.save_curves:
            from tierstore.trace import table_curves

            tables = table_curves(source, prepared, answer.points[0].rate, bars("tables", len(source.tables)))
        advice = report.recommend(answer, policies, args, bars) if args.recommend else None
    report.show(answer)
    if args.per_table and tables:
        report.show_tables(tables, sizes, prepared)
    if advice:
        print(advice.text)
    if json_file:
        json_file.write(report.to_json(answer, advice, tables))
    if curves_file and tables:
        from tierstore.trace import planner_input

        curves_file.write(planner_input(source, tables))
    if args.plot:
        plot.draw(answer, args.plot, None if advice is None else advice.size_rows)
    return 0


def chosen_policies(text: str) -> list[Policy]:
    """Return online policies by name; Belady's optimum is simulated in any case."""
    import cache_policies

    names = cache_policies.names() if text == "all" else [name.strip() for name in text.split(",")]
    policies = [policy for policy in map(cache_policies.get, dict.fromkeys(names)) if not policy.offline]
    if not policies:
        raise ConfigError(
            f"--policies {text}: name at least one online policy; Belady's optimum is always shown"
        )
    return policies


def informed(policy: Policy, prepared: PreparedTrace) -> Policy:
    """Give ``static_top`` the frequencies of the whole trace, which no other online policy knows."""
    import numpy as np

    from cache_policies.static_top import StaticTop

    if not isinstance(policy, StaticTop):
        return policy
    return StaticTop(prepared.keys, np.bincount(prepared.rows, minlength=prepared.footprint))


def counted(batches: Any, step: Any) -> Any:
    for i, batch in enumerate(batches):
        yield batch
        step(i + 1)
