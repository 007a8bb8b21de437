"""Seconds by stage, as ``stats()`` tells them: each stage is counted where its time goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.bags import SGD, budget, build, random_batches, train
from tierstore import TierConfig, TieredEmbeddingBag, prefetch

STAGES = ("announce", "plan", "fetch", "move", "wait", "compute", "stall", "policy", "blocked")


def seconds(module: Any) -> dict[str, float]:
    return {stage: module.stats()[f"{stage}_seconds"] for stage in STAGES}


def slow(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, by: float, thread: str = "") -> None:
    call: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any) -> Any:
        if threading.current_thread().name.startswith(thread):
            time.sleep(by)
        return call(*args)

    monkeypatch.setattr(owner, name, wrapped)


def test_stages_add_up_to_less_than_the_clock() -> None:
    with build(TierConfig(hbm=budget(40), uvm=budget(30), engine="memory"), SGD, (5,)) as module:
        start = time.perf_counter()
        train(module, random_batches(0, 30, 1, 6, 3))
        wall, found = time.perf_counter() - start, seconds(module)
        assert 0 < sum(found[stage] for stage in ("announce", "plan", "fetch", "move", "compute")) < wall
        assert all(found[stage] > 0 for stage in ("announce", "plan", "fetch", "move", "compute", "policy"))
        assert found["policy"] < found["announce"] + found["plan"] + found["move"]
        group = module.stats()["groups"]["dim5"]
        assert {stage: group[f"{stage}_seconds"] for stage in STAGES} == seconds(module)
        module.engine.reset_stats()
        assert not any(seconds(module).values())


@pytest.mark.parametrize(("call", "stage", "at_least"), [("read", "fetch", 10), ("write", "move", 5)])
def test_a_slow_store_is_counted_in_its_stage(
    call: str, stage: str, at_least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build(TierConfig(hbm=budget(40), engine="memory"), SGD, (5,)) as module:
        slow(monkeypatch, module.engine.store, call, 0.002)
        train(module, random_batches(0, 30, 1, 6, 3))
        found = seconds(module)
        assert found[stage] > 0.002 * at_least
        assert found["blocked"] > 0.002 * at_least
        assert found["blocked"] <= found["fetch"] + found["move"] + found["plan"]


def test_waits_for_rows_that_are_read_ahead_are_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = random_batches(0, 40, 1, 6, 3)
    with build(TierConfig(hbm=budget(60), engine="memory", policy="lookahead"), SGD, (5,)) as module:
        slow(monkeypatch, module.engine.store, "read", 0.05, "tierstore-read-ahead")
        for ids in prefetch(batches, module, depth=1, window=20, inputs={"": lambda batch: (batch,)}):
            module(ids).sin().sum().backward()
        stats = module.stats()
        assert stats["read_ahead_rows"] > 0
        assert stats["wait_seconds"] > 0.002
        assert stats["stall_seconds"] > 0.002


def test_gradients_of_weights_are_computed() -> None:
    config = TierConfig(hbm="64KiB", engine="memory")
    with TieredEmbeddingBag(1000, 8, mode="sum", config=config, optimizer=None) as bag:
        weights = torch.rand(64, 8, requires_grad=True)
        out = bag(torch.randint(0, 1000, (64, 8)), per_sample_weights=weights)
        before = seconds(bag)
        out.sum().backward()
        assert weights.grad is not None
        assert seconds(bag)["compute"] > before["compute"]


def test_squares_of_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank computes them, of whose tables other ranks have the other columns."""
    computed = []
    with build(TierConfig(hbm=budget(40), engine="memory"), SGD, (5,)) as module:

        def mean_squares(parts: Any, squares_of: Callable[[int], Any]) -> list[None]:
            before = seconds(module)["compute"]
            squares_of(0)
            computed.append(seconds(module)["compute"] - before)
            return [None for _ in parts]

        monkeypatch.setattr(module, "mean_squares", mean_squares)
        train(module, random_batches(0, 3, 1, 6, 3))
    assert len(computed) == 3
    assert min(computed) > 0
