"""Measurements that only the makers of tierstore need: ``python -m tierstore_bench.research.NAME``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstore.result_file import JsonFile

Results = tuple[Mapping[str, float], Mapping[str, Any]]
"""Figures to print and write, and what else is written."""


def main(
    summary: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace, JsonFile | None], Results],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a benchmark with the arguments of the command line; print and write its figures."""
    parser = argparse.ArgumentParser(description=summary)
    add_arguments(parser)
    parser.add_argument("--json", type=Path, help="write the figures there, or add to what is measured there")
    args = parser.parse_args(arguments)
    target = JsonFile(args.json) if args.json else None
    figures, details = run(args, target)
    for key, value in figures.items():
        print(f"{key:<32} {value:>12,.4f}")
    if target is not None:
        target.write({**figures, **details})
    return 0
