"""The page of all commands, from their argument parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tierstore.cli.bench import benchmark_names, find_benchmark
from tierstore.cli.main import build_parser

HEAD = """\
# Commands

This page is made from the argument parsers; `tierstore COMMAND --help` prints the same.
Exit codes: 0 for done, 1 for a bad result (such as bits that differ), 2 for wrong usage or an error,
130 after Ctrl-C.
"""
WIDTH = 96


def page() -> str:
    """Return the page, in Markdown."""
    return "\n".join([HEAD, *(section(parser) for parser in parsers())])


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of every command and benchmark."""
    yield from leaves(build_parser())
    for name in benchmark_names():
        module = find_benchmark(name)
        parser = argparse.ArgumentParser(prog=f"tierstore bench {name}", description=module.SUMMARY)
        module.add_arguments(parser)
        yield parser


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser, or those of its sub-commands where it has any."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for child in dict.fromkeys(group.choices.values()):
            yield from leaves(child)


def section(parser: argparse.ArgumentParser) -> str:
    """Return the help of one command under a heading."""
    kind = parser.formatter_class
    parser.formatter_class = lambda prog: kind(prog, width=WIDTH)  # type: ignore[assignment]
    return f"## {parser.prog}\n```text\n{parser.format_help().rstrip()}\n```\n"
