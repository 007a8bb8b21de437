"""Traces of single accesses run in a loop of their own, with the same hooks: it counts what batches do."""

from __future__ import annotations

import numpy as np
import pytest

import cache_policies
from cache_policies import Policy, PolicyError, prepare, prepare_flat, simulate
from cache_policies.lru import Lru

KEYS = (700 * np.random.default_rng(8).random(4000) ** 3).astype(np.int64)


def of_both(policy, capacity, **setting):
    """What the loop counts, and what plans of batches of one count."""
    single = prepare_flat(KEYS, 1)
    assert not single.offsets.size
    return simulate(single, policy, capacity, **setting), simulate(
        prepare(KEYS.reshape(-1, 1)), policy, capacity, **setting
    )


@pytest.mark.parametrize("policy", cache_policies.names())
def test_every_policy_counts_the_same(policy):
    for capacity in (1, 2, 40, 300):
        single, batches = of_both(policy, capacity)
        assert single == batches
        assert 0 < single.compulsory < single.misses or capacity == 300


@pytest.mark.parametrize("window", [1, 7, 4000])
def test_a_window_is_announced(window):
    single, batches = of_both("lookahead", 40, window=window)
    assert single == batches
    assert single.misses >= simulate(prepare_flat(KEYS, 1), "belady", 40).misses


@pytest.mark.parametrize(
    "setting", [{"depth": 3}, {"admission": "counter(2)"}, {"on_demand": 1, "window": 9}, {"on_demand": 3}]
)
def test_other_settings_too(setting):
    single, batches = of_both("lookahead", 40, **setting)
    assert single == batches


class Picky(Lru):
    """Gives odd rows no slot, and looks at all that hooks are told."""

    name = "picky_replay"

    def state(self, capacity):
        return {"seen": np.zeros(3, np.int64), **super().state(capacity)}

    @staticmethod
    def admit(s, keys, now, admitted):
        for i in range(keys.size):
            s.seen[0] += keys[i] * now
            if keys[i] & np.uint64(1):
                admitted[i] = 0


def test_a_policy_may_refuse():
    single, batches = of_both(Picky, 40)
    assert single == batches
    assert single.refused > 500


class Faulty(Lru):
    """Evicts what ``answer`` says: how many, and which slot."""

    name = "faulty"

    def __init__(self, count: int, slot: int) -> None:
        self.answer = count, slot

    def state(self, capacity):
        return {"answer": np.array(self.answer), **super().state(capacity)}

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        victims[0] = s.answer[1]
        return s.answer[0]


@pytest.mark.parametrize("answer", [(-1, 0), (2, 0), (1, -1), (1, 40), (1, 1 << 30)])
def test_wrong_answers_are_named(answer):
    policy: Policy = Faulty(*answer)
    told = []
    for trace in (prepare_flat(KEYS, 1), prepare(KEYS.reshape(-1, 1))):
        with pytest.raises(PolicyError, match="'faulty' broke the contract in plan") as error:
            simulate(trace, policy, 40)
        told.append(str(error.value))
    assert told[0] == told[1]


def test_a_policy_that_evicts_nothing_overflows():
    single, batches = of_both(Faulty(0, 0), 40)
    assert single == batches
    assert single.overflowed == single.misses - 40
