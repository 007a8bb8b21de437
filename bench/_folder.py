"""The folder that a benchmark works in."""

from __future__ import annotations

from pathlib import Path


def folder(text: str) -> Path:
    """For argparse: a folder, made if it is not there."""
    path = Path(text)
    path.mkdir(parents=True, exist_ok=True)
    return path
