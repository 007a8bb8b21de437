"""``tierstore bench hit-rate``: which policy, and how much fast memory? Answered from a trace, before
training.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tierstore.errors import ConfigError
from tierstore.result_file import JsonFile, option_errors
from tierstore.trace.options import add_source, open_source

if TYPE_CHECKING:
    from cache_policies import Policy, PreparedTrace
    from tierstore.simulation import Training
    from tierstore.trace import Trace


SUMMARY = "miss ratios of eviction policies by cache size, on a trace"
DEFAULT_POLICIES = "lookahead,lru,lfu,s3_fifo,w_tinylfu"
ROW_BYTES = 272
DEFAULT_SIZES = "1%,2%,5%,10%,20%,50%"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    _add_simulation(parser.add_argument_group("what to simulate"))
    _add_tiers(parser.add_argument_group("the tiers of a training (docs/how-to/cache_size.md)"))
    cost = parser.add_argument_group("cost")
    cost.add_argument(
        "--row-bytes",
        type=int,
        metavar="N",
        help=f"bytes per row (default: {ROW_BYTES}; with --hbm: the tables')",
    )
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


def _add_simulation(group: Any) -> None:
    group.add_argument(
        "--policies",
        "--policy",
        metavar="A,B",
        help=f"names, or module:Class of your own, or all ({DEFAULT_POLICIES}; with --hbm: lookahead)",
    )
    group.add_argument(
        "--sizes",
        metavar="S,S",
        help=f"such as 1% of the rows used, 500 (rows), 64MiB ({DEFAULT_SIZES})".replace("%", "%%"),
    )
    group.add_argument("--window", default="auto", metavar="N", help="batches known ahead (default: auto)")
    group.add_argument("--depth", metavar="N", help="batches in flight (default: 0; with --hbm: auto)")
    group.add_argument("--admission", default="always", metavar="NAME", help="always, counter(n) or bloom(n)")
    group.add_argument(
        "--sample",
        default="auto",
        metavar="R",
        help="share of the rows, or exact (default: exact if quick enough)",
    )
    group.add_argument(
        "--threads", type=int, default=2, metavar="N", help="simulations at a time (default: 2)"
    )


def _add_tiers(group: Any) -> None:
    group.add_argument(
        "--hbm",
        metavar="SIZE",
        help="fast memory: 64MiB, a share of the tables' bytes (1/37, 2.7%%), or all; simulate the tiers",
    )
    group.add_argument("--uvm", metavar="SIZE", help="host memory under hbm, or such a share (default: 0)")
    group.add_argument("--ssd", metavar="SIZE", help="cap of the store; 0 for no store (default: auto)")
    group.add_argument(
        "--plan", type=Path, metavar="JSON", help="a sharding plan: simulate every rank, with its bytes"
    )
    group.add_argument("--dim", metavar="D,D", help="embedding dimension, or one of each table (default: 32)")
    group.add_argument("--optimizer", metavar="NAME", help="optimizer of the rows (default: rowwise-adagrad)")
    group.add_argument(
        "--read-ahead", metavar="SIZE", help="memory for rows read ahead, or such a share (default: auto)"
    )
    for tier in ("ssd", "uvm"):
        group.add_argument(
            f"--{tier}-dtype", metavar="NAME", help=f"dtype of weights in {tier} (default: fp32)"
        )
    group.add_argument(
        "--state-dtype", metavar="NAME", help="dtype of optimizer state in lower tiers (default: fp32)"
    )


def run(args: argparse.Namespace) -> int:
    from cache_policies import PolicyError

    try:
        return answer_all(args)
    except PolicyError as error:  # as for a policy or filter that does not exist
        raise ConfigError(str(error)) from error


def answer_all(args: argparse.Namespace) -> int:
    from ._hit_rate_plot import check
    from ._hit_rate_tiers import TierOptions

    tiers = TierOptions.of(args)
    with_curves = tiers is None or any(
        (args.sizes, args.plot, args.recommend, args.per_table, args.save_curves)
    )
    json_file = JsonFile(args.json) if args.json else None
    curves_file = JsonFile(args.save_curves, "--save-curves") if args.save_curves else None
    if args.plot:
        check(args.plot)
    if with_curves:
        check_curve_options(args, ROW_BYTES if tiers is None else tiers.row_bytes)
    if tiers is not None and tiers.plan is not None:
        args.batch_size *= tiers.plan.world_size
    source = open_source(args)
    document: dict[str, Any] = {"source": source.name}
    trainings = [] if tiers is None else tiers.trainings(source)
    if trainings:
        document |= answer_tiers(source, trainings)
    if with_curves:
        document |= answer_curves(args, source, curves_file, trainings)
    if json_file:
        json_file.write(document)
    return 0


def answer_tiers(source: Trace, trainings: list[Training]) -> dict[str, Any]:
    """Simulate the tiers of each training, print hits and misses, and return them."""
    from tierstore.simulation import of_rank_0, simulate_tiers

    from . import _hit_rate_report as report
    from . import _hit_rate_tier_report as tier_report

    with report.progress() as bars:
        found = []
        for training in trainings:
            shown = bars(f"simulating {training.policy}", source.num_batches)
            found.append(simulate_tiers(source, training, of_rank_0(shown)))
    for training, ranks in zip(trainings, found, strict=True):
        tier_report.show(source, training, ranks)
    pairs = zip(trainings, found, strict=True)
    return {"trainings": [tier_report.to_json(training, ranks) for training, ranks in pairs]}


def check_curve_options(args: argparse.Namespace, row_bytes: int) -> None:
    """Raise ConfigError or PolicyError for options of the curves that are wrong. ``row_bytes``: of rows, if
    the options do not say."""
    from cache_policies import get_admission

    from ._hit_rate_answer import parse_depth, parse_sample, parse_sizes, parse_window

    policies = chosen_policies(args.policies or DEFAULT_POLICIES)
    args.row_bytes = row_bytes if args.row_bytes is None else args.row_bytes
    for size in parse_sizes(args.sizes or DEFAULT_SIZES):
        for policy in policies:
            size.rows(1, args.row_bytes, policy)  # refuses bytes that hold no row
    if args.io_dir is not None:
        with option_errors("--io-dir", Path(args.io_dir)), TemporaryDirectory(dir=args.io_dir):
            pass
    parse_depth(args.depth)
    parse_window(args.window)
    parse_sample(args.sample)
    get_admission(args.admission)


def answer_curves(
    args: argparse.Namespace, source: Trace, curves_file: JsonFile | None, trainings: list[Training]
) -> dict[str, Any]:
    """Simulate policies by cache size, print and draw their misses, and return them."""
    from cache_policies import prepare

    from . import _hit_rate_plot as plot
    from . import _hit_rate_report as report
    from ._hit_rate_answer import parse_sizes, simulate_all

    policies, sizes = (
        chosen_policies(args.policies or DEFAULT_POLICIES),
        parse_sizes(args.sizes or DEFAULT_SIZES),
    )
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
    if curves_file and tables:
        from tierstore.trace import planner_input

        curves_file.write(planner_input(source, tables))
    if args.plot:
        marks = [plot.Mark(*budget) for budget in (trainings[0].budgets() if trainings else [])]
        if advice:
            marks.append(plot.Mark(f"recommended ({advice.policy})", advice.size_bytes))
        plot.draw(answer, args.plot, marks)
    return report.to_json(answer, advice, tables)


def chosen_policies(text: str) -> list[Policy]:
    """Return online policies by name; Belady's optimum is simulated in any case."""
    import cache_policies

    names = cache_policies.names() if text == "all" else text.replace(" ", "").split(",")
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
