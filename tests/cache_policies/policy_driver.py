"""Runs a policy's hooks through plans as a tier would, checking the contract at every step."""

from __future__ import annotations

import numpy as np

import cache_policies
from cache_policies import UNKNOWN


class Driver:
    """A cache of ``capacity`` slots around one compiled policy (and an oracle that must name the same
    victims).
    """

    def __init__(self, policy, capacity: int, oracle=None) -> None:
        policy = cache_policies.get(policy)
        self.hooks = policy.compile(capacity)
        self.uses_window = policy.uses_window
        self.oracle = oracle(capacity) if oracle else None
        self.last_use = np.full(capacity, -1, np.int64)
        self.row_in: dict[int, int] = {}  # slot → key
        self.free = list(range(capacity))
        self.now = 0
        self.next_key = 1000

    def announce(self, slots, deltas) -> None:
        uses = self._uses(deltas, len(slots))
        if self.uses_window and slots:
            self._both("announce", np.array(slots, np.int32), uses, self.now)

    def touch(self, slots, deltas=()) -> None:
        self.last_use[slots] = self.now
        keys = np.array([self.row_in[slot] for slot in slots], np.uint64)
        self._both("touch", np.array(slots, np.int32), keys, self._uses(deltas, len(slots)), self.now)

    def admit(self, keys) -> None:
        self.hooks.admit(np.array(keys, np.uint64), self.now, np.ones(len(keys), np.uint8))

    def insert(self, n: int, deltas=(), keys=None) -> list[int]:
        if keys is None:
            keys = list(range(self.next_key, self.next_key + n))
            self.next_key += n
        slots, self.free = self.free[:n], self.free[n:]
        keys = keys[: len(slots)]
        self.row_in.update(zip(slots, keys, strict=True))
        self.last_use[slots] = self.now
        uses = self._uses(deltas, len(slots))
        self._both("insert", np.array(slots, np.int32), np.array(keys, np.uint64), uses, self.now)
        return slots

    def remove(self, slots) -> None:
        self._both("remove", np.array(slots, np.int32))
        self._freed(slots)

    def evict(self, n: int, pinned_since: int) -> list[int]:
        victims = self.hooks.evict(n, self.last_use, pinned_since).tolist()
        evictable = [slot for slot in self.row_in if self.last_use[slot] < pinned_since]
        assert len(set(victims)) == len(victims), "a slot came twice"
        assert set(victims) <= set(self.row_in), "an empty slot was evicted"
        assert set(victims) <= set(evictable), "a pinned slot was evicted"
        assert len(victims) == min(n, len(evictable)), "fewer victims than there are unpinned rows"
        if self.oracle:
            assert victims == self.oracle.evict(n, self.last_use, pinned_since)
        self._freed(victims)
        return victims

    def _uses(self, deltas, n) -> np.ndarray:
        padded = [*deltas, *[None] * n][:n]
        return np.array([UNKNOWN if d is None else self.now + d for d in padded], np.int64)

    def _both(self, hook, *arguments) -> None:
        getattr(self.hooks, hook)(*arguments)
        if self.oracle:
            plain = [a.tolist() if isinstance(a, np.ndarray) else a for a in arguments]
            getattr(self.oracle, hook)(*plain)

    def _freed(self, slots) -> None:
        for slot in slots:
            del self.row_in[slot]
        self.free.extend(slots)
