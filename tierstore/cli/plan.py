"""``tierstore plan``: cuts, ranks and bytes per tier for a model's tables on given machines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.config import format_bytes, parse_bytes
from tierstore.errors import ConfigError, InfeasiblePlanError
from tierstore.result_file import JsonFile

if TYPE_CHECKING:
    from rich.console import Console

_MOST_ROWS, _MOST_WHYS = 40, 15
EXIT_INFEASIBLE = 1


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="plan where tables go: cuts, ranks, bytes of each tier",
        description="Plans how each table is cut, which ranks hold it, and its bytes in each tier. "
        "Exit code 1 when the tables do not fit. docs/planner.md explains files, model and report.",
    )
    parser.add_argument("--tables", type=Path, required=True, metavar="YAML", help="list of tables")
    parser.add_argument(
        "--topology", type=Path, required=True, metavar="YAML", help="the machines; JSON works too"
    )
    parser.add_argument("--constraints", type=Path, metavar="YAML", help="demands by table name")
    parser.add_argument("--stats", type=Path, metavar="JSON", help="recorded miss-ratio curves")
    parser.add_argument(
        "--batch-size", type=int, default=512, help="examples per rank and step (default: 512)"
    )
    parser.add_argument("--dense-seconds", type=float, default=0.0, help="compute of the dense part per step")
    parser.add_argument(
        "--dense-memory", default="0", help="device memory of the dense part, as bytes or 4GiB"
    )
    parser.add_argument("--depth", type=int, default=1, help="batches fetched ahead (default: 1)")
    parser.add_argument(
        "--rows-per-read",
        type=float,
        help="random reads that one SSD read does for (default: predicted on the CPU, else 1)",
    )
    parser.add_argument(
        "--search-seconds", type=float, default=5.0, help="most time for the search (default: 5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan and its report there")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw fills and stage times (png, pdf, svg)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from tierstore.planner import EmbeddingShardingPlanner, Topology, Workload
    from tierstore.planner.tables import constraints_of_yaml, specs_of_yaml, stats_of_json

    console = Console(highlight=False)
    json_file = JsonFile(args.json) if args.json else None
    topology = Topology.from_dict(read_yaml(args.topology))
    work = Workload(
        batch_size=args.batch_size,
        dense_seconds=args.dense_seconds,
        dense_bytes=parse_bytes(args.dense_memory, "--dense-memory"),
        depth=args.depth,
        rows_per_read=args.rows_per_read,
    )
    planner = EmbeddingShardingPlanner(
        topology,
        constraints_of_yaml(read_yaml(args.constraints)) if args.constraints else None,
        workload=work,
        stats=stats_of_json(read_json(args.stats)) if args.stats else None,
        search_seconds=args.search_seconds,
    )
    try:
        report: dict[str, Any] = dict(planner.plan(specs_of_yaml(read_yaml(args.tables))).report)
        failure = None
    except InfeasiblePlanError as error:
        report, failure = error.report, str(error)
    if json_file:
        json_file.write(report)
    print_report(console, report)
    if args.plot:
        draw(report, args.plot)
        console.print(f"drawn: {args.plot}")
    if failure:
        console.print(f"[bold red]infeasible[/]: {failure}", soft_wrap=True)
        return EXIT_INFEASIBLE
    return 0


def read_yaml(path: Path) -> Any:
    """A YAML (or JSON) file with plain types only. Raises ConfigError that names the file."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def print_report(console: Console, report: dict[str, Any]) -> None:
    """The plan as tables on the terminal."""
    _print_tables(console, report["tables"])
    _print_places(console, report)
    state = "fits" if report["feasible"] else "does not fit"
    console.print(
        f"[bold]{state}[/]; predicted step {_ms(report['predicted_step_s'])}; {report['binding_detail']}; "
        f"planned in {report['plan_seconds']:.2f} s",
        soft_wrap=True,
    )
    if report["what_would_help"]:
        console.print("[bold]what would help most[/] (same cuts, caches divided anew):")
        for item in report["what_would_help"][:5]:
            console.print(f"  {item['change']}: {item['step_change']:+.1%} step")
    if report["assumed_rates"]:
        console.print(
            f"[yellow]assumed, not measured[/]: {', '.join(report['assumed_rates'])} "
            "(tierstore bench device measures this machine's)",
            soft_wrap=True,
        )


def _print_tables(console: Console, tables: list[dict[str, Any]]) -> None:
    from rich.table import Table

    view = Table(title=f"{len(tables)} tables, largest first", title_justify="left")
    for name in ("table", "cut", "ranks", "hbm", "uvm", "ssd", "hit rate"):
        view.add_column(name, justify="left" if name in ("table", "cut", "ranks") else "right")
    sums = [
        [sum(s[key] for s in t["shards"]) for key in ("hbm_bytes", "uvm_bytes", "ssd_bytes")] for t in tables
    ]
    order = sorted(range(len(tables)), key=lambda i: -sum(sums[i]))
    for i in order[:_MOST_ROWS]:
        table = tables[i]
        view.add_row(
            table["name"],
            table["sharding_type"],
            _ranks_text([shard["rank"] for shard in table["shards"]]),
            *(format_bytes(size) for size in sums[i]),
            f"{table['predicted_hit_rate']:.1%}",
        )
    console.print(view)
    if len(tables) > _MOST_ROWS:
        console.print(f"... and {len(tables) - _MOST_ROWS} more (--json has all)")
    console.print("[bold]why they are there[/]")
    for i in order[:_MOST_WHYS]:
        console.print(f"  {tables[i]['name']}: {tables[i]['why']}", soft_wrap=True)


def _print_places(console: Console, report: dict[str, Any]) -> None:
    from rich.table import Table

    for kind, fills in (("rank", ("hbm",)), ("host", ("host_memory", "ssd"))):
        places = report[f"{kind}s"]
        stages = list(places[0]["stage_seconds"])
        view = Table(
            title=f"{len(places)} {kind}{'s' * (len(places) > 1)}, slowest first", title_justify="left"
        )
        for name in (kind, *fills, *stages):
            view.add_column(name.replace("_", " "), justify="right")
        order = sorted(places, key=lambda place: -max(place["stage_seconds"].values()))
        for place in order[:16]:
            sizes = [f"{format_bytes(place[f'{f}_bytes'])} ({place[f'{f}_fill']:.0%})" for f in fills]
            view.add_row(str(place[kind]), *sizes, *(_ms(place["stage_seconds"][stage]) for stage in stages))
        console.print(view)


def _ranks_text(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    text = ",".join(map(str, ranks[:6]))
    return text if len(ranks) <= 6 else f"{text},... ({len(ranks)})"


def _ms(seconds: float) -> str:
    """Milliseconds, or microseconds where that is shorter: columns are narrow."""
    return f"{seconds * 1e6:.2g} us" if 0 < seconds < 1e-4 else f"{seconds * 1e3:.3g} ms"


def draw(report: dict[str, Any], path: Path) -> None:
    """Fill of every memory and time of every stage, as a figure. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install tierstore[plot]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks, hosts = report["ranks"], report["hosts"]
    figure, (fills, times) = pyplot.subplots(2, 1, figsize=(10, 7), layout="constrained")
    spots = [rank["rank"] for rank in ranks]
    per_host = len(ranks) // len(hosts)
    middle = [host["host"] * per_host + (per_host - 1) / 2 for host in hosts]
    fills.bar(spots, [100 * rank["hbm_fill"] for rank in ranks], 0.8, label="hbm")
    for key, shift in (("host_memory", -0.2), ("ssd", 0.2)):
        at = [m + shift * per_host for m in middle]
        fills.bar(at, [100 * host[f"{key}_fill"] for host in hosts], 0.3 * per_host, alpha=0.5, label=key)
    fills.set(xlabel="rank", ylabel="fill, %", title="Memory in use")
    fills.legend()
    for stage in ranks[0]["stage_seconds"]:
        times.plot(spots, [1e3 * rank["stage_seconds"][stage] for rank in ranks], ".-", label=stage)
    for stage in hosts[0]["stage_seconds"]:
        times.plot(middle, [1e3 * host["stage_seconds"][stage] for host in hosts], "s--", label=stage)
    times.axhline(1e3 * report["predicted_step_s"], color="black", linewidth=0.8)
    times.set(
        xlabel="rank", ylabel="ms per step", title="Predicted stages; the line is the step", ylim=(0, None)
    )
    times.legend()
    figure.savefig(path)
    pyplot.close(figure)
