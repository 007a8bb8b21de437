"""``tierstore inspect DIR``: what a store directory holds."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.cli import sharded
from tierstore.cli.commits import print_commits
from tierstore.cli.messages import results_console
from tierstore.cli.storage import (
    COMMIT,
    add_command,
    check_unambiguous,
    describe_commit,
    folder_bytes,
    parse_commit,
    print_json,
    read_meta,
)
from tierstore.config import format_bytes
from tierstore.errors import StoreIOError, StoreLockedError

if TYPE_CHECKING:
    from tierstore.store import CommitInfo, StoreIdentity, StoreStats


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers,
        "inspect",
        "print what a store directory holds",
        "Print what a store directory holds: engine, tables, rows, bytes, commits. The command changes "
        "nothing, so the directory may be read-only. Of a store that is in use the command prints the tables "
        "only. Of the folder of a sharded training it prints whole tables, and how they are cut.",
        ["tierstore inspect runs/42/store", "tierstore inspect runs/42/store --at best --count --json"],
    )
    parser.add_argument(
        "--count", action="store_true", help="count the rows of each table too (reads every key)"
    )
    parser.add_argument(
        "--at",
        metavar="COMMIT",
        type=parse_commit,
        default=0,
        help=f"the commit to look at, {COMMIT}; the last one unless given",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    from tierstore.store import open_store, read_identity

    if sharded.is_sharded(args.directory):
        return sharded.inspect(args)
    identity = read_identity(args.directory)
    stats, meta, commits, rows, obstacle = None, b"", [], {}, ""
    try:
        with open_store(args.directory, read_only=True, at=args.at) as store:
            check_unambiguous(store.commits(), args.at, args.directory)
            stats, meta, commits = store.stats(), store.meta(), store.commits()
            if args.count:
                rows = {spec.name: store.count(spec.index) for spec in identity.tables}
    except (StoreLockedError, StoreIOError) as error:
        obstacle = str(error)
    if args.json:
        print_json(_describe(args.directory, identity, stats, commits, rows, obstacle))
    else:
        _print(args.directory, identity, stats, meta, commits, rows, obstacle)
    return 0


def file_bytes(directory: Path, identity: StoreIdentity) -> int:
    """Return the bytes that all files below the store's folders occupy, each file once."""
    return folder_bytes([directory, *(Path(device.path) for device in identity.devices[1:])])


def _describe(
    directory: Path,
    identity: StoreIdentity,
    stats: StoreStats | None,
    commits: list[CommitInfo],
    rows: Mapping[str, int],
    obstacle: str,
) -> dict[str, Any]:
    return {
        "path": str(directory),
        "engine": identity.engine,
        "format": identity.format,
        "further_paths": [device.path for device in identity.devices[1:]],
        "file_bytes": file_bytes(directory, identity),
        "not_opened": obstacle or None,
        "rows": stats.rows if stats else None,
        "live_bytes": stats.live_bytes if stats else None,
        "index_bytes": stats.index_bytes if stats else None,
        "commits": [describe_commit(commit) for commit in commits],
        "tables": [{**asdict(spec), "rows": rows.get(spec.name)} for spec in identity.tables],
    }


def _print(
    directory: Path,
    identity: StoreIdentity,
    stats: StoreStats | None,
    meta: bytes,
    commits: list[CommitInfo],
    rows: Mapping[str, int],
    obstacle: str,
) -> None:
    console = results_console()
    console.print(f"{directory}: store of engine {identity.engine}, format {identity.format}")
    for device in identity.devices[1:]:
        console.print(f"spread over: {device.path}")
    console.print(f"files: {format_bytes(file_bytes(directory, identity))}")
    if stats is None:
        console.print(f"rows: not read, since {obstacle}")
    else:
        live, index = format_bytes(stats.live_bytes), format_bytes(stats.index_bytes)
        console.print(f"rows: {stats.rows:,}, {live}; index {index}")
        for line in _meta_lines(meta):
            console.print(line)
    if len(commits) > 1 or any(commit.tag for commit in commits):
        print_commits(console, commits)
    _print_tables(console, identity, rows)


def _meta_lines(meta: bytes) -> list[str]:
    """Return the meta that a training run wrote with its commit, one fact per line."""
    extra = read_meta(meta)
    if extra is None:
        return ["commit: none, or one without training counters"]
    if isinstance(extra, dict):
        return ["commit:", *(f"  {name}: {value}" for name, value in extra.items())]
    return [f"commit: {extra}"]


def _print_tables(console: Any, identity: StoreIdentity, rows: Mapping[str, int]) -> None:
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("table", no_wrap=True)
    narrow = any(not spec.format.is_wide for spec in identity.tables)
    dtype = ["dtype"] if narrow else []
    for title in ["ids", "dim", "row bytes", *dtype, *(["rows stored"] if rows else [])]:
        grid.add_column(title, justify="right")
    grid.add_column("optimizer")
    for spec in identity.tables:
        counted = [f"{rows[spec.name]:,}"] if rows else []
        optimizer = str(spec.optimizer.get("name", dict(spec.optimizer)))
        grid.add_row(
            spec.name,
            f"{spec.num_embeddings:,}",
            f"{spec.embedding_dim}",
            f"{spec.row_bytes}",
            *([spec.weight_dtype] if narrow else []),
            *counted,
            optimizer,
        )
    console.print(grid)
