"""Known frequencies."""

from __future__ import annotations

import numpy as np

from cache_policies import buckets, hashing
from cache_policies.errors import PolicyError
from cache_policies.inner import called, inlined
from cache_policies.policy import Policy


@inlined
def _frequency(s, key):
    entry = s.known_table[hashing.find(s.known_table, s.known_key, key)]
    return s.known_count[entry - 1] if entry else np.int64(0)


@called
def _fill(table, keys):
    for i in range(keys.size):
        table[hashing.find(table, keys, keys[i])] = i + 1


class StaticTop(Policy):
    """Evicts the row with the least given frequency (0 if none is given); among equals, the least recently
    used.

    So the rows given as most frequent stay once they came: the static placement by measured or assumed
    popularity of many recommenders (for one, Fang et al., "A frequency-aware software cache for large
    recommendation system embeddings", 2022). Without frequencies it is ``lru``.
    """

    name = "static_top"

    def __init__(self, keys: np.ndarray | None = None, counts: np.ndarray | None = None) -> None:
        """Take ``keys`` (integers without repeats) and how often each is used (integers, not negative)."""
        self.keys = np.zeros(0, np.uint64) if keys is None else np.ascontiguousarray(keys, np.uint64)
        self.counts = np.zeros(0, np.int64) if counts is None else np.ascontiguousarray(counts, np.int64)
        if self.keys.ndim != 1 or self.keys.shape != self.counts.shape or (self.counts < 0).any():
            raise PolicyError("static_top: give as many counts as keys, none negative")

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        table = hashing.new_table(self.keys.size)
        _fill(table, self.keys)
        return {
            "known_key": self.keys if self.keys.size else np.zeros(1, np.uint64),
            "known_count": self.counts if self.counts.size else np.zeros(1, np.int64),
            "known_table": table,
            **buckets.new_buckets(capacity),
        }

    @staticmethod
    def touch(s, slots, keys, next_use, now):
        for i in range(slots.size):
            buckets.fetch(s, slots, i)
            slot = slots[i]
            buckets.move(s, slot, buckets.key_of(s, slot))

    @staticmethod
    def insert(s, slots, keys, next_use, now):
        for i in range(slots.size):
            buckets.add(s, slots[i], _frequency(s, keys[i]))

    @staticmethod
    def remove(s, slots):
        buckets.remove(s, slots)

    @staticmethod
    def evict(s, n, last_use, pinned_since, victims):
        return buckets.evict(s, n, last_use, pinned_since, victims)

    def __repr__(self) -> str:
        return f"StaticTop({self.keys.size} rows)"
