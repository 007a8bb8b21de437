"""The kernels that compute on rows of a GPU: lookups and updates, with the bits of the CPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from ctypes import Structure

import numpy as np
from numpy.typing import NDArray

from tierstore._core import Bags, LookupArgs, UpdateArgs, UpdateRounding
from tierstore.cuda import args as kernel_args
from tierstore.cuda.args import GatherArgs, LookupPooledArgs, LookupRowsArgs
from tierstore.cuda.cubins import Part
from tierstore.cuda.kernels import lanes_of
from tierstore.cuda.rows import GpuRows, Slots
from tierstore.cuda.staged import Indices, Staged
from tierstore.cuda.streams import Operation, Stream
from tierstore.cuda.updates import GradientsOf, RowUpdate, bags_args, one_operation

_ROWS_OF_GROUP = 4
"""Rows that a group of threads copies at once (csrc/cuda/lookup.cuh)."""
_SHORT_BAGS_OF_GROUP = 8
"""Bags that a group of threads pools at once where most have a position at most (csrc/cuda/lookup.cuh)."""
_POSITIONS_OF_SHORT_BAGS = 1.5
"""So many positions has an average bag at most where they count as short."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _vec(dim: int, address: int, *strides: int | NDArray[np.int64]) -> int:
    """Return the floats of a word: 4 where all vectors of ``dim`` floats begin at 16 bytes, else 1."""
    aligned = dim % 4 == 0 and address % 16 == 0
    return 4 if aligned and all(not np.any(np.asarray(stride) % 4) for stride in strides) else 1


def parts_of(
    rows: Collection[tuple[int, str, int]], updated: Collection[tuple[int, str, int]] = ()
) -> list[Part]:
    """Return the kernels that look up and update rows of these columns, dtypes of weights and kinds of steps:
    also where a tensor lies so that words of four floats cannot be read. ``updated``: rows that are updated
    alone."""
    wanted: list[tuple[int, str, int | None]] = [
        (dim, weights, kind) for dim, weights, step in rows for kind in (None, step)
    ]
    found = [
        Part(dim, vec, kind, weights)
        for dim, weights, kind in [*wanted, *updated]
        for vec in ((4, 1) if dim % 4 == 0 else (1,))
    ]
    return list(dict.fromkeys(found))


class CudaRows(GpuRows):
    """``DeviceRows`` of tierstore/cache/device.py in GPU memory.

    Kernels that compute are given to the caller's stream (``CudaDevice``), and no call waits for them, except
    updates that return something: with ``check_finite`` or ``squares``. Addresses are of the GPU.
    """

    # -- lookups ----------------------------------------------------------------------------------

    def lookup_pooled(
        self, args: LookupArgs, bags: Bags, out_addr: int, weights_addr: int = 0, argmax_addr: int = 0
    ) -> None:
        staged = self._checked(args, bags)
        part = self._part(args.dim, _vec(args.dim, out_addr, bags.out_offset, bags.out_stride))
        with self._looking_up(part, "lookup_pooled", args, bags, staged) as (compute, gather, bag_args):
            num_bags, lanes = len(bags.offsets) - 1, lanes_of(args.dim, part.vec or 0)
            are_short = len(args.inverse) <= _POSITIONS_OF_SHORT_BAGS * num_bags
            of_group = min(lanes, _SHORT_BAGS_OF_GROUP) if are_short else 1
            given = LookupPooledArgs(gather, bag_args, weights_addr, out_addr, argmax_addr, are_short, 0)
            self._launch(compute, part, "lookup_pooled", given, -(-num_bags // of_group))

    def lookup_rows(self, args: LookupArgs, out_addr: int, out_stride: int) -> None:
        staged = self._checked(args)
        _require(out_stride >= args.dim, "out_stride must be at least dim")
        part = self._part(args.dim, _vec(args.dim, out_addr, out_stride))
        with self._looking_up(part, "lookup_rows", args, None, staged) as (compute, gather, _):
            given = LookupRowsArgs(gather, len(args.inverse), out_addr, out_stride)
            self._launch(compute, part, "lookup_rows", given, -(-len(args.inverse) // _ROWS_OF_GROUP))

    def weight_grads(self, args: LookupArgs, bags: Bags, grad_addr: int, out_addr: int) -> None:
        staged = self._checked(args, bags)
        part = self._part(args.dim, _vec(args.dim, grad_addr, bags.out_offset, bags.out_stride))
        with self._looking_up(part, "weight_grads", args, bags, staged) as (compute, gather, bag_args):
            given = kernel_args.WeightGradsArgs(gather, bag_args, grad_addr, out_addr)
            self._launch(compute, part, "weight_grads", given, len(bags.offsets) - 1)

    def _part(self, dim: int, vec: int, optimizer: int | None = None) -> Part:
        return Part(dim, vec, optimizer, self.weights)

    @contextmanager
    def _looking_up(
        self, part: Part, kernel: str, args: LookupArgs, bags: Bags | None, staged: Staged | None
    ) -> Iterator[tuple[Operation, Structure, Structure | None]]:
        self.parts.kernels.load(part, kernel)
        arrays = [args.slots, args.inverse, *(() if bags is None else bags.arrays)]
        with self.indices(*arrays, staged=staged) as indices, self._computing(args.slots, indices) as compute:
            slots, inverse, *of_bags = indices.addresses
            gather = GatherArgs(self.rows_args(args.dim), slots, inverse)
            yield compute, gather, None if bags is None else bags_args(bags, of_bags)

    @contextmanager
    def _computing(self, slots: Slots, indices: Indices) -> Iterator[Operation]:
        """Copy ``indices`` to the GPU beside what computes there, and compute on the rows then."""
        self.upload(indices)
        with self.operation(Stream.COMPUTE, [slots], indices) as compute:
            yield compute

    def _launch(self, compute: Operation, part: Part, kernel: str, args: Structure, items: int) -> None:
        assert part.dim is not None
        assert part.vec is not None
        threads = items * lanes_of(part.dim, part.vec)
        self.parts.kernels.launch(compute, part, kernel, args, threads)

    def _checked(self, args: LookupArgs, bags: Bags | None = None) -> Staged | None:
        """Return what was staged for a lookup. What was not is checked."""
        self._require_room(args.dim)
        staged = self.parts.staged.of(args.slots)
        if staged is None or not staged.has(args.inverse):
            wrong = len(args.inverse) and int(args.inverse.max()) >= len(args.slots)
            _require(not wrong, "an entry of inverse is past the end of slots")
        if bags is not None:
            self._check_bags(bags, len(args.inverse), staged)
        return staged

    def _check_bags(self, bags: Bags, positions: int | None, staged: Staged | None) -> None:
        if staged is None or not staged.has(bags.offsets, bags.bag_start):
            bags.check()
        ends_right = positions is None or bags.offsets[-1] == positions
        _require(bool(ends_right), "offsets must end at the number of positions")

    # -- updates ----------------------------------------------------------------------------------

    def update_pooled(
        self,
        args: UpdateArgs,
        bags: Bags,
        grad_addr: int,
        weights_addr: int = 0,
        argmax_addr: int = 0,
        rounding: UpdateRounding | None = None,
        *,
        ready: list[RowUpdate] | None = None,
    ) -> Slots:
        """``ready``: the update is added to it, and is not made yet."""
        self._check_bags(bags, None, self.parts.staged.of(args.slots))
        vec = _vec(args.dim, grad_addr, bags.out_offset, bags.out_stride)
        gradients = GradientsOf(grad_addr, 0, bags, weights_addr, argmax_addr)
        return self._update(args, gradients, vec, rounding, ready)

    def update_rows(
        self,
        args: UpdateArgs,
        grad_addr: int,
        grad_stride: int,
        rounding: UpdateRounding | None = None,
        *,
        ready: list[RowUpdate] | None = None,
    ) -> Slots:
        """``ready``: as for :meth:`update_pooled`."""
        _require(grad_stride >= args.dim, "grad_stride must be at least dim")
        vec = _vec(args.dim, grad_addr, grad_stride)
        return self._update(args, GradientsOf(grad_addr, grad_stride), vec, rounding, ready)

    def _update(
        self,
        args: UpdateArgs,
        gradients: GradientsOf,
        vec: int,
        rounding: UpdateRounding | None,
        ready: list[RowUpdate] | None,
    ) -> Slots:
        wrong = rounding is not None and len(rounding.keys) != len(args.slots)
        _require(not wrong, "keys and slots differ in length")
        step, squares = args.step, args.squares
        self._require_room(args.dim, 0 if squares is not None else step.state_floats(args.dim))
        update = RowUpdate(self, self._part(args.dim, vec, step.kind), args, gradients, rounding)
        if ready is not None:
            ready.append(update)
            return np.empty(0, np.int32)
        with one_operation(self.parts.streams, [update]) as updates:
            made = [call() for call in updates.calls]
        return updates.unchanged(made)[0]
