"""Validation of the planner, for its makers: ``python -m tierstore_bench.research.NAME``."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def main(
    summary: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> int:
    """Run a benchmark with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=summary)
    add_arguments(parser)
    return run(parser.parse_args())
