"""A queue of slots in order of arrival, each with a bit that a use sets, for CLOCK and SIEVE."""

from __future__ import annotations

from typing import Any

import numpy as np

from cache_policies.lists import new_lists, push_newest
from cache_policies.policy import Policy


class Ring(Policy):
    """Base of policies with a hand that goes around: arrivals and uses."""

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        prev, next_ = new_lists(capacity, 1)
        return {
            "prev": prev,
            "next": next_,
            "used": np.zeros(capacity, np.bool_),
            "resident": np.zeros(1, np.int64),
        }

    @staticmethod
    def touch(s: Any, slots: Any, keys: Any, next_use: Any, now: Any) -> None:
        for slot in slots:
            s.used[slot] = True

    @staticmethod
    def insert(s: Any, slots: Any, keys: Any, next_use: Any, now: Any) -> None:
        for slot in slots:
            push_newest(s.prev, s.next, s.used.size, slot)
            s.used[slot] = False
        s.resident[0] += slots.size
