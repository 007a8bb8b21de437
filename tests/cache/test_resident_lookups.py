"""Lookups of rows that never leave their tier are made without a plan, and change nothing that a plan would
not."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from tests.bags import Bags, budget, build, random_batches, train
from tierstore import TierConfig, optim

ADAGRAD = optim.Adagrad(lr=0.1)
IN_MEMORY = TierConfig(hbm="all")
CONFIGS = {
    "one tier": IN_MEMORY,
    "over a store": TierConfig(hbm="all", engine="memory", ssd=True),
    "a budget for all rows": TierConfig(hbm=budget(4000, ADAGRAD), engine="memory"),
}
DIMS = (5, 5)


def epochs(count: int) -> list[list[torch.Tensor]]:
    return random_batches(5, 6, 2, 40, 3) * count


def planned(module: Bags) -> Bags:
    """The same module, which makes a plan for every lookup."""
    for group in module.engine.groups:
        group._resident = None
    return module


def without_seconds(stats: Any) -> Any:
    if not isinstance(stats, dict):
        return stats
    kept = {key: value for key, value in stats.items() if not str(key).endswith("_seconds")}
    return {key: without_seconds(value) for key, value in kept.items()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rows_counters_and_curves_are_those_of_plans(config: TierConfig) -> None:
    with build(config, ADAGRAD, DIMS) as module, planned(build(config, ADAGRAD, DIMS)) as oracle:
        for ours, expected in zip(train(module, epochs(8)), train(oracle, epochs(8)), strict=True):
            assert torch.equal(ours, expected)
        stats = without_seconds(module.engine.stats())
        expected_stats = without_seconds(oracle.engine.stats())
        assert stats.pop("memory").keys() == expected_stats.pop("memory").keys()
        assert stats == expected_stats
        assert stats["lookups"] == 48 * len(module.engine.groups)
        assert module.engine.table_curves() == oracle.engine.table_curves()
        if config is CONFIGS["over a store"]:
            assert module.engine.groups[0].uncommitted_rows() == oracle.engine.groups[0].uncommitted_rows()


def plans(module: Bags, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    for group in module.engine.groups:
        plan = group.plan
        monkeypatch.setattr(group, "plan", lambda *a, plan=plan, **k: (made.append(1), plan(*a, **k)))
    return made


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_only_rows_that_are_missing_need_a_plan(config: TierConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with build(config, ADAGRAD, DIMS) as module:
        made = plans(module, monkeypatch)
        train(module, epochs(1))
        assert len(made) == 6
        train(module, epochs(3))
        assert len(made) == 6
        ids = [torch.full((2, 1), 1999), torch.zeros((2, 1), dtype=torch.int64)]
        train(module, [ids, ids])
        assert len(made) == 7


def test_a_tier_that_evicts_makes_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    with build(TierConfig(hbm=budget(300, ADAGRAD), engine="memory"), ADAGRAD, DIMS) as module:
        made = plans(module, monkeypatch)
        train(module, epochs(2))
        assert len(made) == 12


def test_counters_begin_again_at_a_reset() -> None:
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        train(module, epochs(4))
        module.engine.reset_stats()
        train(module, epochs(1)[:5])
        stats = module.engine.stats()
        assert stats["lookups"] == 5
        assert stats["tiers"]["hbm"]["hit_rate"] == {"per_access": 1.0, "per_unique": 1.0}
        assert stats["tiers"]["hbm"]["accesses"] == 5 * 2 * 40 * 3


def test_rows_are_not_found_before_they_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread brings rows in, and another looks the same rows up meanwhile."""
    ids = [torch.arange(60).view(20, 3), torch.arange(60).view(20, 3)]
    with build(IN_MEMORY, ADAGRAD, DIMS) as oracle:
        expected = oracle(ids).detach()
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        group = module.engine.groups[0]
        fill, filling = group._fill, threading.Event()

        def slowly(*arguments: Any) -> None:
            filling.set()
            time.sleep(0.3)
            fill(*arguments)

        monkeypatch.setattr(group, "_fill", slowly)
        other = threading.Thread(target=lambda: module(ids))
        other.start()
        assert filling.wait(20)
        assert torch.equal(module(ids).detach(), expected)
        other.join(20)


def test_a_fill_that_fails_leaves_the_tier_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = epochs(1)
    with build(IN_MEMORY, ADAGRAD, DIMS) as oracle:
        expected = train(oracle, batches * 2)
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        group = module.engine.groups[0]
        with monkeypatch.context() as patch:

            def fails(*_: Any) -> None:
                raise MemoryError

            patch.setattr(group, "_fill", fails)
            with pytest.raises(MemoryError):
                module(batches[0])
        for ours, theirs in zip(train(module, batches * 2), expected, strict=True):
            assert torch.equal(ours, theirs)
        assert module.engine.stats()["lookups"] == 12


def test_threads_that_look_up_and_add_rows_at_once() -> None:
    """Rows that nobody updates are the same at every lookup, whichever rows are added meanwhile."""
    with build(IN_MEMORY, ADAGRAD, DIMS) as module:
        batches, errors = random_batches(7, 60, 2, 50, 3), []
        with build(IN_MEMORY, ADAGRAD, DIMS) as oracle:
            expected = [oracle(ids).detach() for ids in batches]

        def look_up(begin: int) -> None:
            for number in [*range(begin, 60), *range(begin)] * 3:
                if not torch.equal(module(batches[number]).detach(), expected[number]):
                    errors.append(number)

        threads = [threading.Thread(target=look_up, args=(begin,)) for begin in (0, 15, 30, 45)]
        for thread in threads:
            thread.start()
        look_up(5)
        for thread in threads:
            thread.join(60)
        assert not errors
        assert module.engine.stats()["lookups"] == 5 * 180
