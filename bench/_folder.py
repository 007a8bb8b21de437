"""The folder that a benchmark works in."""

from __future__ import annotations

from pathlib import Path


def folder(text: str) -> Path:
    """Make the folder that an argument names, unless it is there; a type for argparse."""
    path = Path(text)
    path.mkdir(parents=True, exist_ok=True)
    return path
