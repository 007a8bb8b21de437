"""Parts of all commands on store directories: progress, JSON, errors of a store that is in use."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tierstore.cli.messages import terminal_bars
from tierstore.config import format_bytes
from tierstore.errors import ConfigError, InputError
from tierstore.threads import Thread

if TYPE_CHECKING:
    from tierstore.store import CommitInfo

Progress = Callable[[int, int], None]
"""Called with the amount that is done, and the amount in all."""
Result = TypeVar("Result")

COMMIT = "named by number or tag (number:N or tag:NAME where a tag has digits alone)"
"""Says in a help text how a commit is named."""
EXIT_DAMAGED = 1
_META_WIDTH = 60
LOG_INTERVAL = 5.0
"""Seconds between lines where there is no terminal."""
EXIT_CODES = """\
exit codes: 0 done, 1 damage found (verify), 2 wrong usage or an error,
  130 interrupted"""

_WHAT = {
    "DIR": "the store directory, or the folder of a sharded training",
    "EXPORT": "the folder of an export",
}


def add_command(
    subparsers: Any, name: str, help: str, description: str, examples: Sequence[str], directory: str = "DIR"
) -> argparse.ArgumentParser:
    """Add a sub-command on a store directory, with ``--json``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, 80),
        epilog="examples:\n" + "".join(f"  {example}\n" for example in examples) + "\n" + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar=directory, type=Path, help=_WHAT[directory])
    parser.add_argument("--json", action="store_true", help="print JSON, for programs, instead of text")
    return parser


class Digits(int):
    """The number of a commit, named by digits alone, as a tag might be."""


def parse_commit(text: str) -> int | str:
    """Return the commit that an argument names: its number, or its tag, or ``number:N`` or ``tag:NAME``."""
    kind, _, name = text.partition(":")
    if kind == "tag" and name.strip():
        return name
    if kind == "number" and name.isdecimal():
        return int(name)
    if not text.strip() or kind in ("tag", "number"):
        raise argparse.ArgumentTypeError(f"a commit is a number, a tag, number:N or tag:NAME, not {text!r}")
    return Digits(text) if text.isdecimal() else text


def check_unambiguous(commits: Sequence[CommitInfo], at: int | str, directory: Path) -> None:
    """Raise ``InputError`` for digits that are the number of a commit and the tag of another."""
    tagged = {commit.id for commit in commits if commit.tag == str(at)} - {at}
    if isinstance(at, Digits) and tagged and at in {commit.id for commit in commits}:
        raise InputError(
            f"{directory}: {at} is the number of a commit and the tag of another; say number:{at} or tag:{at}"
        )


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=1, default=str))


def describe_commit(commit: CommitInfo) -> dict[str, Any]:
    """Return a commit as plain JSON values; ``meta`` as JSON where it is JSON, else its number of bytes."""
    return {
        "id": commit.id,
        "tag": commit.tag,
        "time": time_of(commit),
        "unix_nanoseconds": commit.unix_nanoseconds,
        "meta": read_meta(commit.meta),
    }


def read_meta(meta: bytes) -> Any:
    """Return the JSON values that a run wrote with its commit; None for nothing, a text for other bytes."""
    if not meta:
        return None
    try:
        values = json.loads(meta)
    except (ValueError, RecursionError):
        return f"{len(meta)} bytes that are not tierstore's own"
    return values.get("extra") or values if isinstance(values, dict) else values


def time_of(commit: CommitInfo) -> str:
    """Return the local time, to the second; "" where the time is not known."""
    if not commit.unix_nanoseconds:
        return ""
    moment = datetime.fromtimestamp(commit.unix_nanoseconds / 1e9).astimezone()
    return moment.isoformat(" ", "seconds")


def list_commits(directory: Path) -> tuple[list[CommitInfo], str]:
    """Return the kept commits, and a remark when the store is in use (which a native store allows)."""
    from tierstore import _core
    from tierstore.errors import StoreLockedError
    from tierstore.store import CommitInfo, open_store, read_identity

    try:
        with open_store(directory, read_only=True) as store:
            return store.commits(), ""
    except StoreLockedError as error:
        if read_identity(directory).engine != "native":
            raise
        kept = _core.kept_commits(str(directory / "native"))
        return [CommitInfo(*fields) for fields in kept], str(error).split(";")[0]


def short(meta: Any) -> str:
    """Return the meta of a commit on one line, cut where it is long."""
    if isinstance(meta, dict):
        text = ", ".join(f"{name}: {value}" for name, value in meta.items())
    else:
        text = "" if meta is None else str(meta)
    return text if len(text) <= _META_WIDTH else text[: _META_WIDTH - 1] + "…"


def folder_bytes(folders: Iterable[Path]) -> int:
    """Return the bytes that all files in some folders, and in their folders, occupy: each file once."""
    sizes = {}
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):  # the store may be in use, and its files come and go
                status = path.lstat()
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def check_target(args: argparse.Namespace) -> None:
    """Refuse to export a folder into itself."""
    if args.directory.resolve() in args.target.resolve().parents:
        raise ConfigError(f"TARGET {args.target} is in the folder that is exported; give another path")


@contextmanager
def progress_of(doing: str, unit: str) -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal, a line every few seconds elsewhere.

    ``unit`` is "bytes" or "rows".
    """
    if sys.stderr.isatty():
        with _bar(doing, unit) as show:
            yield show
    else:
        yield _lines(doing, unit)


@contextmanager
def _bar(doing: str, unit: str) -> Iterator[Progress]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn())
    with terminal_bars(*columns) as bars:
        task = bars.add_task(doing, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _lines(doing: str, unit: str) -> Progress:
    printed_at = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at < LOG_INTERVAL:
            return
        printed_at = time.monotonic()
        amount = format_bytes(done) if unit == "bytes" else f"{done:,} {unit}"
        print(f"{doing}: {done / max(total, 1):.0%}, {amount}", file=sys.stderr, flush=True)

    return show


def run_while_waiting(doing: str, work: Callable[[], Result], stop: Callable[[], object]) -> Result:
    """Run ``work`` in a thread and show its progress; Ctrl-C calls ``stop``, which ends the work."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, name="tierstore-work")
    thread.start()
    try:
        with progress_of(doing, "rows"):
            while thread.is_alive():
                thread.join(0.1)
    except BaseException:
        stop()
        thread.join()
        raise
    if errors:
        raise errors[0]
    return results[0]
