"""The folders that a benchmark works in."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path


def folder(text: str) -> Path:
    """Make the folder that an argument names, unless it is there; a type for argparse."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}; give the path of a folder") from error
    return path


@contextmanager
def temporary_folders(parents: Sequence[Path] | None) -> Iterator[list[Path]]:
    """Make a folder in each of ``parents``, None for that of temporary files; delete them at the end."""
    with ExitStack() as stack:
        made = (
            tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=parent) for parent in parents or [None]
        )
        yield [Path(stack.enter_context(folder)) for folder in made]
