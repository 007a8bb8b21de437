"""``tierstore export DIR TARGET``: a portable copy of a store."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tierstore.cli import sharded
from tierstore.cli.storage import (
    COMMIT,
    add_command,
    check_target,
    check_unambiguous,
    parse_commit,
    print_json,
    progress_of,
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = add_command(
        subparsers,
        "export",
        "write a portable copy of a commit: safetensors files and one JSON file",
        "Write all rows of a commit (ids, weights, optimizer state, by table) to the new folder "
        "TARGET, as safetensors files and EXPORT.json with their checksums; docs/reference/formats.md "
        "describes them. Memory does not grow with the store, and TARGET appears only when it is complete. "
        "The store is not changed, so its directory may be read-only; one that is in use is refused (a "
        "process that has it open can call export() itself). The folder of a sharded training is exported "
        "as whole tables, in the same format.",
        [
            "tierstore export runs/42/store /backup/run42",
            "tierstore export runs/42/store /backup/run42-best --at best",
            "tierstore import /backup/run42 runs/43/store --engine rocksdb",
        ],
    )
    parser.add_argument("target", metavar="TARGET", type=Path, help="a new path, or an empty folder")
    parser.add_argument(
        "--at",
        metavar="COMMIT",
        type=parse_commit,
        default=0,
        help=f"the commit to export, {COMMIT}; the last one unless given",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    rows, tables = sharded.export(args) if sharded.is_sharded(args.directory) else _export(args)
    if args.json:
        print_json({"target": str(args.target), "rows": rows, "tables": tables})
    else:
        print(f"{args.target}: {rows:,} rows of {tables} tables")
    return 0


def _export(args: argparse.Namespace) -> tuple[int, int]:
    from tierstore.store import open_store

    with open_store(args.directory, read_only=True, at=args.at) as store:
        check_unambiguous(store.commits(), args.at, args.directory)
        check_target(args)
        with progress_of("exporting", "rows") as progress:
            rows = store.export(args.target, progress)
        return rows, len(store.tables)
