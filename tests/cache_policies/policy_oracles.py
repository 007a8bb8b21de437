"""Slow pure-Python models of the policies: the whole resident set in eviction order, sorted anew each
time.
"""

from __future__ import annotations

from cache_policies import UNKNOWN


class Oracle:
    """Keeps per slot what a policy's order depends on; ``rank(slot)`` sorts the first victim first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clock = 0
        self.rows: dict[int, dict] = {}

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def rank(self, slot: int) -> tuple:
        raise NotImplementedError

    def touch(self, slots, keys, next_use, now) -> None:
        for slot, use in zip(slots, next_use, strict=True):
            row = self.rows[slot]
            row.update(used=self.tick(), uses=row["uses"] + 1, next=int(use), learnt=self.tick())

    def insert(self, slots, keys, next_use, now) -> None:
        for slot, use in zip(slots, next_use, strict=True):
            self.rows[slot] = {"used": self.tick(), "uses": 1, "next": int(use), "learnt": self.tick()}

    def announce(self, slots, next_use, now) -> None:
        for slot, use in zip(slots, next_use, strict=True):
            row = self.rows[slot]
            if row["next"] != use:
                row.update(next=int(use), learnt=-self.tick())
                if use == UNKNOWN:
                    row["used"] = row["learnt"]

    def remove(self, slots) -> None:
        for slot in slots:
            del self.rows[slot]

    def evict(self, n, last_use, pinned_since) -> list[int]:
        order = sorted((slot for slot in self.rows if last_use[slot] < pinned_since), key=self.rank)
        victims = order[:n]
        self.remove(victims)
        return victims


class LruOracle(Oracle):
    def rank(self, slot):
        return (self.rows[slot]["used"],)


class LfuOracle(Oracle):
    def rank(self, slot):
        return (self.rows[slot]["uses"], self.rows[slot]["used"])


class LookaheadOracle(Oracle):
    def rank(self, slot):
        row = self.rows[slot]
        if row["next"] == UNKNOWN:
            return (0, row["uses"], row["used"])
        return (1, -row["next"], row["learnt"])


ORACLES: dict[str, type[Oracle]] = {"lru": LruOracle, "lfu": LfuOracle, "lookahead": LookaheadOracle}
