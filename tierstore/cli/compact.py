"""``tierstore compact DIR``: win back the space of superseded rows."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tierstore.cli import sharded
from tierstore.cli.storage import add_command, folder_bytes, print_json, run_while_waiting
from tierstore.config import format_bytes
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.store import DirectoryStore

_KEEP_ALL = 1 << 30


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    return add_command(
        subparsers,
        "compact",
        "win back the space of superseded rows",
        "Copy live rows out of segments that hold few of them, and remove these segments. A native store "
        "does so by itself while it is written to; this command goes further. The last commit is "
        "replaced by a new one with the same rows, tag and meta; other kept commits stay, with all "
        "files that these commits need (tierstore commits DIR --drop). On the way the device needs room for "
        "the live rows once more. An interrupted run leaves the store as it was. lmdb and memory have "
        "nothing to compact; lmdb reuses its free pages, and export and import shrink its file. In the "
        "folder of a sharded training the stores of all ranks are compacted, one by one.",
        ["tierstore compact runs/42/store"],
    )


def run(args: argparse.Namespace) -> int:
    sharded_folder = sharded.is_sharded(args.directory)
    before = _file_bytes(args, sharded_folder)
    if sharded_folder:
        commits = sharded.compact(args.directory)
        more = f" in the stores of {commits} ranks"
    else:
        commits = _compact_store(args)
        older = commits - 1
        many = f"{older} older commits keep what they need"
        said = "an older commit keeps what it needs" if older == 1 else many
        more = f"; {said}" if older > 0 else ""
    after = _file_bytes(args, sharded_folder)
    if args.json:
        print_json(
            {"path": str(args.directory), "bytes_before": before, "bytes_after": after, "commits": commits}
        )
    else:
        print(f"{args.directory}: {format_bytes(before)} before, {format_bytes(after)} now{more}")
    return 0


def _file_bytes(args: argparse.Namespace, sharded_folder: bool) -> int:
    from tierstore.cli.inspect import file_bytes
    from tierstore.store import read_identity

    if sharded_folder:
        return folder_bytes([args.directory])
    return file_bytes(args.directory, read_identity(args.directory))


def _compact_store(args: argparse.Namespace) -> int:
    from tierstore.store import open_store

    if above := [one for one in args.directory.absolute().parents[:3] if sharded.is_sharded(one)]:
        raise ConfigError(
            f"{args.directory} is a rank's part of sharded tables, whose commit names this store's by "
            f"number; compact the stores of all ranks by tierstore compact {above[0]}"
        )
    with open_store(args.directory, keep=_KEEP_ALL) as store:
        return run_while_waiting("compacting", lambda: _compact(store), store.close)


def _compact(store: DirectoryStore) -> int:
    """Compact, move the last commit to the result, and return how many commits are kept."""
    commits = store.commits()
    if commits and store.engine in ("native", "rocksdb"):
        store.compact()
        last = commits[-1]
        store.commit(last.meta, last.tag or None)
        store.drop_commit(last.id)
    return len(commits)
