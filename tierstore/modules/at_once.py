"""Lookups of rows that stay in memory, of which one native call finds the rows and makes the output.

What Python needs of such a lookup is made when a backward pass asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch._C import _are_functorch_transforms_active

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
from tierstore.modules.parts import Part, PooledPart, SequencePart, new_on_cpu

if TYPE_CHECKING:
    from tierstore.modules.base import TieredModule

Native = TypeVar("Native", _core.PooledLookup, _core.RowLookup)
Begun: TypeAlias = tuple[_core.ResidentForward, Tensor | None, Sequence[int]]
"""What makes a lookup, what autograd trains in place of the rows (None for a call that only reads them), and
the tables that are frozen."""


class LookupAtOnce(ABC, Generic[Native]):
    """A lookup of one part, which a native call has made: it has written to the address of ``out``."""

    __slots__ = ("_group", "_lookup", "_native", "frozen", "out")

    _group: TierGroup
    _lookup: FeatureLookup | None
    _native: Native
    out: Tensor | None
    """The output, until autograd has it."""
    frozen: Sequence[int]
    """The tables that were frozen in the forward pass."""

    def whole(self) -> FeatureLookup:
        """Return the lookup as other code takes it."""
        if self._lookup is None:
            part, features, counts = self._described()
            part.frozen = self.frozen
            if (found := self._native.rows) is not None:
                part.rows = ResidentRows(self._group, part.batch, found, self._group.fast.rows)
            shape = () if self.out is None else tuple(self.out.shape)
            self._lookup = FeatureLookup([part], shape, [features], counts)
        return self._lookup

    def count_soon(self) -> None:
        """Let another thread count the lookups so far."""
        assert self._group.resident is not None
        self._group.resident.count_soon()

    @abstractmethod
    def gradients(self, grad: Tensor) -> PooledGradients | SequenceGradients:
        """Return the gradient of the output as updates read it."""

    @abstractmethod
    def _described(self) -> tuple[Part, list[int], list[int]]:
        """Return the part, without its rows, the numbers of its features, and the counts of all features."""


class PooledAtOnce(LookupAtOnce[_core.PooledLookup]):
    """``features``: their numbers; ``spans``: of the part's ids. Each feature has a bag for every row of the
    output."""

    __slots__ = ("_bags", "_features", "_spans")

    def __init__(
        self,
        group: TierGroup,
        native: _core.PooledLookup,
        out: Tensor,
        bags: int,
        features: Sequence[int],
        spans: list[tuple[int, int]],
    ) -> None:
        self._group = group
        self._native = native
        self._lookup = None
        self.out = out
        self._bags = bags
        self._features = features
        self._spans = spans

    def gradients(self, grad: Tensor) -> PooledGradients:
        return PooledGradients(readable_gradient(grad), [None], [None])

    def _described(self) -> tuple[PooledPart, list[int], list[int]]:
        part = PooledPart(self._group, self._native.batch, self._spans, bags=self._native.bags)
        return part, list(self._features), [self._bags] * len(self._features)


class RowsAtOnce(LookupAtOnce[_core.RowLookup]):
    """``keys``: the number of each feature's key."""

    __slots__ = ("_keys",)

    def __init__(
        self, group: TierGroup, native: _core.RowLookup, out: Tensor, keys: NDArray[np.int64]
    ) -> None:
        self._group = group
        self._native = native
        self._lookup = None
        self.out = out
        self._keys = keys

    def gradients(self, grad: Tensor) -> SequenceGradients:
        return sequence_gradients([grad])

    def _described(self) -> tuple[SequencePart, list[int], list[int]]:
        part = SequencePart(self._group, self._native.batch, [])
        return part, list(range(len(self._keys))), self._native.bags.counts(self._keys)


def begun_at_once(module: TieredModule, group: TierGroup) -> Begun | None:
    """Return what the lookup of a forward call of ``module`` now takes, of rows in a tier of ``group``.

    None where a lookup takes more than one native call: where rows leave the tier, or are elsewhere than in
    this machine's memory, where the forward call is transformed, where lookups are made ahead, and where a
    process of several has to be checked."""
    resident = group.resident
    if resident is None or (forward := resident.forward) is None or group.stats.before:
        return None
    if _are_functorch_transforms_active() or (trained := module.trained_at_once()) is None:
        return None
    group.check_open()
    anchor, frozen = trained
    return forward[anchor is None], anchor, frozen


def finished(
    module: TieredModule,
    lookup: PooledAtOnce | RowsAtOnce,
    begun: Begun,
    made: tuple[object, bool, bool],
) -> Tensor:
    """Return the output of a lookup that :func:`begun_at_once` has begun. ``made``: what the native call has
    returned."""
    _, anchor, lookup.frozen = begun
    _, is_found, is_due = made
    if is_due:
        lookup.count_soon()
    if is_found:
        if anchor is not None:
            return AtOnceFunction.apply(anchor, module, lookup)
        out, lookup.out = lookup.out, None  # as an update leaves it: the rows' memory ends with the output
        assert out is not None
        return out
    whole = lookup.whole()
    lookup.out = None  # the tier may need the memory for the rows
    if isinstance(lookup, PooledAtOnce):
        return module.pooled_rows(whole, None)
    return module.rows_one_by_one(whole)[0]


def new_output(rows: int, columns: int) -> Tensor | None:
    """Return memory for an output; None where it is refused: a lookup step by step asks for the rows' memory
    first, and says how large the budget should be."""
    try:
        return new_on_cpu(rows, columns)
    except RuntimeError:
        return None
