"""Rows that are written down while a backward pass updates them: the update is in the next commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore import TierConfig, TieredEmbedding, optim

IDS = torch.arange(40)


def build(path: Path) -> TieredEmbedding:
    config = TierConfig(hbm="64KiB", ssd="64MiB", path=path)
    return TieredEmbedding(1000, 8, config=config, optimizer=optim.Adagrad(lr=0.1))


def test_an_update_during_a_flush_stays_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build(tmp_path / "rows")
    module(IDS).sum().backward()
    loss = module(IDS).square().sum()
    lower: Any = module.engine.groups[0].below
    write, updated = lower.write, []

    def write_and_update(*args: Any) -> None:
        write(*args)
        if not updated:
            updated.append(loss.backward())

    monkeypatch.setattr(lower, "write", write_and_update)
    module.flush()
    assert updated
    module.commit()
    rows = module.rows(IDS)
    module.close(commit=False)
    with build(tmp_path / "rows") as again:
        assert torch.equal(again.rows(IDS), rows)


def test_rows_of_a_flush_that_failed_are_written_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build(tmp_path / "rows")
    module(IDS).sum().backward()

    def fail(*_: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(module.engine.groups[0].below, "write", fail)
        with pytest.raises(OSError, match="no"):
            module.flush()
    rows = module.rows(IDS)
    module.commit()
    module.close(commit=False)
    with build(tmp_path / "rows") as again:
        assert torch.equal(again.rows(IDS), rows)
