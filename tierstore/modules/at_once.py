"""Lookups of rows that stay in memory, of which one native call finds the rows and makes the output.

What Python needs of such a lookup is made when a backward pass asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tierstore import _core
from tierstore.cache.group import TierGroup
from tierstore.cache.pinned_rows import ResidentRows
from tierstore.modules.inputs import FeatureLookup
from tierstore.modules.lookup import (
    AtOnceFunction,
    PooledGradients,
    SequenceGradients,
    readable_gradient,
    sequence_gradients,
)
from tierstore.modules.parts import Part, PooledPart, SequencePart, new_floats
from tierstore.modules.wrappers import has_other_ranks

if TYPE_CHECKING:
    from tierstore.modules.base import TieredModule

Native = TypeVar("Native", _core.PooledLookup, _core.RowLookup)
Made = TypeVar("Made", "PooledAtOnce", "RowsAtOnce")


class LookupAtOnce(ABC, Generic[Native]):
    """A lookup of one part, which a native call has made: it has written to the address of ``out``."""

    __slots__ = ("_group", "_lookup", "_native", "out")

    def __init__(self, group: TierGroup, native: Native, out: Tensor) -> None:
        self._group = group
        self._native: Native = native
        self._lookup: FeatureLookup | None = None
        self.out: Tensor | None = out

    def take_out(self) -> Tensor:
        """Return the output. It knows this object, which must not know the output then."""
        out, self.out = self.out, None
        assert out is not None
        return out

    def whole(self) -> FeatureLookup:
        """Return the lookup as other code takes it."""
        if self._lookup is None:
            part, features, counts = self._described()
            if (found := self._native.rows) is not None:
                part.rows = ResidentRows(self._group, part.batch, found, self._group.fast.rows)
            shape = () if self.out is None else tuple(self.out.shape)
            self._lookup = FeatureLookup([part], shape, [features], counts)
        return self._lookup

    @abstractmethod
    def gradients(self, grad: Tensor) -> PooledGradients | SequenceGradients:
        """Return the gradient of the output as updates read it."""

    @abstractmethod
    def _described(self) -> tuple[Part, list[int], list[int]]:
        """Return the part, without its rows, the numbers of its features, and the counts of all features."""


class PooledAtOnce(LookupAtOnce[_core.PooledLookup]):
    """``features``: their numbers; ``bags``: of each; ``spans``: of the part's ids."""

    __slots__ = ("bags", "features", "spans")
    bags: int
    features: Sequence[int]
    spans: list[tuple[int, int]]

    def gradients(self, grad: Tensor) -> PooledGradients:
        return PooledGradients(readable_gradient(grad), [None], [None])

    def _described(self) -> tuple[PooledPart, list[int], list[int]]:
        part = PooledPart(self._group, self._native.batch, self.spans, bags=self._native.bags)
        return part, list(self.features), [self.bags] * len(self.features)


class RowsAtOnce(LookupAtOnce[_core.RowLookup]):
    """``keys``: the number of each feature's key."""

    __slots__ = ("keys",)
    keys: NDArray[np.int64]

    def gradients(self, grad: Tensor) -> SequenceGradients:
        return sequence_gradients([grad])

    def _described(self) -> tuple[SequencePart, list[int], list[int]]:
        part = SequencePart(self._group, self._native.batch, [])
        return part, list(range(len(self.keys))), self._native.bags.counts(self.keys)


def forward_of(module: TieredModule, group: TierGroup) -> _core.ResidentForward | None:
    """Return what makes the lookup of a forward call of ``module``, in a tier of ``group``.

    None where a lookup takes more than that: where rows leave the tier, or are elsewhere than in this
    machine's memory, where the forward call trains nothing, where lookups are made ahead, and where a process
    of several has to be checked."""
    resident = group.resident
    if resident is None or resident.forward is None or group.stats.before:
        return None
    if module.observer is not None or module.makes_ahead or not module.trains or has_other_ranks():
        return None
    group.check_open()
    return resident.forward


def pooled_at_once(
    module: TieredModule,
    group: TierGroup,
    shape: tuple[int, int],
    make: Callable[[int], tuple[_core.PooledLookup, bool, bool] | None],
    part: tuple[Sequence[int], list[tuple[int, int]]],
) -> Tensor | None:
    """Return the output, of this shape, of a lookup that ``make`` makes, given the output's address. None for
    ids or bags that are wrong. ``part``: its features, which have a bag each in every example, and its
    spans."""
    made = _made(PooledAtOnce, group, shape, make)
    if made is None:
        return None
    lookup, is_found = made
    lookup.bags = shape[0]
    lookup.features, lookup.spans = part
    if is_found:
        return _applied(module, lookup)
    return module.pooled_rows(_step_by_step(lookup), None)


def rows_at_once(
    module: TieredModule,
    group: TierGroup,
    count: int,
    make: Callable[[int], tuple[_core.RowLookup, bool, bool] | None],
    keys: NDArray[np.int64],
) -> tuple[RowsAtOnce, Tensor] | None:
    """Return a lookup of ``count`` ids that ``make`` makes, given the address of the rows, and the rows. None
    for ids or bags that are wrong. ``keys``: the number of each feature's key."""
    made = _made(RowsAtOnce, group, (count, group.layout.dim), make)
    if made is None:
        return None
    lookup, is_found = made
    lookup.keys = keys
    if is_found:
        return lookup, _applied(module, lookup)
    return lookup, module.rows_one_by_one(_step_by_step(lookup))[0]


def _made(
    kind: Callable[[TierGroup, Native, Tensor], Made],
    group: TierGroup,
    shape: tuple[int, int],
    make: Callable[[int], tuple[Native, bool, bool] | None],
) -> tuple[Made, bool] | None:
    """Return a lookup of this ``kind``, and whether its rows were found; None where ``make`` returns none."""
    out = _output(shape)
    made = None if out is None else make(out.data_ptr())
    if out is None or made is None:
        return None
    native, is_found, is_due = made
    if is_due:
        assert group.resident is not None
        group.resident.count_soon()
    return kind(group, native, out), is_found


def _applied(module: TieredModule, lookup: PooledAtOnce | RowsAtOnce) -> Tensor:
    found: Tensor = AtOnceFunction.apply(module.gradient_anchor(), module, lookup)
    return found


def _step_by_step(lookup: PooledAtOnce | RowsAtOnce) -> FeatureLookup:
    """Return a lookup, of which rows are missing, as other code takes it."""
    whole = lookup.whole()
    lookup.out = None  # the tier may need the memory for the rows
    return whole


def _output(shape: tuple[int, int]) -> Tensor | None:
    """Return memory for an output; None where it is refused: a lookup step by step asks for the rows' memory
    first, and says how large the budget should be."""
    try:
        return new_floats(shape, "cpu")
    except RuntimeError:
        return None
