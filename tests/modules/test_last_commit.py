"""What close() commits: rows never belong to another step than the ``extra`` that is committed with them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore import TierConfig, TieredEmbedding, checkpoint, optim


def build(path: Path | None) -> TieredEmbedding:
    tiers = TierConfig(hbm="all") if path is None else TierConfig(hbm="64KiB", ssd="64MiB", path=path)
    return TieredEmbedding(1000, 4, config=tiers, optimizer=optim.Adam(lr=0.1), seed=1)


def step(table: Any, number: int) -> None:
    table(torch.arange(number % 7, 1000, 7)).square().sum().backward()


def rows(table: TieredEmbedding) -> torch.Tensor:
    return table.rows(torch.arange(1000))


def expected(steps: int) -> torch.Tensor:
    table = build(None)
    for number in range(steps):
        step(table, number)
    return rows(table)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return found


def test_a_loop_that_starts_from_the_committed_extra_repeats_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for stop in (5, 6, 12, 20):  # steps 4, 8 ... are committed, the others are lost, and made again
        table = build(tmp_path)
        begin = table.engine.committed_extra().get("step", 0)
        for number in range(begin, stop):
            step(table, number)
            if number % 4 == 3:
                table.engine.commit({"step": number + 1})
        last = stop - stop % 4
        table.close()
        found = warnings(caplog)
        assert len(found) == bool(stop % 4)
        assert all(f'{{"step": {last}}}: {stop - last} updates since' in text for text in found)
        again = build(tmp_path)
        assert again.engine.committed_extra() == {"step": last}
        assert again.fused_optimizer.num_updates == last
        assert rows(again).equal(expected(last))
        again.close()
    assert not warnings(caplog)


def test_who_never_gives_an_extra_has_all_rows_after_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for life in range(4):
        with build(tmp_path) as table:
            assert table.fused_optimizer.num_updates == 2 * life
            step(table, 2 * life)
            if life % 2:
                table.engine.commit()
            step(table, 2 * life + 1)
        with build(tmp_path) as table:
            assert rows(table).equal(expected(2 * life + 2))
    assert not warnings(caplog)


def overwrite(table: TieredEmbedding) -> None:
    table.load_rows([3], torch.ones(1, 4))


@pytest.mark.parametrize(
    "change", [overwrite, TieredEmbedding.reset_parameters, lambda table: step(table, 0)]
)
@pytest.mark.parametrize("then", ["close", "commit", "extra"])
def test_every_change_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, then: str
) -> None:
    table = build(tmp_path)
    step(table, 1)
    table.engine.commit({"step": 1})
    before = rows(table)
    change(table)
    if then != "close":
        table.engine.commit({"step": 2} if then == "extra" else None)
        before = rows(table)
    table.close()
    assert bool(warnings(caplog)) == (then == "close")
    with build(tmp_path) as again:
        assert rows(again).equal(before)


def test_reading_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = build(tmp_path)
    step(table, 1)
    table.engine.commit({"step": 1})
    commits = table.engine.commits()
    rows(table)
    table(torch.arange(5))  # in training mode, without a backward pass
    table.eval()(torch.arange(5))
    table.close()
    assert not warnings(caplog)
    again = build(tmp_path)
    assert again.engine.commits() == commits
    again.close()


def test_steps_after_a_checkpoint_are_not_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for life in range(3):
        model = torch.nn.Sequential(build(tmp_path / "rows"))
        restored = checkpoint.restore(tmp_path / "checkpoints", model)
        begin = 0 if restored is None else restored.step
        assert begin == 2 * life
        assert rows(model[0]).equal(expected(begin))
        for number in range(begin, begin + 3):
            step(model[0], number)
            if number == begin + 1:
                checkpoint.save(tmp_path / "checkpoints", model, step=number + 1)
        model[0].close()
        assert len(warnings(caplog)) == 1


def test_modules_of_one_engine_count_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def offloaded() -> Any:
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Embedding(50, 4), torch.nn.Embedding(60, 8)])
        config = TierConfig(hbm="64KiB", ssd="64MiB", path=tmp_path)
        return tierstore.offload(model, config, optim.SGD(lr=0.01))

    handle = offloaded()
    modules = list(handle.values())
    modules[0](torch.arange(5)).sum().backward()
    handle.commit({"step": 1})
    modules[1](torch.arange(5)).sum().backward()
    handle.close()
    assert "1 updates since" in "".join(warnings(caplog))
    again = offloaded()
    assert again.engine.committed_extra() == {"step": 1}
    again.close()
    assert not warnings(caplog)
