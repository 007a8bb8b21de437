"""``tierstore inspect DIR``: what a store directory holds."""

from __future__ import annotations

import argparse
import fcntl
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.config import format_bytes
from tierstore.errors import StoreIOError, StoreLockedError

if TYPE_CHECKING:
    from tierstore.store import DirectoryStore, StoreIdentity

_NO_CAP = 1 << 62


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="print what a store directory holds",
        description="Prints what a store directory holds: engine, tables, rows, bytes. The last commit stays "
        "as it is; what a crash left behind uncommitted goes, as at any opening.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument(
        "--count", action="store_true", help="count the rows of each table too (reads every key)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from tierstore.store import read_identity

    console = Console(highlight=False, markup=False, soft_wrap=True)
    identity = read_identity(args.directory)
    console.print(f"{args.directory}: store of engine {identity.engine}, format {identity.format}")
    console.print(f"files: {format_bytes(_file_bytes(args.directory))}")
    rows: Mapping[str, int] = {}
    try:
        store = _open(args.directory, identity)
    except (StoreLockedError, StoreIOError) as error:
        console.print(f"rows: not read, since {error}")
    else:
        with store:
            _print_stats(console, store)
            if args.count:
                rows = {
                    spec.name: sum(len(keys) for keys in store.keys(spec.index)) for spec in identity.tables
                }
    _print_tables(console, identity.tables, rows)
    return 0


def _open(directory: Path, identity: StoreIdentity) -> DirectoryStore:
    from tierstore.store import open_store

    if identity.engine == "memory":
        raise StoreIOError("engine memory keeps no rows on disk")
    # Asked first without writing anything, since opening writes the process id into the lock file.
    with open(directory / "LOCK", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read(20).decode("ascii", "replace").strip()
            raise StoreLockedError(f"it is in use by process {holder}") from None
    return open_store(directory, identity.engine, identity.tables, _NO_CAP)


def _file_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # the store may be in use, and its files come and go
            total += path.lstat().st_blocks * 512
    return total


def _print_stats(console: Any, store: DirectoryStore) -> None:
    stats = store.stats()
    console.print(
        f"rows: {stats.rows:,}, {format_bytes(stats.live_bytes)}; index {format_bytes(stats.index_bytes)}"
    )
    for line in _commit_lines(store.meta()):
        console.print(line)


def _commit_lines(meta: bytes) -> list[str]:
    """What a training run said of its last commit, one fact a line."""
    if not meta:
        return ["last commit: none, or one without training counters"]
    try:
        said = json.loads(meta)
    except ValueError:
        return [f"last commit: {len(meta)} bytes that are not tierstore's own"]
    facts = said.get("extra") or said if isinstance(said, dict) else {"content": said}
    return ["last commit:", *(f"  {name}: {value}" for name, value in facts.items())]


def _print_tables(console: Any, tables: Sequence[Any], rows: Mapping[str, int]) -> None:
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("table", no_wrap=True)
    for title in ["ids", "dim", "row bytes", *(["rows stored"] if rows else [])]:
        grid.add_column(title, justify="right")
    grid.add_column("optimizer")
    for spec in tables:
        counted = [f"{rows[spec.name]:,}"] if rows else []
        optimizer = str(spec.optimizer.get("name", dict(spec.optimizer)))
        grid.add_row(
            spec.name,
            f"{spec.num_embeddings:,}",
            f"{spec.embedding_dim}",
            f"{spec.row_bytes}",
            *counted,
            optimizer,
        )
    console.print(grid)
