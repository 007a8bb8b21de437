"""``tierstore verify DIR``: checks that every byte of a store is as it was written."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tierstore.cli import sharded
from tierstore.cli.messages import results_console
from tierstore.cli.storage import EXIT_DAMAGED, add_command, print_json, progress_of
from tierstore.config import format_bytes

if TYPE_CHECKING:
    from tierstore.store import Damage, VerifyReport

_MAX_SHOWN = 50


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    return add_command(
        subparsers,
        "verify",
        "check every byte of a store and name what is damaged",
        "Read everything that the kept commits of a store have on disk: every record against its checksum, "
        "every footer, the manifest, and the saved index against the records. The report names what is "
        "damaged: file, offset, whose rows, which commits, and what to do. The command changes nothing, so "
        "the directory may be read-only; a store that is in use is refused. Engines other than native are "
        "checked as far as they can be: rocksdb by the checksums of its blocks, memory by the checksums "
        "of its files, lmdb, which has none, by reading all rows. Of the folder of a sharded training the "
        "stores of all ranks are checked, and that each has the commit of all ranks.",
        ["tierstore verify runs/42/store", "tierstore verify runs/42/store --json | jq .damage"],
    )


def run(args: argparse.Namespace) -> int:
    from tierstore.store import verify

    if sharded.is_sharded(args.directory):
        return _verify_ranks(args)
    with progress_of("verifying", "bytes") as progress:
        report = verify(args.directory, progress)
    if args.json:
        print_json(report.to_dict())
    else:
        _print(report)
    return 0 if report.ok else EXIT_DAMAGED


def _verify_ranks(args: argparse.Namespace) -> int:
    """Check the folder of a sharded training."""
    reports, lost = sharded.verify(args.directory)
    sound = not lost and all(report.ok for report in reports)
    if args.json:
        print_json({"ok": sound, "lost": lost, "ranks": [report.to_dict() for report in reports]})
        return 0 if sound else EXIT_DAMAGED
    for report in reports:
        _print(report)
    console = results_console()
    for text in lost:
        console.print(f"LOST: {text}", style="red")
    if not lost:
        console.print(f"the commit of all ranks is whole in {len(reports)} stores", style="green")
    return 0 if sound else EXIT_DAMAGED


def _print(report: VerifyReport) -> None:
    console = results_console()
    commits = ", ".join(map(str, report.commits)) or "none"
    console.print(
        f"{report.path}: engine {report.engine}, {report.files:,} files, {format_bytes(report.bytes)}, "
        f"{report.rows:,} row versions, kept commits: {commits}"
    )
    for names, what in (
        (report.leftovers, "left by a crash, the next opening removes them"),
        (report.foreign, "not of the store"),
    ):
        if names:
            console.print(f"note: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}: {what}")
    if report.ok:
        console.print("intact: everything is as it was written", style="green")
        return
    console.print(f"DAMAGED in {report.damage_total:,} place{'s' * (report.damage_total != 1)}:", style="red")
    for damage in report.damage[:_MAX_SHOWN]:
        _print_damage(console, damage)
    if report.damage_total > _MAX_SHOWN:
        console.print(f"  … and {report.damage_total - _MAX_SHOWN:,} more (--json has up to 1,000)")
    console.print("What to do:")
    for line in report.advice():
        console.print(f"  {line}")


def _print_damage(console: Any, damage: Damage) -> None:
    where = f"{damage.file}, offset {damage.offset}, {damage.bytes:,} bytes" if damage.bytes else damage.file
    console.print(f"  {where}: {damage.what}")
    details = []
    if damage.rows:
        details.append(f"rows: {'; '.join(damage.rows)}")
    elif damage.tables:
        details.append(f"tables that may have rows there: {', '.join(damage.tables)}")
    if damage.commits:
        details.append(f"commits: {', '.join(map(str, damage.commits))}")
    if not damage.lost:
        details.append("nothing is lost by it")
    for detail in details:
        console.print(f"      {detail}")
