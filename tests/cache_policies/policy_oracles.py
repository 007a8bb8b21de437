"""Slow pure-Python models of the policies: the whole resident set in eviction order, sorted anew each
time.
"""

from __future__ import annotations

import math

from cache_policies import UNKNOWN
from cache_policies.lfu_aged import LfuAged


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


class FifoOracle(Oracle):
    """``arrived`` is what a touch leaves alone."""

    def touch(self, slots, keys, next_use, now):
        for slot in slots:
            self.rows[slot]["seen"] = True

    def insert(self, slots, keys, next_use, now):
        for slot, key in zip(slots, keys, strict=True):
            self.rows[slot] = {"arrived": self.tick(), "seen": False, "key": key}

    def announce(self, slots, next_use, now):
        pass

    def rank(self, slot):
        return (self.rows[slot]["arrived"],)


class ClockOracle(FifoOracle):
    """Goes around a plain list; the hand stands before its first element."""

    def evict(self, n, last_use, pinned_since):
        queue = sorted(self.rows, key=self.rank)
        victims: list[int] = []
        while len(victims) < n and any(last_use[slot] < pinned_since for slot in queue):
            slot = queue.pop(0)
            pinned = last_use[slot] >= pinned_since
            if not pinned and not self.rows[slot]["seen"]:
                victims.append(slot)
                continue
            if not pinned:
                self.rows[slot]["seen"] = False
            queue.append(slot)
        self.remove(victims)
        for slot in queue:
            self.rows[slot]["arrived"] = self.tick()
        return victims


class SieveOracle(FifoOracle):
    hand = None  # a slot, or None for the oldest

    def remove(self, slots):
        for slot in slots:
            queue = sorted(self.rows, key=self.rank)
            if self.hand == slot:
                self.hand = (*queue, None)[queue.index(slot) + 1]
            del self.rows[slot]

    def evict(self, n, last_use, pinned_since):
        victims: list[int] = []
        while len(victims) < n and any(last_use[slot] < pinned_since for slot in self.rows):
            queue = sorted(self.rows, key=self.rank)
            at = queue.index(self.hand) if self.hand in self.rows else 0
            slot, self.hand = queue[at], (*queue, None)[at + 1]
            if last_use[slot] >= pinned_since:
                continue
            if self.rows[slot]["seen"]:
                self.rows[slot]["seen"] = False
            else:
                victims.append(slot)
                del self.rows[slot]
        return victims


class LfuAgedOracle(Oracle):
    """Sums the weights of all uses anew, in exact arithmetic up to the quantum of the policy."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.count = 0
        self.half_life = LfuAged().half_life * capacity

    def touch(self, slots, keys, next_use, now):
        super().touch(slots, keys, next_use, now)
        for slot in slots:
            self.count += 1
            self.rows[slot].setdefault("times", []).append(self.count)

    def insert(self, slots, keys, next_use, now):
        super().insert(slots, keys, next_use, now)
        for slot in slots:
            self.count += 1
            self.rows[slot]["times"] = [self.count]

    def rank(self, slot):
        weight = sum(2.0 ** (time / self.half_life) for time in self.rows[slot]["times"])
        return (math.floor(8 * math.log2(weight)), self.rows[slot]["used"])


ORACLES: dict[str, type[Oracle]] = {
    "lookahead": LookaheadOracle,
    "lru": LruOracle,
    "lfu": LfuOracle,
    "lfu_aged": LfuAgedOracle,
    "fifo": FifoOracle,
    "clock": ClockOracle,
    "sieve": SieveOracle,
    "static_top": LruOracle,  # no frequencies are given
    "belady": LookaheadOracle,
}
