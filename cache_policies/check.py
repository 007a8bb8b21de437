"""Checks that a policy keeps the contract, by random plans on its compiled hooks, as a tier would make them.

The engine and the simulator find a policy that breaks the contract too, but later: run ``check`` on your own
policy first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cache_policies import registry
from cache_policies.checked import CheckedHooks
from cache_policies.errors import PolicyError
from cache_policies.policy import UNKNOWN, Policy

_CAPACITIES = (1, 2, 7, 100)
#: Plans from now until a use; None if the use is not known.
Deltas = Sequence[int | None]


class PlanDriver:
    """A cache of ``capacity`` slots around one policy, compiled unless ``hooks`` are given; every broken
    promise raises ``PolicyError``.
    """

    def __init__(
        self, policy: str | Policy | type[Policy], capacity: int, hooks: CheckedHooks | None = None
    ) -> None:
        self.policy = registry.get(policy)
        self.hooks: Any = self.policy.compile(capacity) if hooks is None else hooks.begin(capacity)
        self.last_use = np.full(capacity, -1, np.int64)
        self.row_in: dict[int, int] = {}  # slot → key
        self.free = list(range(capacity))
        self.now = 0
        self.next_key = 1000

    def announce(self, slots: Sequence[int], deltas: Deltas) -> None:
        if self.policy.uses_window and slots:
            self.call("announce", np.array(slots, np.int32), self._uses(deltas, len(slots)), self.now)

    def touch(self, slots: Sequence[int], deltas: Deltas = ()) -> None:
        self.last_use[list(slots)] = self.now
        keys = np.array([self.row_in[slot] for slot in slots], np.uint64)
        self.call("touch", np.array(slots, np.int32), keys, self._uses(deltas, len(slots)), self.now)

    def admit(self, keys: Sequence[int]) -> list[int]:
        """Return the keys that the policy does not refuse a slot."""
        admitted = np.ones(len(keys), np.uint8)
        self.hooks.admit(np.array(keys, np.uint64), self.now, admitted)
        self._require(bool((admitted <= 1).all()), "admit set admitted to a number that is neither 0 nor 1")
        return [key for key, taken in zip(keys, admitted, strict=True) if taken]

    def evict(self, n: int, pinned_since: int) -> list[int]:
        victims = self.hooks.evict(n, self.last_use, pinned_since).tolist()
        evictable = [slot for slot in self.row_in if self.last_use[slot] < pinned_since]
        twice = [slot for slot in victims if victims.count(slot) > 1]
        self._require(not twice, f"evict returned a slot twice: {twice[:1]}")
        beyond = [slot for slot in victims if not 0 <= slot < self.last_use.size]
        self._require(
            not beyond, f"evict returned slot {beyond[:1]}, but slots are 0 to {self.last_use.size - 1}"
        )
        empty = [slot for slot in victims if slot not in self.row_in]
        self._require(not empty, f"evict returned an empty slot: {empty[:1]}")
        pinned = [slot for slot in victims if self.last_use[slot] >= pinned_since]
        self._require(not pinned, f"evict returned a pinned slot: {pinned[:1]}")
        self._require(
            len(victims) == min(n, len(evictable)),
            f"evict returned {len(victims)} of {n} slots, but {len(evictable)} were not pinned",
        )
        self.freed(victims)
        return victims

    def insert(self, n: int, deltas: Deltas = (), keys: Sequence[int] | None = None) -> list[int]:
        """Give the first ``n`` free slots to ``keys`` (new keys if None); return the slots."""
        if keys is None:
            keys = list(range(self.next_key, self.next_key + n))
            self.next_key += n
        slots, self.free = self.free[:n], self.free[n:]
        keys = keys[: len(slots)]
        self.row_in.update(zip(slots, keys, strict=True))
        self.last_use[slots] = self.now
        uses = self._uses(deltas, len(slots))
        self.call("insert", np.array(slots, np.int32), np.array(keys, np.uint64), uses, self.now)
        return slots

    def remove(self, slots: Sequence[int]) -> None:
        self.call("remove", np.array(slots, np.int32))
        self.freed(slots)

    def plan(
        self,
        keys: Sequence[int],
        deltas: Deltas = (),
        *,
        announced: dict[int, int | None] | None = None,
        depth: int = 0,
    ) -> None:
        """Make one plan as the engine does: it uses ``keys``; ``announced`` has next uses of slots."""
        known = {slot: delta for slot, delta in (announced or {}).items() if slot in self.row_in}
        self.announce(list(known), list(known.values()))
        slot_of = {key: slot for slot, key in self.row_in.items()}
        keys = list(dict.fromkeys(keys))
        self.touch([slot_of[key] for key in keys if key in slot_of], deltas)
        missed = self.admit([key for key in keys if key not in slot_of])
        lacking = len(missed) - len(self.free)
        if lacking > 0:
            self.evict(lacking, self.now - depth)
        self.insert(len(missed), deltas, missed)
        self.now += 1

    def call(self, hook: str, *arguments: Any) -> None:
        getattr(self.hooks, hook)(*arguments)

    def freed(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.row_in[slot]
        self.free.extend(slots)

    def _uses(self, deltas: Deltas, n: int) -> np.ndarray:
        padded = [*deltas, *[None] * n][:n]
        return np.array([UNKNOWN if d is None else self.now + d for d in padded], np.int64)

    def _require(self, kept: bool, otherwise: str) -> None:
        if not kept:
            raise PolicyError(
                f"policy {self.policy.name!r} breaks the contract in plan {self.now}: {otherwise}"
            )


def check(policy: str | Policy | type[Policy], plans: int = 300, seed: int = 0) -> None:
    """Run ``plans`` random plans at several capacities; ``PolicyError`` says what a policy does wrong, if
    anything.

    The plans run twice: on hooks whose every index is checked, so that no hook writes out of bounds, and then
    on the hooks that training runs.
    """
    chosen = registry.get(policy)
    chosen.check_complete()
    hooks = CheckedHooks(chosen)
    for checked in (hooks, None):
        _run_plans(chosen, plans, seed, checked)


def _run_plans(policy: Policy, plans: int, seed: int, hooks: CheckedHooks | None) -> None:
    rng = np.random.default_rng(seed)
    for capacity in _CAPACITIES:
        driver = PlanDriver(policy, capacity, hooks)
        for _ in range(plans):
            size = int(rng.integers(1, capacity + 1))
            keys = (rng.random(size) ** 2 * 3 * capacity).astype(int).tolist()
            deltas = [int(d) if d < 12 else None for d in rng.integers(1, 24, 3 * size)]
            slots = rng.integers(0, capacity, 4).tolist()
            announced = dict(zip(slots, deltas, strict=False))
            driver.plan(keys, deltas, announced=announced, depth=int(rng.integers(0, 4)))
            driver.remove([slot for slot in sorted(driver.row_in) if rng.random() < 0.02])
        driver.evict(capacity, driver.now)
        driver._require(not driver.row_in, "evict did not give up every row")
