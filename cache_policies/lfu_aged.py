"""Least frequently used, with uses that fade."""

from __future__ import annotations

import numpy as np

from cache_policies import buckets
from cache_policies.errors import PolicyError
from cache_policies.inner import inlined
from cache_policies.policy import Policy

_STEPS = 8  # buckets per halving of the weight


@inlined
def _used(s, slot):
    """Count a use of ``slot`` (its ``score`` before it, -inf if none); the key of its bucket afterwards.

    The score is the logarithm of the sum of all uses, each weighted by 2 to its time: time alone changes no
    order.
    """
    s.uses[0] += 1.0
    time = s.uses[0] / s.half_life[0]
    older = s.score[slot]
    s.score[slot] = max(time, older) + np.log2(1.0 + 2.0 ** -abs(time - older))
    return np.int64(np.floor(s.score[slot] * _STEPS))


class LfuAged(Policy):
    """Evicts the row with the least weight of uses since it became resident, where a use loses half of its
    weight every ``half_life`` uses per slot; among about equals (to an eighth of a halving), the least
    recently used.

    LFU with exponential decay, as the LRFU family combines recency and frequency (Lee et al., "LRFU: a
    spectrum of policies that subsumes the least recently used and least frequently used policies", IEEE ToC
    2001); follows drift. Uses are counted once per plan.
    """

    name = "lfu_aged"

    def __init__(self, half_life: float = 4.0) -> None:
        if not half_life > 0:
            raise PolicyError(f"lfu_aged: half_life must be positive (uses per slot), got {half_life}")
        self.half_life = half_life

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        return {
            "score": np.zeros(capacity, np.float64),
            "uses": np.zeros(1, np.float64),
            "half_life": np.array([self.half_life * capacity]),
            **buckets.new_buckets(capacity),
        }

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        for i in range(slots.size):
            buckets.fetch(s, slots, i)
            slot = slots[i]
            buckets.move(s, slot, _used(s, slot))

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for slot in slots:
            s.score[slot] = -np.inf
            buckets.add(s, slot, _used(s, slot))

    @staticmethod
    def remove(s, slots):
        buckets.remove(s, slots)

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        return buckets.evict(s, n, last_use, pinned_since, victims)

    def __repr__(self) -> str:
        return f"LfuAged({self.half_life})"
