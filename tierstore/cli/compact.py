"""``tierstore compact DIR``: win back the space of superseded rows."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tierstore.cli.storage import add_command, print_json, run_while_waiting
from tierstore.config import format_bytes
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.store import DirectoryStore

_KEEP_ALL = 1 << 30
_SHARDED = "COMMIT.json"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    return add_command(
        subparsers,
        "compact",
        "win back the space of superseded rows",
        "Copies the newest rows out of files that hold few of them, and removes those files. A native "
        "store does so by itself while it is written to; this goes further. The last commit is "
        "replaced by a new one with the same rows, tag and meta; other kept commits stay, with all "
        "files that they need (tierstore commits DIR --drop). On the way the device needs room for "
        "the live rows once more. An interrupted run leaves the store as it was. lmdb and memory have "
        "nothing to compact; lmdb reuses its free pages, and export and import shrink its file.",
        ["tierstore compact runs/42/store"],
    )


def run(args: argparse.Namespace) -> int:
    from tierstore.cli.inspect import file_bytes
    from tierstore.store import open_store, read_identity

    identity = read_identity(args.directory)
    if any((parent / _SHARDED).exists() for parent in args.directory.absolute().parents[:3]):
        raise ConfigError(
            f"{args.directory} is a rank's part of a sharded table, whose commit names this store's by "
            "number; compact it by training on, or by exporting"
        )
    before = file_bytes(args.directory, identity)
    with open_store(args.directory, keep=_KEEP_ALL) as store:
        commits = run_while_waiting("compacting", lambda: _compact(store), store.close)
    after = file_bytes(args.directory, identity)
    if args.json:
        print_json(
            {"path": str(args.directory), "bytes_before": before, "bytes_after": after, "commits": commits}
        )
    else:
        kept = f"; {commits - 1} older commits keep what they need" if commits > 1 else ""
        print(f"{args.directory}: {format_bytes(before)} before, {format_bytes(after)} now{kept}")
    return 0


def _compact(store: DirectoryStore) -> int:
    """Compact, move the last commit to the result, and return how many commits are kept."""
    commits = store.commits()
    if commits and store.engine in ("native", "rocksdb"):
        store.compact()
        last = commits[-1]
        store.commit(last.meta, last.tag or None)
        store.drop_commit(last.id)
    return len(commits)
