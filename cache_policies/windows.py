"""Automatic windows: which batches are known when each batch is planned, in training and in simulations.

The window of a plan ends with the first batch that fills it, so it is the window that a training would begin
with there, whatever came before. Batches are pulled from a loader a few steps earlier, and the window ends no
later than what was pulled by then (``Pulls``). Both depend on the batches alone, never on time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cache_policies.prepared import PreparedTrace

_SPARE = 16  # one batch more is pulled per so many of the window, and two besides: windows vary a little
_FASTER = 8  # a window that is not filled gets one batch more per so many and step, and one besides


class Pulls:
    """How many batches to pull behind the batches that are planned ahead: ``window``."""

    def __init__(self, behind: int) -> None:
        """Begin with a window of ``behind`` batches, which fill it."""
        self.window = _with_spare(behind)

    def planned(self, behind: int, is_full: bool) -> None:
        """Learn of a plan: ``behind`` batches were known behind its batch. ``is_full``: they fill the
        window."""
        if is_full:
            self.window = _with_spare(behind)
        else:
            self.window = min(behind + behind // 2 + 1, self.window + self.window // _FASTER + 1)


def _with_spare(behind: int) -> int:
    return behind + behind // _SPARE + 2


def automatic_windows(
    trace: PreparedTrace, is_full: Callable[[int, int, int], bool], *, depth: int = 0, on_demand: int = 0
) -> np.ndarray:
    """Return how many batches are known behind each batch when it is planned: int64 per batch.

    ``is_full(first, end, distinct)``: whether batches ``first`` to ``end`` - 1, with so many distinct rows,
    fill a window. ``depth``, ``on_demand``: as of ``simulate``, which takes the result as its ``window``.
    """
    known, last = np.zeros(trace.batches, np.int64), np.full(trace.footprint, -1, np.int64)
    offsets = trace.offsets if trace.offsets.size else np.arange(trace.batches + 1)
    end, distinct = on_demand, 0
    pulls: Pulls | None = None
    limits = np.full(trace.batches + depth + 1, trace.batches)
    for plan in range(on_demand, trace.batches):
        full = end > plan and is_full(plan, end, distinct)
        while end <= plan or (end < limits[plan] and not full):
            rows = trace.rows[offsets[end] : offsets[end + 1]]
            distinct += int((last[rows] < plan).sum())
            last[rows] = end
            end += 1
            full = is_full(plan, end, distinct)
        known[plan] = behind = end - 1 - plan
        if pulls is None:
            pulls = Pulls(behind)
            limits[plan : plan + depth + 1] = min(trace.batches, plan + depth + 1 + pulls.window)
        pulls.planned(behind, full)
        pulled = min(trace.batches, plan + depth + 2 + pulls.window)
        limits[plan + depth + 1] = max(limits[plan + depth], pulled)
        rows = trace.rows[offsets[plan] : offsets[plan + 1]]
        distinct -= int((last[rows] == plan).sum())
    return known
