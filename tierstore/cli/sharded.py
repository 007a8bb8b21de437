"""``inspect``, ``verify``, ``commits``, ``export`` and ``compact`` of the folder of a sharded training."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.cli.messages import results_console
from tierstore.cli.storage import (
    check_target,
    describe_commit,
    folder_bytes,
    list_commits,
    print_json,
    progress_of,
    run_while_waiting,
    short,
    time_of,
)
from tierstore.config import format_bytes
from tierstore.errors import ConfigError, StoreIOError, StoreLockedError

if TYPE_CHECKING:
    from tierstore.sharding import StoredTables
    from tierstore.sharding.record import Saved
    from tierstore.store import VerifyReport

_RECORD = "COMMIT.json"


def is_sharded(folder: Path) -> bool:
    """Return whether ``folder`` has the tables of a sharded training."""
    return (folder / _RECORD).is_file()


def refuse_other_commits(args: argparse.Namespace, option: str, value: object) -> None:
    """Raise ConfigError for another commit than the last one of all ranks."""
    if value:
        raise ConfigError(
            f"{args.directory} holds the tables of several ranks, of which the last commit of all ranks is "
            f"kept; leave {option} out"
        )


def inspect(args: argparse.Namespace) -> int:
    """Print what the ranks' stores hold, as whole tables."""
    from tierstore.sharding import open_tables
    from tierstore.sharding.stored import rank_folders, read_commit

    refuse_other_commits(args, "--at", args.at)
    record, collections = read_commit(args.directory)
    for saved in collections.values():
        rank_folders(args.directory, saved)
    found: dict[str, Any] = {
        "path": str(args.directory),
        "engine": next(iter(collections.values())).engine,
        "ranks": len(next(iter(collections.values())).ranks),
        "commit": record["number"],
        "extra": record["extra"],
        "file_bytes": folder_bytes([args.directory]),
        "not_opened": None,
        "collections": {name: saved.folder for name, saved in collections.items()},
        "tables": [table for saved in collections.values() for table in _placements(saved)],
    }
    try:
        with open_tables(args.directory) as tables:
            _add_rows(found, tables, args.count)
    except (StoreLockedError, StoreIOError) as error:
        found["not_opened"] = str(error)
    if args.json:
        print_json(found)
    else:
        _print(found)
    return 0


def _placements(saved: Saved) -> list[dict[str, Any]]:
    return [
        {
            "name": table.name,
            "num_embeddings": table.num_embeddings,
            "embedding_dim": table.embedding_dim,
            "sharding_type": table.sharding_type.value,
            "ranks": sorted({shard.rank for shard in table.shards if shard.rows}),
        }
        for table in saved.plan.tables
    ]


def _add_rows(found: dict[str, Any], tables: StoredTables, count: bool) -> None:
    stats = tables.stats()
    found |= {"shard_rows": stats.rows, "live_bytes": stats.live_bytes, "index_bytes": stats.index_bytes}
    found["commits"] = [describe_commit(tables.commit_info())]
    for entry, spec in zip(found["tables"], tables.tables, strict=True):
        entry |= {**asdict(spec), "rows": tables.count(spec.index) if count else None}


def _print(found: Mapping[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    console = results_console()
    ranks = found["ranks"]
    console.print(f"{found['path']}: tables of {ranks} rank{'s' * (ranks > 1)}, engine {found['engine']}")
    console.print(f"files: {format_bytes(found['file_bytes'])}")
    if found["not_opened"]:
        console.print(f"rows: not read, since {found['not_opened']}")
    else:
        live, index = format_bytes(found["live_bytes"]), format_bytes(found["index_bytes"])
        console.print(f"rows of shards: {found['shard_rows']:,}, {live}; index {index}")
    console.print(f"commit of all ranks: {found['commit']}")
    for name, value in found["extra"].items():
        console.print(f"  {name}: {value}")
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("table", no_wrap=True)
    counted = any(table.get("rows") is not None for table in found["tables"])
    for title in ("ids", "dim", "cut", "ranks", *(["rows stored"] if counted else [])):
        grid.add_column(title, justify="left" if title == "cut" else "right")
    grid.add_column("optimizer")
    for table in found["tables"]:
        cells = [f"{table['num_embeddings']:,}", str(table["embedding_dim"]), table["sharding_type"]]
        stored = [f"{table['rows']:,}"] if counted else []
        optimizer = str(table.get("optimizer", {}).get("name", ""))
        grid.add_row(table["name"], *cells, str(len(table["ranks"])), *stored, optimizer)
    console.print(grid)


def commits(args: argparse.Namespace) -> int:
    """Print the commit of all ranks, and which commit of each rank's store belongs to it."""
    from tierstore.sharding.stored import rank_folders, read_commit

    refuse_other_commits(args, "--drop", args.drop)
    record, collections = read_commit(args.directory)
    lines: list[dict[str, Any]] = []
    made_at = ""
    for name, saved in collections.items():
        for rank, folder in enumerate(rank_folders(args.directory, saved)):
            kept = [] if folder is None else list_commits(folder)[0]
            named = [commit for commit in kept if commit.id == saved.ranks[rank]]
            made_at = max([made_at, *map(time_of, named)])
            tags = [commit.tag for commit in kept if commit.tag and commit not in named]
            lines.append({"collection": name, "rank": rank, "commit": saved.ranks[rank], "tags": tags})
    if args.json:
        print_json({"commit": record["number"], "time": made_at, "extra": record["extra"], "stores": lines})
        return 0
    from rich import box
    from rich.table import Table

    console = results_console()
    made = f", made at {made_at[:19]}" if made_at else ""
    console.print(f"{args.directory}: commit of all ranks {record['number']}{made}")
    if record["extra"]:
        console.print(f"extra: {short(record['extra'])}")
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("collection", "rank", "commit in its store", "other tags there"):
        grid.add_column(title, justify="right" if title in ("rank", "commit in its store") else "left")
    for line in lines:
        grid.add_row(line["collection"], str(line["rank"]), str(line["commit"]), ", ".join(line["tags"]))
    console.print(grid)
    return 0


def verify(folder: Path) -> tuple[list[VerifyReport], list[str]]:
    """Check every byte of each rank's store; return the reports, and which stores lack the commit of all
    ranks."""
    from tierstore.sharding.stored import rank_folders, read_commit
    from tierstore.store import verify as verify_store

    reports, lost = [], []
    for saved in read_commit(folder)[1].values():
        for rank, own in enumerate(rank_folders(folder, saved)):
            if own is None:
                continue
            with progress_of(f"verifying rank {rank}", "bytes") as progress:
                reports.append(verify_store(own, progress))
            if saved.ranks[rank] not in reports[-1].whole_commits:
                lost.append(f"{own}: commit {saved.ranks[rank]}, which belongs to the commit of all ranks")
    return reports, lost


def export(args: argparse.Namespace) -> tuple[int, int]:
    """Write a portable copy of the whole tables; return the number of rows and of tables."""
    from tierstore.sharding import open_tables

    refuse_other_commits(args, "--at", args.at)
    check_target(args)
    with open_tables(args.directory) as store, progress_of("exporting", "rows") as progress:
        return store.export(args.target, progress), len(store.tables)


def compact(folder: Path) -> int:
    """Compact each rank's store; return the number of stores."""
    from tierstore.sharding.compaction import compact_ranks

    return run_while_waiting("compacting", lambda: compact_ranks(folder), lambda: None)
