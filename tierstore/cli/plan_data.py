"""``tierstore plan --data``: the tables of a data set of ``tierstore train``, and what batches use."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from cache_policies import PreparedTrace
    from tierstore.planner import TableSpec
    from tierstore.trace import Trace


@dataclass(frozen=True)
class PlannedData:
    """Tables, their recorded curves for the planner, and a line that says where both come from."""

    tables: list[TableSpec]
    stats: dict[str, Any]
    summary: str


def add_data(group: Any) -> None:
    """Add the options that name a data set, as ``tierstore train`` has them."""
    group.add_argument(
        "--data",
        metavar="NAME",
        help="plan the tables of a data set of tierstore train; its batches are read for rows and misses",
    )
    group.add_argument("--data-path", type=Path, metavar="PATH", help="file or folder of the data set")
    group.add_argument("--rows", type=int, metavar="N", help="synthetic: rows per table")
    group.add_argument(
        "--max-rows", type=int, metavar="N", help="synthetic:criteo: cap of the rows per table"
    )
    group.add_argument("--steps", type=int, metavar="N", help="batches of the training (default: all)")
    group.add_argument("--dim", type=int, default=32, metavar="D", help="embedding dimension (default: 32)")
    group.add_argument(
        "--optimizer",
        default="rowwise-adagrad",
        metavar="NAME",
        help="optimizer of the rows (default: rowwise-adagrad)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of generated data (default: 0)")


def check_data(args: argparse.Namespace) -> None:
    """Raise ConfigError unless the options name either a list of tables or a data set."""
    if args.data is None:
        if args.tables is None:
            raise ConfigError("give the tables: --tables YAML, or --data NAME for those of a data set")
        for option in ("data_path", "rows", "max_rows", "steps"):
            if getattr(args, option) is not None:
                raise ConfigError(f"--{option.replace('_', '-')} is about a data set; give --data NAME, too")
        return
    if args.tables is not None and not args.tables.isdecimal():
        raise ConfigError(
            f"--tables {args.tables}: with --data it is the number of tables of generated data; leave one out"
        )
    for option in ("steps", "batch_size", "dim", "rows", "max_rows"):
        if (value := getattr(args, option)) is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} is {value}; it must be at least 1")


def planned_data(args: argparse.Namespace, ranks: int) -> PlannedData:
    """Read the batches that ``ranks`` ranks train on; return the tables, and what the batches use of them."""
    from tierstore import optim
    from tierstore.cli.setup import load_dataset, table_configs
    from tierstore.planner import TableSpec
    from tierstore.trace import from_dataset, planner_input, table_curves
    from tierstore.trace.source import first_batches

    optimizer = optim.make(args.optimizer.replace("-", "_"), lr=1.0)
    number = None if args.tables is None else int(args.tables)
    dataset = load_dataset(argparse.Namespace(**{**vars(args), "tables": number}))
    examples = args.batch_size * ranks
    trace = from_dataset(dataset, examples)
    trace = trace if args.steps is None else first_batches(trace, args.steps)
    prepared = _read(trace)
    curves = table_curves(trace, prepared)
    specs = [
        TableSpec(
            config.name,
            config.num_embeddings,
            config.embedding_dim,
            tuple(config.feature_names),
            pooling_factor=max(curve.accesses, 1e-9) / examples,
            optimizer=optimizer.name,
            touched_rows=max(1, curve.footprint),
        )
        for config, curve in zip(table_configs(dataset, args.dim), curves, strict=True)
    ]
    rows, plural = sum(spec.num_embeddings for spec in specs), "s" * (ranks > 1)
    summary = (
        f"{dataset.name}: {prepared.batches:,} batches of {examples:,} examples on {ranks} rank{plural} use "
        f"{prepared.footprint:,} of {rows:,} rows"
    )
    return PlannedData(specs, planner_input(trace, curves)["tables"], summary)


def _read(trace: Trace) -> PreparedTrace:
    """Read all batches, with a bar on a terminal. Raises ConfigError if they use no row."""
    from rich.console import Console
    from rich.progress import Progress

    from cache_policies import prepare

    with Progress(console=Console(stderr=True), transient=True) as progress:
        reading = progress.add_task("reading the batches", total=trace.num_batches)
        prepared = prepare(progress.track(trace.key_batches(), task_id=reading, total=trace.num_batches))
    if not prepared.accesses:
        raise ConfigError(f"--data {trace.name} has no examples to train on; look at its files")
    return prepared
