"""How many batches' ids training knows ahead, and what they leave of the memory for rows read ahead.

Both come from the rule of the runtime (:mod:`tierstore.pipeline.prefetch`): an automatic window ends where
its batches have taken what the rows leave that it asks for at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tierstore.planner.curves import Floats

# Tests compare these with the runtime.
MAX_WINDOW = 1024
WINDOW_BYTES = 16 << 20  # of the window, beside the memory for rows read ahead
WINDOW_ROWS = 1.9  # distinct rows of a window per row that it asks for at once

BYTES_PER_ID, BYTES_PER_BAG = 24, 16  # of a batch and its lookup; measured
BYTES_PER_ROW = 16 * 5 / 3 * 17 / 16  # of a distinct row in the window's index
MANY = 64  # batches whose distinct rows the model asks popularity for


@dataclass(frozen=True)
class Ahead:
    """The batches of one rank and what they ask for; arrays are by table.

    ``batch_bytes``: of one batch and its lookups. ``unique``, ``unique_of_many``: distinct rows of one batch,
    of MANY batches. ``rows``: all rows. ``held_bytes``: of a row that is read ahead, its index included.
    ``read_ahead``: bytes.
    """

    batch_bytes: float
    unique: Floats
    unique_of_many: Floats
    rows: Floats
    held_bytes: Floats
    read_ahead: float

    def _distinct(self, batches: float) -> Floats:
        """Return the distinct rows of so many batches, from one to MANY and on by a power law."""
        growth = np.log(self.unique_of_many / self.unique) / math.log(MANY)
        return np.minimum(self.rows, self.unique * batches**growth)

    def beyond(self, batches: float) -> float:
        """Return the bytes that a window takes of the memory for rows read ahead, at most half of it."""
        return min(self.read_ahead / 2, max(0.0, self._taken(batches) - WINDOW_BYTES))

    def _taken(self, batches: float) -> float:
        return batches * self.batch_bytes + BYTES_PER_ROW * float(self._distinct(batches).sum())

    def automatic(self) -> float:
        """Return the batches of an automatic window."""
        few, many = 1.0, float(MAX_WINDOW)
        if self._fits(many):
            return many
        for _ in range(30):
            middle = (few + many) / 2
            few, many = (middle, many) if self._fits(middle) else (few, middle)
        return few

    def _fits(self, batches: float) -> bool:
        asked = float((self._distinct(batches) * self.held_bytes).sum()) / WINDOW_ROWS
        free = max(0.0, min(self.read_ahead / 2, self.read_ahead - asked))
        return self._taken(batches) <= WINDOW_BYTES + free
