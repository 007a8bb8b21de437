"""Messages of commands on stderr: wrapped where a person reads them, unwrapped where a program does."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from tierstore.trace.columns import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

_WIDTH = 80
"""Columns of a terminal that does not say its width."""
_WIDTH_OF_PROGRAMS = 10_000


def say(text: str) -> None:
    """Print a message on stderr, see :func:`wrapped`; paths and names in it do nothing to a terminal."""
    print(wrapped(_harmless(text), sys.stderr), file=sys.stderr, flush=True)


def results_console() -> Console:
    """Return the console for a command's results: lines are as wide as the terminal, or as ``COLUMNS`` says,
    and as wide as they need to be where a program or a file takes them. Names and meta of a store are
    anybody's, so what a terminal would obey is printed as ?."""
    from rich.console import Console
    from rich.text import Text

    class Results(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(_harmless(text), **options)

    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = None if fits else _WIDTH_OF_PROGRAMS
    return Results(width=width, highlight=False, markup=False, soft_wrap=True)


def terminal_bars(*columns: ProgressColumn) -> Progress:
    """Return rich's Progress on stderr. It shows bars of these columns (none: the usual ones), leaves nothing
    behind, and is silent outside of terminals, where rich would print an empty line."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _harmless(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def wrapped(text: str, stream: TextIO) -> str:
    """Return ``text`` in lines that fit the terminal which ``stream`` is; unchanged if it is no terminal.

    Words stay whole, so that options, paths and commands can be copied. Further lines of a wrapped line are
    indented.
    """
    if not stream.isatty():
        return text
    width = _width(stream)
    return "\n".join(_lines(line, width) for line in text.split("\n"))


def _lines(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line.strip(),
        max(width, len(indent) + 20),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH
    except OSError:
        return _WIDTH


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are wrapped as other messages are."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        say(f"{self.prog}: error: {message}")
        raise SystemExit(2)
