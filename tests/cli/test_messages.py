"""Errors on stderr: wrapped on a terminal, and one line for programs."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from tests import warm

USAGE = ["inspect", "folder", *(f"argument-{number}" for number in range(12))]


def command(*arguments: str) -> list[str]:
    return [warm.python(), "-m", "tierstore.cli", *arguments]


def on_terminal(arguments: list[str], columns: int, folder: Path) -> str:
    """What the command prints on a terminal of so many columns; 0: one that does not know."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    assert subprocess.run(command(*arguments), stderr=theirs, cwd=folder).returncode == 2
    os.close(theirs)
    said = b""
    try:
        while more := os.read(ours, 1 << 16):
            said += more
    except OSError:  # the end, on Linux
        pass
    finally:
        os.close(ours)
    return said.decode().replace("\r\n", "\n")


def in_pipe(arguments: list[str], folder: Path) -> str:
    return subprocess.run(command(*arguments), stderr=subprocess.PIPE, text=True, cwd=folder).stderr


@pytest.mark.parametrize("columns", [40, 120, 0])
def test_errors_are_wrapped_on_a_terminal_alone(columns: int, tmp_path: Path) -> None:
    folder = "a-folder-with-a-rather-long-name/" * 3
    wrong = ["inspect", folder]
    plain = in_pipe(wrong, tmp_path)
    assert plain.startswith("error: ")
    assert plain.count("\n") == 1
    assert len(plain) > 130
    shown = on_terminal(wrong, columns, tmp_path)
    assert " ".join(shown.split()) == " ".join(plain.split())
    _, *further = shown.splitlines()
    assert further
    assert all(line.startswith("  ") for line in further)
    # a path is not cut, or it could not be copied
    assert max(len(line) for line in shown.splitlines() if folder[:-1] not in line) <= (columns or 80)


def test_errors_of_usage_are_wrapped_too(tmp_path: Path) -> None:
    plain = in_pipe(USAGE, tmp_path)
    assert plain.splitlines()[-1].endswith("argument-10 argument-11")
    lines = on_terminal(USAGE, 60, tmp_path).splitlines()
    start = next(number for number, line in enumerate(lines) if ": error: " in line)
    assert len(lines[start:]) > 1
    assert max(map(len, lines[start:])) <= 60
