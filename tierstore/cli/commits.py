"""``tierstore commits DIR``: the kept commits of a store."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.cli import sharded
from tierstore.cli.messages import results_console
from tierstore.cli.storage import (
    COMMIT,
    add_command,
    check_unambiguous,
    describe_commit,
    list_commits,
    parse_commit,
    print_json,
    read_meta,
    short,
    time_of,
)

if TYPE_CHECKING:
    from tierstore.store import CommitInfo

_KEEP_ALL = 1 << 30


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers,
        "commits",
        "list the kept commits of a store",
        "List the commits that a store keeps: the last ones, and each with a tag. A commit can be opened "
        "(open_store(DIR, at=…)) or exported (tierstore export --at). Without --drop the command changes "
        "nothing, so the directory may be read-only, and a native store may be in use. Of the folder of a "
        "sharded training the command prints the last commit of all ranks.",
        ["tierstore commits runs/42/store", "tierstore commits runs/42/store --drop best"],
    )
    parser.add_argument(
        "--drop",
        metavar="COMMIT",
        type=parse_commit,
        help=f"drop this commit, {COMMIT}, and win back the space that only it needs; not the newest",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    if sharded.is_sharded(args.directory):
        return sharded.commits(args)
    if args.drop is not None:
        _drop(args.directory, args.drop)
    commits, note = list_commits(args.directory)
    if args.json:
        print_json([describe_commit(commit) for commit in commits])
        return 0
    console = results_console()
    if note:
        console.print(f"note: {note}")
    if commits:
        print_commits(console, commits)
    else:
        console.print(f"{args.directory}: no commit yet")
    return 0


def print_commits(console: Any, commits: list[CommitInfo]) -> None:
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("commit", justify="right", no_wrap=True)
    grid.add_column("tag", overflow="fold")  # a narrow terminal folds this column and the last one
    grid.add_column("made at", no_wrap=True)
    grid.add_column("meta", overflow="fold")
    for commit in commits:
        grid.add_row(str(commit.id), commit.tag, time_of(commit)[:19], short(read_meta(commit.meta)))
    console.print(grid)


def _drop(directory: Path, commit: int | str) -> None:
    from tierstore.store import open_store
    from tierstore.store.commits import find_commit

    with open_store(directory, keep=_KEEP_ALL) as store:
        check_unambiguous(store.commits(), commit, directory)
        store.drop_commit(find_commit(store.commits(), commit, directory).id)
