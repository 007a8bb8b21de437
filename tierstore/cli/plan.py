"""``tierstore plan``: cuts, ranks and bytes per tier for a model's tables on given machines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.cli.plan_data import add_data, check_data, planned_data
from tierstore.config import parse_bytes
from tierstore.errors import ConfigError, InfeasiblePlanError
from tierstore.result_file import JsonFile, ResultFile, option_errors

if TYPE_CHECKING:
    from tierstore.planner import EmbeddingShardingPlanner, Topology

EXIT_INFEASIBLE = 1


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="plan where tables go: cuts, ranks, bytes of each tier",
        description="Plan how each table is cut, which ranks hold it, and its bytes in each tier. "
        "The exit code is 1 when the tables do not fit. docs/planner.md explains files, model and report.",
    )
    parser.add_argument(
        "--tables",
        metavar="YAML",
        help="list of tables; with --data the number of tables of generated data",
    )
    parser.add_argument(
        "--topology", type=Path, required=True, metavar="YAML", help="the machines; JSON works too"
    )
    parser.add_argument("--constraints", type=Path, metavar="YAML", help="demands by table name")
    parser.add_argument("--stats", type=Path, metavar="JSON", help="recorded miss-ratio curves")
    parser.add_argument(
        "--batch-size", type=int, default=512, metavar="N", help="examples per rank and step (default: 512)"
    )
    parser.add_argument(
        "--dense-seconds",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="seconds of the dense part per step (default: 0)",
    )
    parser.add_argument(
        "--dense-memory", default="0", metavar="SIZE", help="device memory of the dense part, such as 4GiB"
    )
    parser.add_argument(
        "--depth", type=int, default=1, metavar="K", help="batches fetched ahead (default: 1)"
    )
    parser.add_argument(
        "--rows-per-read",
        type=float,
        metavar="N",
        help="rows that one read of the SSD brings (default: predicted on the CPU, else 1)",
    )
    parser.add_argument(
        "--search-seconds",
        type=_seconds,
        metavar="S",
        default=5.0,
        help="most time for the search (default: 5); what would help, or what is missing, "
        "may take as much again",
    )
    add_data(parser.add_argument_group("tables of a data set"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan and its report there")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the tables in each tier, and the stages (png, pdf, svg)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape

    from tierstore.cli import plan_plot, plan_view
    from tierstore.planner import Topology

    console = Console(highlight=False)
    json_file = JsonFile(args.json) if args.json else None
    plot_file = ResultFile(args.plot, "--plot") if args.plot else None
    plot_format = plan_plot.plot_format(args.plot) if args.plot else ""
    check_data(args)
    topology = Topology.from_dict(read_yaml(args.topology, "--topology"))
    planner = _planner(args, topology, None)  # reads its files before it reads batches
    found = planned_data(args, topology.world_size) if args.data else None
    if found is not None:
        planner = _planner(args, topology, found.stats)
    tables = specs_of(Path(args.tables)) if found is None else found.tables
    try:
        simulate = None if found is None else found.simulate
        plan = planner.plan(tables, advice_seconds=args.search_seconds, simulate=simulate)
        report, failure = dict(plan.report), None
    except InfeasiblePlanError as error:
        report, failure = error.report, str(error)
    if json_file:
        json_file.write(report)
    if found is not None:
        console.print(found.summary, soft_wrap=True)
    plan_view.print_report(console, report)
    if plot_file:
        plot_file.replace(plan_plot.drawn(report, plot_format))
        console.print(f"drawn: {args.plot}", markup=False, soft_wrap=True)
    if failure:
        console.print(f"[bold red]infeasible[/]: {escape(failure)}", soft_wrap=True)
        return EXIT_INFEASIBLE
    return 0


def _planner(
    args: argparse.Namespace, topology: Topology, stats: dict[str, Any] | None
) -> EmbeddingShardingPlanner:
    """Return the planner of the options. ``stats``: curves of the tables, if ``--stats`` names none."""
    from tierstore.planner import EmbeddingShardingPlanner, Workload
    from tierstore.planner.files import constraints_of_yaml, stats_of_json

    work = Workload(
        batch_size=args.batch_size,
        dense_seconds=args.dense_seconds,
        dense_bytes=parse_bytes(args.dense_memory, "--dense-memory"),
        depth=args.depth,
        rows_per_read=args.rows_per_read,
    )
    return EmbeddingShardingPlanner(
        topology,
        constraints_of_yaml(read_yaml(args.constraints, "--constraints")) if args.constraints else None,
        workload=work,
        stats=stats_of_json(read_json(args.stats, "--stats")) if args.stats else stats,
        search_seconds=args.search_seconds,
    )


def specs_of(path: Path) -> list[Any]:
    """Return the tables of a tables.yaml."""
    from tierstore.planner.files import specs_of_yaml

    return specs_of_yaml(read_yaml(path, "--tables"))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value


def read_yaml(path: Path, option: str = "file") -> Any:
    """Read a YAML (or JSON) file with plain types only; raise a ConfigError that names the file."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses keys that are there twice: YAML takes the last one, and a table's demands are lost."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
            doubled = sorted({key for key in keys if keys.count(key) > 1})
            if doubled:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{doubled} are there more than once", node.start_mark
                )
            return super().construct_mapping(node, deep)

    try:
        with option_errors(option, path):
            return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def read_json(path: Path, option: str = "file") -> Any:
    try:
        with option_errors(option, path):
            return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
