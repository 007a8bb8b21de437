"""Which rows of a lookup each optimizer step of an update is for, where tables have steps of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierstore._core import OptimizerStep, UpdateRounding
from tierstore.keys import split
from tierstore.modules.parts import Part

Csr: TypeAlias = tuple[NDArray[np.int32], NDArray[np.int32]]
"""The positions of every unique row, as ``_core.build_csr`` gives them."""
TableStep: TypeAlias = tuple[OptimizerStep, Sequence[int] | None]
"""An optimizer step, and the tables of the engine that it is for; None: all of them."""
_ALL = slice(None)


@dataclass(frozen=True)
class Share:
    """The unique rows ``at`` of a part, which one optimizer step updates."""

    step: OptimizerStep
    at: slice | NDArray[np.intp]
    slots: NDArray[np.int32]
    csr: Csr
    rounding: UpdateRounding | None


def shares_of(
    part: Part, slots: NDArray[np.int32], csr: Csr | None, steps: Sequence[TableStep]
) -> list[Share]:
    """Return the shares of a part whose unique rows are at ``slots``; together they have each row once.

    Rows of a table without a step are in no share.
    """
    assert csr is not None
    if len(steps) == 1 and steps[0][1] is None:
        return [Share(steps[0][0], _ALL, slots, csr, part.rounding(_ALL))]
    part.batch.bring()
    tables, found = split(part.batch.unique)[0], []
    for step, numbers in steps:
        at = _ALL if numbers is None else places_of(np.isin(tables, numbers))
        if at is not None:
            found.append(Share(step, at, *cut_rows(slots, csr, at), part.rounding(at)))
    return found


def step_of(table: int, steps: Sequence[TableStep]) -> OptimizerStep:
    """Return the step of a table, which has one."""
    return next(step for step, numbers in steps if numbers is None or table in numbers)


def places_of(chosen: NDArray[np.bool_]) -> slice | NDArray[np.intp] | None:
    """Return where ``chosen`` holds: a slice if nothing lies between, as for a table with one feature."""
    at = np.flatnonzero(chosen)
    if not len(at):
        return None
    begin, end = int(at[0]), int(at[-1]) + 1
    return slice(begin, end) if end - begin == len(at) else at


def cut_rows(
    slots: NDArray[np.int32], csr: Csr, at: slice | NDArray[np.intp]
) -> tuple[NDArray[np.int32], Csr]:
    """Return the slots and the positions of the unique rows ``at`` of a part."""
    starts, positions = csr
    if isinstance(at, slice):
        first, end, _ = at.indices(len(slots))
        begin = starts[first]
        return slots[at], (starts[first : end + 1] - begin, positions[begin : starts[end]])
    counts = starts[at + 1] - starts[at]
    begins = np.append(0, np.cumsum(counts)).astype(np.int32)
    where = np.repeat(starts[at] - begins[:-1], counts) + np.arange(begins[-1])
    return slots[at], (begins, positions[where])
