"""``tierstore trace record|describe``: traces of embedding lookups (docs/reference/traces.md)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tierstore.result_file import JsonFile, ResultFile
from tierstore.trace.options import add_source, open_source


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace",
        help="record or describe which rows the batches use",
        description="Record or describe which rows of the embedding tables the batches use.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    describe = actions.add_parser("describe", help="unique ratio, reuse, popularity, drift of a trace")
    add_source(describe)
    describe.add_argument("--json", type=Path, metavar="FILE", help="write the description here too")
    record = actions.add_parser("record", help="write a trace to a file, in full or sampled")
    add_source(record)
    record.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="the file to write")
    record.add_argument(
        "--rate",
        type=float,
        default=1.0,
        metavar="R",
        help="share of the rows to keep, by a hash (default: 1)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    return _describe(args) if args.action == "describe" else _record(args)


def _describe(args: argparse.Namespace) -> int:
    from tierstore.trace import describe

    json_file = JsonFile(args.json) if args.json else None
    trace = open_source(args)
    with _progress("reading", trace.num_batches) as advance:
        description = describe(trace, advance)
    if json_file:
        json_file.write(description.to_json())
    _print(description)
    return 0


def _record(args: argparse.Namespace) -> int:
    from tierstore.trace import TraceRecorder

    out = ResultFile(args.out, "--out")
    trace = open_source(args)
    known = dict(zip(trace.tables, trace.num_embeddings or (0,) * len(trace.tables), strict=True))
    with (
        out.written() as path,  # not to SOURCE, which may be the same file
        TraceRecorder(path, known, args.rate, compress=True) as recorder,
        _progress("recording", trace.num_batches) as advance,
    ):
        for segments in trace.batches():
            recorder.record({trace.tables[table]: ids for table, ids in segments})
            advance(recorder.batches)
    print(f"{args.out}: {recorder.batches:,} batches, {args.out.stat().st_size / 1e6:,.1f} MB")
    return 0


def _progress(text: str, total: int | None) -> Any:
    from contextlib import contextmanager

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from tierstore.cli.messages import terminal_bars

    @contextmanager
    def shown() -> Any:
        columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with terminal_bars(*columns) as progress:
            task = progress.add_task(text, total=total)
            yield lambda done: progress.update(task, completed=done)

    return shown()


def _print(d: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from tierstore.trace.description import REUSE_EDGES

    lines = [
        f"{d.name}: {d.tables} tables, {d.batches:,} batches, "
        f"{d.accesses:,} accesses to {d.footprint:,} rows",
        f"unique ratio of a batch {d.unique_ratio:.3f}; {d.used_once:.1%} of the rows are used once",
        "share of accesses to the most used rows: "
        + ", ".join(f"top {share}: {value:.1%}" for share, value in d.coverage.items()),
    ]
    if d.drift is not None:
        lines.append(f"drift: early favourites lose {d.drift:.1%} of their share of accesses until the end")
    if d.zipf:
        lines.append(
            f"Zipf-Mandelbrot over all tables: (rank + {d.zipf.q:g})^-{d.zipf.s:g}, from {d.zipf.rows:,} "
            f"rows used at least {d.zipf.min_uses} times"
        )
    print(*lines, sep="\n")
    table = Table(
        "used per batch", "rows", "accesses", title="reuse within a batch (mean)", title_justify="left"
    )
    edges = [*(f"up to {edge:,}" for edge in REUSE_EDGES), "more"]
    for edge, rows, accesses in zip(edges, d.rows_by_reuse, d.accesses_by_reuse, strict=True):
        if rows or accesses:
            table.add_row(edge, f"{rows:.1%}", f"{accesses:.1%}")
    Console(file=sys.stdout, highlight=False).print(table)
