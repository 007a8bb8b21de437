"""Command line options that name a trace, for all commands that read one."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tierstore.trace.columns import ColumnsNeeded

if TYPE_CHECKING:
    from tierstore.trace.trace import Trace


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a trace; ``open_source`` reads them."""
    parser.add_argument("source", metavar="SOURCE", help="a trace file, or a dataset as synthetic:zipf:0.95")
    parser.add_argument("--batch-size", type=int, default=4096, metavar="N", help="examples per batch (4096)")
    parser.add_argument("--batches", type=int, metavar="N", help="read at most N batches")
    parser.add_argument(
        "--columns",
        metavar="A,B",
        help="columns of CSV, JSON lines, parquet and .npz files that are tables, or all",
    )
    data = parser.add_argument_group("options of datasets (docs/reference/datasets.md)")
    data.add_argument("--data-path", metavar="PATH", help="file or folder of recorded data")
    data.add_argument("--seed", type=int, default=0, metavar="N", help="seed of generated data (default: 0)")
    data.add_argument("--tables", type=int, metavar="N", help="number of tables of generated data")
    data.add_argument("--rows", type=int, metavar="N", help="rows per table of generated data")
    data.add_argument("--max-rows", type=int, metavar="N", help="rows of the largest table")
    data.add_argument("--pooling-factor", type=float, metavar="X", help="mean ids per example and table")
    data.add_argument("--drift", type=float, metavar="X", help="share of the rows that change per batch")


def open_source(args: argparse.Namespace) -> Trace:
    """Open the trace that the options of ``add_source`` name."""
    from tierstore.trace import open_trace

    options = {
        name: getattr(args, name)
        for name in ("tables", "rows", "max_rows", "pooling_factor", "drift")
        if getattr(args, name) is not None
    }

    def opened(columns: str | None) -> Trace:
        return open_trace(
            args.source,
            batch_size=args.batch_size,
            batches=args.batches,
            columns=None if columns is None else [name.strip() for name in columns.split(",")],
            path=args.data_path,
            seed=args.seed,
            **options,
        )

    try:
        return opened(args.columns)
    except ColumnsNeeded as needed:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        return opened(asked(needed))


def asked(needed: ColumnsNeeded) -> str:
    """Ask on the terminal which columns are tables; an empty answer takes the suggested ones."""
    suggested = ",".join(needed.suggested)
    print(needed.listed, file=sys.stderr)
    print(f"Which of them are ids of tables? [{suggested}] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or suggested
