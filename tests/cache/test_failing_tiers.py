"""Tiers that refuse: the call that needed them can be made again, and nothing has changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.bags import ROWS, SGD, budget, build, everything, random_batches, train
from tests.cache.remote_tier import RemoteSource, register
from tierstore import TierConfig, prefetch
from tierstore.cache.tiers import registry
from tierstore.cache.tiers.protocol import NEVER, LastingTier, Tier
from tierstore.cache.tiers.stack import TierStack
from tierstore.errors import StoreIOError

# The tiers of the list "hbm, uvm, remote, ssd, source" that are sure to be asked.
ASKED = {
    "announce": {0, 1, 2, 3, 4},
    "begin_lookup": {1, 2, 3, 4},
    "dirty_rows": {0, 1, 2},
    "end_lookup": {1, 2, 3, 4},
    "find": {0, 1, 2, 3, 4},
    "promote": {1, 2, 3, 4},
    "flush": {0, 1, 2},
    "holds": {3},
    "keys": {0, 1, 2, 3, 4},
    "put": {1, 2, 3},
    "stats": {0, 1, 2, 3, 4},
    "wait": {1, 2, 3, 4},
    "write": {3},
}


def test_every_method_of_a_tier_is_made_to_fail() -> None:
    methods = {name for kind in (Tier, LastingTier) for name in vars(kind) if callable(getattr(kind, name))}
    never = {"grant_window", "set_read_ahead", "take", "takes", "window_bytes"}
    in_a_test_of_its_own = "close"
    assert {name for name in methods if name[0] != "_"} == {*ASKED, *never, in_a_test_of_its_own}


def make_fail(tier: Tier, name: str, stack: TierStack, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make a method fail now and then, before it does anything; return a list that grows by each failure."""
    rng, failures, call, restore = random.Random(1), [], getattr(tier, name), stack.restore
    restoring = False

    def restored(*args: Any) -> None:
        nonlocal restoring
        restoring = True
        restore(*args)
        restoring = False

    def failing(*args: Any, **more: Any) -> Any:
        # Rows find the room that they have left, and a window can be forgotten.
        may = not restoring and not (name == "announce" and args[1] == NEVER)
        if may and (not failures or rng.random() < 0.2):
            failures.append(name)
            raise StoreIOError(5, "refused")
        return call(*args, **more)

    monkeypatch.setattr(tier, name, failing)
    monkeypatch.setattr(stack, "restore", restored)
    return failures


def refuse() -> None:
    raise StoreIOError(5, "refused")


def until_done(call: Callable[[], Any]) -> None:
    for _ in range(200):
        try:
            call()
        except StoreIOError:
            continue
        return
    raise AssertionError("it fails for ever")


@pytest.mark.parametrize(
    ("fails", "level"),
    [(name, level) for name in ASKED for level in range(5) if name != "write" or level >= 3],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "prefetch"])
def test_a_failing_tier_changes_nothing(
    fails: str, level: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever tier refuses, and whatever it refuses, the call can be made again."""
    batches = random_batches(5, 25, 1, 6, 3)
    expected = build(TierConfig(hbm="all"), SGD, (5,))
    source = RemoteSource({})
    keys = np.arange(ROWS, dtype=np.uint64)
    rows = np.empty((ROWS, expected.engine.groups[0].layout.row_bytes), np.uint8)
    expected.engine.groups[0].read(keys, rows)
    source.write(keys, rows)  # the initial rows
    train(expected, batches)
    register(monkeypatch, 30)
    monkeypatch.setattr(registry, "TIERS", [*registry.TIERS, lambda _: source])
    config = TierConfig(hbm=budget(30), uvm=budget(20), engine="memory", policy="lru")
    with build(config, SGD, (5,)) as module:
        stack = module.engine.groups[0].stack
        failures = make_fail(stack.tiers[level], fails, stack, monkeypatch)
        loader = prefetch(batches, module, depth=1, window=3, inputs={"": lambda b: (b,)})
        for number, ids in enumerate(loader if ahead else batches):
            until_done(partial(train, module, [ids]))
            until_done(module.stats)
            until_done(module.engine.groups[0].uncommitted_rows)
            until_done(lambda: list(module.touched_ids()))
            until_done(partial(everything, module))  # which finds rows, and promotes none
            if number % 3 == 0:
                until_done(module.flush)
        monkeypatch.undo()
        assert failures or level not in ASKED[fails] or (fails == "announce" and not ahead)
        assert all(torch.equal(a, b) for a, b in zip(everything(module), everything(expected), strict=True))


def test_all_is_closed_when_a_tier_cannot_be_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, 50, 60)
    config = TierConfig(hbm=budget(30), uvm=budget(20), ssd="64MiB", path=tmp_path / "rows")
    module = build(config, SGD, (5,))
    train(module, random_batches(5, 5, 1, 6, 3))
    before, closed = everything(module), []
    _, uvm, broken, *others = module.engine.groups[0].stack.tiers
    monkeypatch.setattr(broken, "close", refuse)
    for tier in (uvm, *others):
        monkeypatch.setattr(tier, "close", lambda tier=tier: closed.append(tier))
    with pytest.raises(StoreIOError, match="refused"):
        module.close()
    assert closed == [uvm, *others]
    module.close()
    with build(config, SGD, (5,)) as module:
        assert all(torch.equal(a, b) for a, b in zip(everything(module), before, strict=True))
