"""Offline optimum."""

from __future__ import annotations

import numpy as np

from cache_policies import buckets
from cache_policies.lookahead import Lookahead


class Belady(Lookahead):
    """Evicts the row whose next use in the whole trace is furthest; rows never used again go first.

    This is MIN (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966) for whole
    batches: no policy misses fewer rows when every missed row must take a slot.
    """

    name = "belady"
    offline = True

    def state(self, capacity: int) -> dict[str, np.ndarray]:
        return buckets.new_buckets(capacity, pool=capacity + 1)
