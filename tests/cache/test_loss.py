"""Rows that were never committed are not dropped without a word: the warning says where and how many."""

from __future__ import annotations

import gc
import logging
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tierstore import TierConfig, TieredEmbeddingBag, offload, optim

ROWS, DIM = 4000, 4

SCRIPT = """
import os, sys, torch
from tierstore import TierConfig, TieredEmbeddingBag, optim
def table():
    config = TierConfig(hbm="16KiB", ssd="64MiB", path=sys.argv[1])
    return TieredEmbeddingBag(4000, 4, config=config, optimizer=optim.SGD(lr=0.1))
def train(bag, first, last):
    bag(torch.arange(first, last).view(-1, 10)).sum().backward()
"""
ENDS = {
    "in a function": ("def main():\n    bag = table()\n    train(bag, 0, 100)\nmain()", 100, 0),
    "at the module's level": ("bag = table()\ntrain(bag, 0, 100)", 100, 0),
    "beyond the memory tier": (
        "bag = table()\nfor i in range(0, 4000, 100): train(bag, i, i + 100)",
        4000,
        0,
    ),
    "by an exception": ("bag = table()\ntrain(bag, 0, 100)\nraise ValueError", 100, 1),
    "by sys.exit": ("bag = table()\ntrain(bag, 0, 100)\nsys.exit(7)", 100, 7),
    "since a commit": ("bag = table()\ntrain(bag, 0, 100)\nbag.commit()\ntrain(bag, 90, 110)", 20, 0),
    "in a child": (
        "bag = table()\ntrain(bag, 0, 100)\nif os.fork(): os.wait() and bag.close()\nelse: sys.exit()",
        0,
        0,
    ),
    "committed": (
        "bag = table()\ntrain(bag, 0, 100)\nbag.commit()\nbag(torch.arange(200, 300).view(-1, 10))",
        0,
        0,
    ),
    "closed": ("bag = table()\ntrain(bag, 0, 100)\nbag.close()", 0, 0),
    "closed on purpose without a commit": (
        "bag = table()\ntrain(bag, 0, 100)\nbag.close(commit=False)",
        0,
        0,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_processes_that_end(end: str, tmp_path: Path) -> None:
    code, rows, status = ENDS[end]
    done = subprocess.run(
        [warm.python(), "-c", SCRIPT + code, str(tmp_path / "rows")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, done.stderr
    said = [line for line in done.stderr.splitlines() if "stays at its last commit" in line]
    wanted = (
        f"{tmp_path / 'rows'} stays at its last commit: up to {rows} rows that changed since then are dropped"
    )
    assert len(said) == (1 if rows else 0), done.stderr
    assert not rows or wanted in said[0]


def bag(path: Path | None, **options: Any) -> TieredEmbeddingBag:
    config = TierConfig(ssd="64MiB", path=path, **options)
    return TieredEmbeddingBag(ROWS, DIM, config=config, optimizer=optim.SGD(lr=0.1))


def train(module: Any) -> None:
    module(torch.arange(50).view(5, 10)).sum().backward()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    found = [record.getMessage() for record in caplog.records if "stays at its last" in record.getMessage()]
    caplog.clear()
    return found


def test_blocks_left_by_an_exception(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tierstore")
    with suppress(KeyError), bag(tmp_path / "a") as module:
        train(module)
        raise KeyError
    assert len(warnings_of(caplog)) == 1
    model = torch.nn.ModuleDict({"one": torch.nn.EmbeddingBag(ROWS, DIM)})
    config = TierConfig(ssd="64MiB", path=tmp_path / "b")
    with suppress(KeyError), offload(model, config, optim.SGD(lr=0.1)):
        train(model["one"])
        raise KeyError
    (said,) = warnings_of(caplog)
    assert "up to 4000 rows" in said  # all were loaded
    with bag(tmp_path / "c") as module:
        train(module)
    assert warnings_of(caplog) == []


def test_what_cannot_last_is_not_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tierstore")
    for module in (bag(None), bag(None, engine="memory"), TieredEmbeddingBag(9, 4, config=TierConfig("all"))):
        module.load_rows([1], torch.ones(1, 4))
        del module
        assert warnings_of(caplog) == []


def test_going_to_a_commit_forgets_on_purpose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tierstore")
    module = bag(tmp_path)
    train(module)
    first = module.commit()
    train(module)
    module.engine.go_to(first)
    assert warnings_of(caplog) == []
    train(module)
    del module
    assert len(warnings_of(caplog)) == 1


def interrupted_in(module: TieredEmbeddingBag, where: Any, name: str, before: bool) -> None:
    """close() is interrupted when it calls ``where.name``: before that does its work, or right after it."""
    work = getattr(where, name)

    def interrupt(*args: Any) -> None:
        if not before:
            work(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            module.close()


@pytest.mark.parametrize("before", [True, False])
def test_close_that_is_interrupted_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: bool
) -> None:
    module = bag(tmp_path / "rows")
    train(module)
    interrupted_in(module, module.engine.store, "commit", before)
    assert module.engine.closed
    assert len([r for r in caplog.records if "are dropped" in r.getMessage()]) == before
    again = bag(tmp_path / "rows")
    assert len(again.engine.commits()) == (not before)
    again.close()
