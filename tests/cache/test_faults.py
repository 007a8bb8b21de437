"""A store that fails now and then: the error surfaces, nothing is lost, and the step can be tried again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bags import SGD, Bags, budget, build, everything, random_batches
from tierstore import TierConfig, prefetch
from tierstore.errors import StoreIOError


class Failing:
    """A row store whose reads and writes raise at chosen calls, before they do anything."""

    def __init__(self, inner: Any, fail_at: set[int]) -> None:
        self.inner = inner
        self.fail_at = fail_at
        self.calls = 0
        self.failures = 0

    def _step(self) -> None:
        self.calls += 1
        if self.calls in self.fail_at:
            self.failures += 1
            raise StoreIOError(5, "the device refused")

    def read(self, keys: Any, out: Any) -> Any:
        self._step()
        return self.inner.read(keys, out)

    def write(self, keys: Any, rows: Any, slots: Any) -> None:
        self._step()
        self.inner.write(keys, rows, slots)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def make_fail(module: Bags, fail_at: set[int]) -> Failing:
    store = Failing(module.engine.store, fail_at)
    module.engine.store = store
    for group in module.engine.groups:
        tier: Any = group.stack.lasting[0]
        tier.store = store
    return store


def step(module: Bags, ids: Any) -> None:
    module(ids).sin().sum().backward()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(16, 90),
    uvm=st.sampled_from([0, 30]),
    policy=st.sampled_from(["lru", "lfu", "lookahead"]),
    fail_at=st.sets(st.integers(1, 60), max_size=20),
)
def test_a_failed_step_changes_nothing_and_can_be_repeated(
    seed: int, slots: int, uvm: int, policy: str, fail_at: set[int]
) -> None:
    batches = random_batches(seed, 15, 1, 6, 3)
    reference = build(TierConfig(hbm="all"), SGD, (5,))
    for ids in batches:
        step(reference, ids)
    want = everything(reference)
    size = budget(slots, policy=policy)
    config = TierConfig(
        hbm=size, uvm=budget(uvm, policy=policy) if uvm else 0, engine="memory", policy=policy
    )
    with build(config, SGD, (5,)) as module:
        store = make_fail(module, fail_at)
        for ids in batches:
            while True:
                try:
                    step(module, ids)
                    break
                except StoreIOError:
                    continue
        store.fail_at = set()
        assert all(torch.equal(a, b) for a, b in zip(everything(module), want, strict=True))


@pytest.mark.parametrize("fail_at", [3, 9, 14])
def test_a_failure_ahead_surfaces_in_its_own_forward_call_once(fail_at: int) -> None:
    batches = random_batches(3, 20, 1, 6, 3)
    reference = build(TierConfig(hbm="all"), SGD, (5,))
    for ids in batches:
        step(reference, ids)
    with build(TierConfig(hbm=budget(40), engine="memory"), SGD, (5,)) as module:
        store = make_fail(module, {fail_at})
        errors = 0
        for ids in prefetch(batches, module, depth=2, window=4, inputs={"": lambda batch: (batch,)}):
            try:
                step(module, ids)
            except StoreIOError:
                errors += 1
                step(module, ids)
        assert errors == store.failures == 1
        for a, b in zip(everything(module), everything(reference), strict=True):
            assert torch.equal(a, b)
