"""Automatic windows: which batches are known when each batch is planned, in training and in simulations.

The window of a plan ends with the first batch that fills it, so it is the window that a training would begin
with there, whatever came before. Batches are pulled from a loader a few steps earlier, and the window ends no
later than what was pulled by then (``Pulls``). Both depend on the batches alone, never on time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cache_policies.prepared import PreparedTrace

FIRST_ROWS = 1 << 16
"""Distinct rows of each batch, added up, with which the first plan is made, full or not. Training waits until
these batches are announced; then windows grow, some batches per step."""
_SPARE = 16  # one batch more is pulled per so many of the window, and two besides: windows vary a little
_FASTER, _FIRST = 8, 0.5  # a window that is not filled gets one batch more per so many and step, and this


class Pulls:
    """How many batches to pull behind the batches that are planned ahead: ``window``.

    A window grows by a part of its length per step. Announcing many more batches than one per step would make
    training wait.
    """

    def __init__(self, behind: int, is_full: bool) -> None:
        """Begin with a window of ``behind`` batches, which fill it, or have ``FIRST_ROWS`` rows."""
        self._length: float = _with_spare(behind) if is_full else behind

    @property
    def window(self) -> int:
        return int(self._length)

    def planned(self, behind: int, is_full: bool) -> None:
        """Learn of a plan: ``behind`` batches were known behind its batch. ``is_full``: they fill the
        window."""
        if is_full:
            self._length = _with_spare(behind)
        else:
            self._length = min(behind + behind // 2 + 1, self._length * (1 + 1 / _FASTER) + _FIRST)


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

    def extend(plan: int) -> None:
        nonlocal end, distinct
        rows = trace.rows[offsets[end] : offsets[end + 1]]
        distinct += int((last[rows] < plan).sum())
        last[rows] = end
        end += 1

    for plan in range(on_demand, trace.batches):
        full = end > plan and is_full(plan, end, distinct)
        if pulls is None:
            while end < trace.batches and not full and offsets[end] - offsets[plan] < FIRST_ROWS:
                extend(plan)
                full = is_full(plan, end, distinct)
            pulls = Pulls(end - 1 - plan, full)
            limits[plan] = end
            limits[plan + 1 : plan + depth + 1] = min(trace.batches, plan + depth + 1 + pulls.window)
        while end <= plan or (end < limits[plan] and not full):
            extend(plan)
            full = is_full(plan, end, distinct)
        known[plan] = behind = end - 1 - plan
        pulls.planned(behind, full)
        pulled = min(trace.batches, plan + depth + 2 + pulls.window)
        limits[plan + depth + 1] = max(limits[plan + depth], pulled)
        rows = trace.rows[offsets[plan] : offsets[plan + 1]]
        distinct -= int((last[rows] == plan).sum())
    return known
