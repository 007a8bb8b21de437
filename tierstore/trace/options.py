"""Command line options that name a trace, for all commands that read one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.trace.trace import Trace


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a trace; ``open_source`` reads them."""
    parser.add_argument("source", metavar="SOURCE", help="a trace file, or a dataset as synthetic:zipf:0.95")
    parser.add_argument("--batch-size", type=int, default=4096, metavar="N", help="examples per batch (4096)")
    parser.add_argument("--batches", type=int, metavar="N", help="read at most N batches")
    parser.add_argument("--columns", metavar="A,B", help="columns to read of CSV and parquet files")
    data = parser.add_argument_group("options of datasets (docs/reference/datasets.md)")
    data.add_argument("--data-path", metavar="PATH", help="file or folder of recorded data")
    data.add_argument("--seed", type=int, default=0, metavar="N", help="seed of generated data (default: 0)")
    data.add_argument("--tables", type=int, metavar="N", help="number of tables of generated data")
    data.add_argument("--rows", type=int, metavar="N", help="rows per table of generated data")
    data.add_argument("--max-rows", type=int, metavar="N", help="rows of the largest table")
    data.add_argument("--hotness", type=float, metavar="X", help="mean ids per example and table")
    data.add_argument("--drift", type=float, metavar="X", help="share of the rows that change per batch")


def open_source(args: argparse.Namespace) -> Trace:
    """Open the trace that the options of ``add_source`` name."""
    from tierstore.trace import open_trace

    options = {
        name: getattr(args, name)
        for name in ("tables", "rows", "max_rows", "hotness", "drift")
        if getattr(args, name) is not None
    }
    return open_trace(
        args.source,
        batch_size=args.batch_size,
        batches=args.batches,
        columns=args.columns.split(",") if args.columns else None,
        path=args.data_path,
        seed=args.seed,
        **options,
    )
