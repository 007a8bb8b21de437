"""``tierstore import EXPORT DIR``: a store from a portable copy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tierstore.cli.storage import add_command, print_json, progress_of
from tierstore.config import ENGINE_NAMES, parse_bytes


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers,
        "import",
        "make a store, of any engine, from an export",
        "Make the new store directory DIR from EXPORT, a folder that tierstore export wrote: same "
        "tables, same rows bit for bit, in one commit with the same tag and meta. All checksums are "
        "checked, nothing in EXPORT is trusted, and DIR appears only when it is complete.",
        [
            "tierstore import /backup/run42 runs/43/store",
            "tierstore import /backup/run42 runs/43/store --engine lmdb --ssd 200GiB",
        ],
        directory="EXPORT",
    )
    parser.add_argument("target", metavar="DIR", type=Path, help="a new path, or an empty folder")
    parser.add_argument(
        "--engine", choices=ENGINE_NAMES, default="native", help="engine of the new store (default native)"
    )
    parser.add_argument("--ssd", metavar="SIZE", help="refuse to take more than SIZE, as in 200GiB")
    return parser


def run(args: argparse.Namespace) -> int:
    from tierstore.store import import_

    cap = None if args.ssd is None else parse_bytes(args.ssd, "--ssd")
    seen = 0

    with progress_of("importing", "rows") as progress:

        def count(done: int, total: int) -> None:
            nonlocal seen
            seen = done
            progress(done, total)

        commit = import_(args.directory, args.target, args.engine, cap, count)
    if args.json:
        print_json({"path": str(args.target), "engine": args.engine, "rows": seen, "commit": commit})
    else:
        print(f"{args.target}: {seen:,} rows in commit {commit}, engine {args.engine}")
    return 0
