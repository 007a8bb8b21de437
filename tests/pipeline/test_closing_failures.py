"""A prefetch closes whole, whatever fails while it forgets its window."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.bags import SGD, Bags, budget, build, everything, random_batches
from tierstore import TierConfig
from tierstore.cache.group import TierGroup
from tierstore.cache.tiers.memory import MemoryTier
from tierstore.cache.tiers.protocol import NEVER
from tierstore.cache.tiers.store import StoreTier
from tierstore.pipeline.prefetch import prefetch

BATCHES = random_batches(3, 12, 2, 6, 3)
INPUTS = {"": lambda batch: (batch,)}


class Failing:
    """Raises MemoryError in place of, or after, some calls."""

    def __init__(self, fails: Callable[[int], bool], is_after: bool = False) -> None:
        self.fails, self.is_after, self.calls = fails, is_after, 0

    def wrap(self, call: Callable[..., Any], when: Callable[..., bool] = lambda *args: True) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            if not when(*args):
                return call(*args, **options)
            self.calls += 1
            fails = self.fails(self.calls)
            if not fails or self.is_after:
                result = call(*args, **options)
            if fails:
                raise MemoryError("none left")
            return result

        return wrapped


class Window:
    """A native window whose ``clear`` fails half-way."""

    def __init__(self, native: Any, failing: Failing) -> None:
        self._native = native
        self.clear = failing.wrap(native.clear)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def bags() -> Bags:
    """Of two tier groups."""
    return build(TierConfig(hbm=budget(60), engine="memory"), SGD, (5, 24))


def train(module: Bags) -> None:
    for ids in prefetch(BATCHES, module, depth=2, window=4, inputs=INPUTS):
        module(ids).sin().sum().backward()


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tierstore-prefetch"]


def check_closed(module: Bags, used: int, caplog: pytest.LogCaptureFixture) -> None:
    """No thread, no lookup and no window is left over: training goes on as in memory."""
    assert not workers()
    assert all(group.window.lookups == 0 for group in module.engine.groups)
    with caplog.at_level(logging.INFO, "tierstore"), build(TierConfig(hbm="all"), SGD, (5, 24)) as memory:
        train(module)
        assert "another prefetch" not in caplog.text
        for ids in [*BATCHES[:used], *BATCHES]:
            memory(ids).sin().sum().backward()
        for a, b in zip(everything(module), everything(memory), strict=True):
            assert torch.equal(a, b)


def leave_early(module: Bags, before_close: Callable[[], None]) -> None:
    loop = prefetch(BATCHES, module, depth=2, window=4, inputs=INPUTS)
    batches = iter(loop)
    module(next(batches)).sin().sum().backward()
    next(batches)
    before_close()
    with pytest.raises(MemoryError, match="none left"):
        loop.close()


@pytest.mark.parametrize(("at", "is_after"), [(1, False), (2, False), *((at, True) for at in (1, 2, 3, 4))])
def test_forgetting_a_window_fails_once(
    at: int, is_after: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of two groups forgets its window twice: what the worker has announced since the first time must be
    forgotten, so of the second calls none fails before its work."""
    failing = Failing(lambda call: call == at, is_after)
    with bags() as module:
        assert len(module.engine.groups) == 2
        leave_early(
            module,
            lambda: monkeypatch.setattr(TierGroup, "forget_window", failing.wrap(TierGroup.forget_window)),
        )
        assert failing.calls == 4
        check_closed(module, 1, caplog)


def test_the_window_cannot_be_cleared(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(lambda call: True)

    def break_windows() -> None:
        for group in module.engine.groups:
            group.window = Window(group.window, failing)  # type: ignore[assignment]

    with bags() as module:
        leave_early(module, break_windows)
        assert failing.calls == 2
        check_closed(module, 1, caplog)


@pytest.mark.parametrize("tier", [MemoryTier, StoreTier])
def test_a_tier_cannot_forget(
    tier: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(lambda call: True)
    wrapped = failing.wrap(tier.announce, lambda _, keys, next_use, now: next_use == NEVER)  # type: ignore[attr-defined]
    with bags() as module:
        leave_early(module, lambda: monkeypatch.setattr(tier, "announce", wrapped))
        assert failing.calls >= 4
        monkeypatch.undo()
        check_closed(module, 1, caplog)
