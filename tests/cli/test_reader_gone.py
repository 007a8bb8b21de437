"""A training whose progress nobody reads any more (``| head``) saves what it has trained, and ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tierstore.cli import progress
from tierstore.cli.main import main
from tierstore.store import open_store

DATA = ["--data", "synthetic:zipf:1.0", "--tables", "2", "--rows", "2000", "--dim", "8"]
SMALL = [*DATA, "--steps", "9", "--batch-size", "32", "--hbm", "64KiB", "--threads", "1"]


class Gone:
    """A stream whose reader goes after the third line of progress."""

    def __init__(self) -> None:
        self.lines = 0

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        self.lines += "batch" in text
        if self.lines > 3:
            raise BrokenPipeError
        return len(text)

    def flush(self) -> None:
        pass


def test_a_training_without_reader_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL", 0.0)
    run = [*SMALL, "--checkpoint", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Gone())
        with pytest.raises(BrokenPipeError):  # of which the process makes 141
            main(["train", *run])
    with open_store(tmp_path / "run" / "rows", read_only=True) as store:
        assert b'"step": 4' in store.meta()
    assert main(["train", *run, "--resume"]) == 0
