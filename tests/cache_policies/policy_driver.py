"""The plan driver of ``cache_policies.check`` with an oracle beside the policy."""

from __future__ import annotations

import numpy as np

from cache_policies.check import PlanDriver


class Driver(PlanDriver):
    """``oracle(capacity)``, if given, sees every call and must name the same victims in the same order."""

    def __init__(self, policy, capacity: int, oracle=None) -> None:
        super().__init__(policy, capacity)
        self.oracle = oracle(capacity) if oracle else None

    def call(self, hook, *arguments) -> None:
        super().call(hook, *arguments)
        if self.oracle:
            plain = [a.tolist() if isinstance(a, np.ndarray) else a for a in arguments]
            getattr(self.oracle, hook)(*plain)

    def evict(self, n: int, pinned_since: int) -> list[int]:
        victims = super().evict(n, pinned_since)
        if self.oracle:
            assert victims == self.oracle.evict(n, self.last_use, pinned_since)
        return victims
