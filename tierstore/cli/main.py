"""Entry of the ``tierstore`` command: finds the sub-command, turns errors into one line and an exit code.

Exit codes: 0 done, 1 the work was done and its result is bad (say, not bit-identical), 2 wrong usage or an
error that tierstore names, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib import import_module

import tierstore
from tierstore.cli.arguments import check_arguments
from tierstore.cli.interrupt import EXIT_INTERRUPTED
from tierstore.cli.messages import ArgumentParser
from tierstore.cli.ranks import complain, own_rank
from tierstore.cli.whole_compile import WholeCompile
from tierstore.cli.whole_import import WholeImport
from tierstore.errors import TierStoreError
from tierstore.trace.columns import ColumnsNeeded

COMMANDS = ("train", "inspect", "plan", "trace", "bench", "verify", "commits", "export", "imports", "compact")
"""Modules of this package, each with ``add_parser(subparsers)`` and ``run(args) -> int``. Slow imports are
made in ``run``."""

EXIT_USAGE = 2


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line; each sub-command sets ``args.run``."""
    parser = ArgumentParser(
        prog="tierstore",
        description="Embedding tables larger than memory for PyTorch, trained bit for bit as if in memory.",
    )
    parser.add_argument("--version", action="version", version=f"tierstore {tierstore.__version__}")
    debug = {"action": "store_true", "help": "show Python tracebacks of errors"}
    parser.add_argument("--debug", **debug)  # type: ignore[arg-type]
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = import_module(f"tierstore.cli.{name}")
        subparser = module.add_parser(subparsers)
        subparser.add_argument("--debug", default=argparse.SUPPRESS, **debug)
        subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = argparse.Namespace(debug=True)
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, WholeImport("torch"))
    try:
        with WholeCompile():
            args = _parsed(argv)
            check_arguments(args)
            code = int(args.run(args))
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # which ends the process, see console.py
        raise
    except (TierStoreError, ValueError, OSError) as error:
        if args.debug:
            raise
        complain(f"error: {error_text(error)}")
        return EXIT_USAGE
    except (MemoryError, RuntimeError) as error:
        if args.debug or not _is_refused_memory(error):
            raise
        complain(f"error: no memory: {error_text(error)}; give smaller sizes, of batches, rows or dimensions")
        return EXIT_USAGE


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; of several ranks, rank 0 prints what is wrong with it."""
    if own_rank() == 0:
        return build_parser().parse_args(argv)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return build_parser().parse_args(argv)
    except SystemExit as end:
        if end.code:
            complain(said.getvalue().strip())
        raise


def _is_refused_memory(error: Exception) -> bool:
    """Return whether the system refused memory; torch says so by a RuntimeError."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def error_text(error: Exception) -> str:
    """Return an error's message on one line, but a log's columns on a line each; for an error that is not
    tierstore's own it adds how to learn more."""
    if isinstance(error, ColumnsNeeded):
        return str(error)
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, TierStoreError):
        return text
    return f"{text} (tierstore --debug shows where)"


if __name__ == "__main__":
    sys.exit(main())
