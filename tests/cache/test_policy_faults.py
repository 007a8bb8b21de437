"""A policy that breaks its contract is named, and costs no row: training goes on with another one."""

from __future__ import annotations

import pytest
import torch
from numba import njit

from cache_policies.fifo import Fifo
from tests.bags import SGD, budget, build, everything, random_batches, train
from tierstore import PolicyFaultError, TierConfig
from tierstore.pipeline.prefetch import prefetch

GOOD_PLANS = 12
fifo_evict = njit(Fifo.evict)


class Pinned(Fifo):
    """Evicts the newest row, which is in use, from plan GOOD_PLANS on."""

    name = "pinned"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        if last_use.max() < GOOD_PLANS:
            return fifo_evict(s, n, last_use, pinned_since, victims)
        victims[0] = s.prev[s.next.size - 1]
        return 1


class Repeated(Pinned):
    """Evicts one slot twice."""

    name = "repeated"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        count = fifo_evict(s, n, last_use, pinned_since, victims)
        if last_use.max() >= GOOD_PLANS and count > 1:
            victims[count - 1] = victims[0]
        return count


class Nowhere(Pinned):
    """Evicts a slot that does not exist."""

    name = "nowhere"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        count = fifo_evict(s, n, last_use, pinned_since, victims)
        if last_use.max() >= GOOD_PLANS:
            victims[0] = last_use.size + 7
        return count


class TooMany(Pinned):
    """Says that it evicted more slots than it was asked for."""

    name = "too many"

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        if last_use.max() >= GOOD_PLANS:
            return n + 1
        return fifo_evict(s, n, last_use, pinned_since, victims)


@pytest.mark.parametrize("depth", [None, 2])
@pytest.mark.parametrize("uvm", [0, budget(60, policy="lru")])
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Pinned, "is pinned: a batch in flight"),
        (Repeated, "was returned twice"),
        (Nowhere, "does not exist"),
        (TooMany, "where it was asked for up to"),
    ],
)
def test_the_error_names_the_policy_and_training_goes_on_where_it_was(tmp_path, policy, message, depth, uvm):
    batches = random_batches(seed=1, count=40, tables=2, bags=10, hot=4)
    memory = build(TierConfig(hbm="all"), SGD, (5, 5))
    expected = train(memory, batches)
    options = {"hbm": budget(200, policy="lru"), "uvm": uvm, "path": tmp_path}

    module = build(TierConfig(policy=policy(), **options), SGD, (5, 5))
    outputs = []

    def train_on(coming) -> None:
        for ids in coming:
            outputs.extend(train(module, [ids]))

    with pytest.raises(PolicyFaultError, match=f"policy '{policy.name}' broke its contract.*{message}"):
        train_on(batches if depth is None else prefetch(batches, module, depth=depth, window=3))
    assert len(outputs) >= GOOD_PLANS - 3
    rows = everything(module)
    module.close()

    module = build(TierConfig(policy="lru", **options), SGD, (5, 5))
    assert all(torch.equal(a, b) for a, b in zip(everything(module), rows, strict=True))
    outputs += train(module, batches[len(outputs) :])
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(everything(module), everything(memory), strict=True))
    module.close()
    memory.close()
