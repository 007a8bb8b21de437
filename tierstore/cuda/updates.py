"""Updates of rows: what they need is made ready first, and native calls then change rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tierstore._core import Bags, OptimizerStep, UpdateArgs, UpdateRounding
from tierstore.cuda import args as kernel_args
from tierstore.cuda.args import (
    MISSED_FIELDS,
    STEP_FIELDS,
    BagsArgs,
    BagShare,
    BagSharesArgs,
    GradsArgs,
    StepArgs,
)
from tierstore.cuda.cubins import Part
from tierstore.cuda.driver import CallError
from tierstore.cuda.kernels import lanes_of
from tierstore.cuda.rows import ANY_LAYOUT, GpuRows, Slots
from tierstore.cuda.staged import HotRows
from tierstore.cuda.streams import Operation, Stream, Streams
from tierstore.row_format import WIDE

_BAG_ARRAYS = 5
_MEAN = 1  # csrc/kernels/bags.h, Pooling
_ROUNDING_ARRAYS = 3
_BEFORE_BAGS = 8 + _ROUNDING_ARRAYS
"""Arrays of an update before those of its bags."""
_KERNELS = ("update_singles", "update_cold", "update_pieces", "update_hot")
_POSITIONS_OF_SINGLES = 1.5
"""So many positions has an average row at most where update_singles is faster than update_cold."""


def bags_args(bags: Bags, addresses: Sequence[int | None]) -> Structure:
    """Return the kernels' argument for bags whose arrays are at these addresses."""
    offsets, bag_start, out_offset, out_stride, modes = addresses
    num_bags, num_features = len(bags.offsets) - 1, len(bags.modes)
    return BagsArgs(offsets, num_bags, bag_start, num_features, out_offset, out_stride, modes)


@dataclass(frozen=True)
class GradientsOf:
    """Where an update finds its gradients. ``bags``: of a pooled lookup; None: ``stride`` floats apart."""

    grad: int
    stride: int = 0
    bags: Bags | None = None
    weights: int = 0
    argmax: int = 0


class _UpdateArrays:
    """The index arrays of one update, and room for what its kernels hand to one another."""

    def __init__(
        self, rows: GpuRows, args: UpdateArgs, gradients: GradientsOf, rounding: UpdateRounding | None
    ) -> None:
        self.args, self._gradients, self.bags = args, gradients, gradients.bags
        staged = rows.parts.staged.of(args.slots)
        if staged is not None and not staged.has(args.csr_start, args.csr_positions):
            staged = None  # some rows stay as they are
        self.hot = HotRows(args.csr_start) if staged is None else staged.hot
        rejected = np.zeros(len(args.slots) if args.check_finite else 0, np.uint8)
        self._rejected_bytes = rejected.nbytes
        used: NDArray[np.int32] | None = None
        of_bags: Sequence[NDArray[np.generic] | None] = [None] * _BAG_ARRAYS
        dice: Sequence[NDArray[np.generic] | None] = [None] * _ROUNDING_ARRAYS
        if rounding is not None and rows.weights != WIDE.weights:
            dice = [rounding.keys, rounding.seeds, rounding.columns]
        shares, bag_of = 0, 0
        if self.bags is not None:
            of_bags, positions = self.bags.arrays, int(self.bags.offsets[-1])
            if staged is not None:
                used = staged.inverse
            elif np.any(self.bags.modes == _MEAN):
                # Positions that count in a mean; the others have no row, or one that stays as it is.
                used = np.full(positions, -1, np.int32)
                used[args.csr_positions] = 0
            shares, bag_of = ctypes.sizeof(BagShare) * (len(self.bags.offsets) - 1), 4 * positions
        self.indices = rows.indices(
            *(args.slots, args.csr_start, args.csr_positions, self.hot.rows, self.hot.first_piece),
            *(args.means, rejected, args.squares, *dice, used, *of_bags),
            scratch=[shares, bag_of, 4 * args.dim * self.hot.pieces],
            staged=staged,
        )

    def shares_args(self, dim: int) -> Structure:
        used, *of_bags, shares, bag_of, _ = self.indices.addresses[_BEFORE_BAGS:]
        assert self.bags is not None
        return BagSharesArgs(bags_args(self.bags, of_bags), dim, used, shares, bag_of)

    def update_args(self, rows: Structure) -> Structure:
        args, g, at = self.args, self._gradients, self.indices.addresses
        slots, csr_start, csr_positions, hot, hot_piece, means, rejected, squares, *dice = at[:_BEFORE_BAGS]
        shares, bag_of, partials = at[-3:]
        if self.bags is None:
            shares = bag_of = None
        grads = GradsArgs(g.grad, g.stride, shares, bag_of, g.weights, g.argmax)
        return kernel_args.UpdateArgs(
            *(rows, slots, len(args.slots), csr_start, csr_positions, grads, _step_args(args.step)),
            kernel_args.RoundingArgs(*dice),
            *(int(args.check_finite), self.hot.num_long, rejected, squares, means),
            *(hot, hot_piece, self.hot.count, partials),
        )

    def returned(self) -> list[tuple[int, int]]:
        """Return where in the block, and how long, what the caller gets back is."""
        begins = self.indices.begins
        found = [(begins[6], self._rejected_bytes)] if self._rejected_bytes else []
        squares = self.args.squares
        return found if squares is None else [*found, (begins[7], squares.nbytes)]

    def read_back(self) -> Slots:
        """Fill the caller's squares, and return the rows that were left alone."""
        parts = [self.indices.block.view(*part, write=False) for part in self.returned()]
        if self.args.squares is not None:
            self.args.squares[:] = parts[-1].view(np.float32)
            return np.empty(0, np.int32)
        return np.flatnonzero(parts[0]).astype(np.int32)


def _step_args(step: OptimizerStep) -> Structure:
    return StepArgs(*(getattr(step, name) for name in (*STEP_FIELDS, *MISSED_FIELDS)))


class RowUpdate:
    """An update of some rows that is ready to be made. Nothing has changed yet."""

    def __init__(
        self,
        rows: GpuRows,
        part: Part,
        args: UpdateArgs,
        gradients: GradientsOf,
        rounding: UpdateRounding | None,
    ) -> None:
        self._rows, self._part = rows, part
        kernels = rows.parts.kernels
        for name in _KERNELS:
            kernels.load(part, name)
        if gradients.bags is not None:
            kernels.load(ANY_LAYOUT, "bag_shares")
        self._arrays = _UpdateArrays(rows, args, gradients, rounding)
        self._done, self._changes_rows, self._made = 0, 0, list[int]()
        try:
            rows.upload(self._arrays.indices)
        except BaseException:
            self.end()
            raise

    def follow(self, compute: Operation) -> partial[None]:
        """Let the operation follow the last ones on the rows. Return the native call that changes them; it
        raises ``CallError``."""
        self._rows.use(compute, self._arrays.args.slots, self._arrays.indices)
        self._done = compute.mark
        shares = list(self._shares(compute))
        self._changes_rows = len(shares)
        return partial(self._made.extend, map(partial.__call__, [*shares, *self._launches(compute)]))

    @property
    def has_begun(self) -> bool:
        """Whether a kernel that changes rows was launched."""
        return len(self._made) > self._changes_rows

    def _shares(self, compute: Operation) -> Iterator[partial[int]]:
        kernels, arrays = self._rows.parts.kernels, self._arrays
        if arrays.bags is not None:
            bags, shares = len(arrays.bags.offsets) - 1, arrays.shares_args(self._part.dim or 0)
            yield from kernels.launching(compute, ANY_LAYOUT, "bag_shares", shares, bags)

    def _launches(self, compute: Operation) -> Iterator[partial[int]]:
        kernels, arrays, part = self._rows.parts.kernels, self._arrays, self._part
        given, lanes = (
            arrays.update_args(self._rows.rows_args(part.dim or 0)),
            lanes_of(part.dim or 0, part.vec or 0),
        )
        rows, positions = len(arrays.args.slots), len(arrays.args.csr_positions)
        are_single = positions <= _POSITIONS_OF_SINGLES * rows
        for name, threads in (
            ("update_singles", rows if are_single else 0),
            ("update_cold", 0 if are_single else (arrays.hot.num_long + rows) * lanes),
            ("update_pieces", arrays.hot.pieces * lanes),
            ("update_hot", arrays.hot.count * lanes),
        ):
            yield from kernels.launching(compute, part, name, given, threads)
        block = arrays.indices.block
        for begin, size in arrays.returned():
            yield compute.copying(block.address + begin, block.device + begin, size)

    def unchanged(self) -> Slots:
        """Return the rows that were left as they are, which is known when the update is done."""
        if not self._arrays.returned():
            return np.empty(0, np.int32)
        self._rows.parts.streams.synchronize(self._done)
        return self._arrays.read_back()

    def end(self) -> None:
        """Let others use the index arrays once the update is done."""
        self._rows.parts.indices.give(self._arrays.indices.block)


class RowUpdates:
    """Updates that are made as one operation; ``calls`` has a native call for each."""

    def __init__(self, updates: Sequence[RowUpdate], calls: Sequence[partial[None]]) -> None:
        self._updates, self.calls = updates, calls

    def unchanged(self, made: Sequence[object]) -> list[Slots]:
        """Return the rows that each update left as they are; ``made``: what the calls have returned."""
        try:
            return [update.unchanged() for update in self._updates]
        finally:
            for update in self._updates:
                update.end()


@contextmanager
def one_operation(streams: Streams, updates: Sequence[RowUpdate]) -> Iterator[RowUpdates]:
    """Give COMPUTE one operation for all ``updates``, in which the caller makes their calls."""
    try:
        with streams.operation(Stream.COMPUTE) as compute:
            yield RowUpdates(updates, [update.follow(compute) for update in updates])
    except BaseException as error:
        for update in updates:
            update.end()
        if isinstance(error, CallError) and any(update.has_begun for update in updates):
            raise streams.given_up(error) from None  # rows are neither as before the updates nor as after
        raise
