"""``tierstore bench record``: file a benchmark's figures with command, machine, commit and date.

The page of measurements is made from these files (bench/results/README.md has their fields).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError
from tierstore.result_file import JsonFile, machine

SUMMARY = "add machine, commit and date to figures that --json wrote, and file them under bench/results"
RESULTS = Path(__file__).resolve().parent / "results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="file that a command wrote with --json"
    )
    parser.add_argument("--command", required=True, help="the command that gave the figures, in full")
    parser.add_argument("--subject", default="Other", help='section of the page, such as "Row stores"')
    parser.add_argument("--title", help="heading of the result (default: the command)")
    parser.add_argument("--conditions", help='such as "quiet", or the load of the machine')
    parser.add_argument("--note", action="append", default=[], help="a sentence to read the figures with")
    parser.add_argument(
        "--to",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="folder of the results (default: bench/results)",
    )


def run(args: argparse.Namespace) -> int:
    if not args.command.strip():
        raise ConfigError("--command is empty; give the command that gave the figures, in full")
    for path in args.files:
        try:
            figures = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no JSON file: {error}; give the file that --json wrote") from None
        result = record(figures, args)
        name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")
        target = args.to / f"{result['date']}-{name}.json"
        if target.exists():
            raise ConfigError(f"{target} is there; rename {path}, since no result is replaced")
        JsonFile(target, "--to").write(result)
        print(target)
    return 0


def record(figures: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures with command, date, commit, and the machine that they name, else this one."""
    named = figures.get("machine") if isinstance(figures, dict) else None
    return {
        "subject": args.subject,
        "title": args.title or args.command,
        "command": args.command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": named or machine(),
        "conditions": args.conditions,
        "figures": figures,
        "notes": args.note,
    }


def commit() -> str | None:
    """Return the commit of the working tree, with ``+changes`` where it is not clean; None outside of git."""
    found = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude=*"],
        cwd=Path(__file__).resolve().parent,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() or None
