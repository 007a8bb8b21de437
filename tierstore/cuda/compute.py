"""The kernels that compute on rows of a GPU: lookups and updates, with the bits of the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstore._core import Bags, LookupArgs, OptimizerStep, UpdateArgs, UpdateRounding
from tierstore.cuda import args as kernel_args
from tierstore.cuda.args import (
    MISSED_FIELDS,
    STEP_FIELDS,
    BagsArgs,
    BagShare,
    BagSharesArgs,
    GatherArgs,
    GradsArgs,
    LookupPooledArgs,
    LookupRowsArgs,
    StepArgs,
)
from tierstore.cuda.cubins import Part
from tierstore.cuda.kernels import lanes_of
from tierstore.cuda.memory import Indices
from tierstore.cuda.rows import ANY_LAYOUT, GpuRows, Slots
from tierstore.cuda.streams import Operation, Stream
from tierstore.row_format import WIDE

REDUCE_POSITIONS = 256
"""Gradients of a row that one group of threads adds (csrc/cuda/update.cuh)."""
_BAG_ARRAYS = 5
_ROUNDING_ARRAYS = 3
_BEFORE_BAGS = 8 + _ROUNDING_ARRAYS
"""Arrays of an update before those of its bags."""
_UPDATES = ("update_cold", "update_pieces", "update_hot")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _bag_arrays(bags: Bags) -> list[NDArray[np.generic]]:
    return [bags.offsets, bags.bag_start, bags.out_offset, bags.out_stride, bags.modes]


def _bags_args(bags: Bags, addresses: Sequence[int | None]) -> Structure:
    offsets, bag_start, out_offset, out_stride, modes = addresses
    num_bags, num_features = len(bags.offsets) - 1, len(bags.modes)
    return BagsArgs(offsets, num_bags, bag_start, num_features, out_offset, out_stride, modes)


def _vec(dim: int, address: int, *strides: int | NDArray[np.int64]) -> int:
    """Return the floats of a word: 4 where all vectors of ``dim`` floats begin at 16 bytes, else 1."""
    aligned = dim % 4 == 0 and address % 16 == 0
    return 4 if aligned and all(not np.any(np.asarray(stride) % 4) for stride in strides) else 1


def parts_of(rows: Collection[tuple[int, str, int]]) -> list[Part]:
    """Return the kernels that look up and update rows of these columns, dtypes of weights and kinds of steps:
    also where a tensor lies so that words of four floats cannot be read."""
    words = {dim: (4, 1) if dim % 4 == 0 else (1,) for dim, _, _ in rows}
    found = [
        Part(dim, vec, kind, weights)
        for dim, weights, step in rows
        for vec in words[dim]
        for kind in (None, step)
    ]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class _Gradients:
    """Where an update finds its gradients. ``bags``: of a pooled lookup; None: ``stride`` floats apart."""

    grad: int
    stride: int = 0
    bags: Bags | None = None
    weights: int = 0
    argmax: int = 0


class _Hot:
    """Rows with many positions, whose gradients are added in pieces (csrc/cuda/update.cuh)."""

    def __init__(self, csr_start: NDArray[np.int32]) -> None:
        counts = np.diff(csr_start)
        rows = np.flatnonzero(counts > REDUCE_POSITIONS)
        pieces = np.cumsum(-(-counts[rows] // REDUCE_POSITIONS))
        self.rows = np.append(rows, len(counts)).astype(np.int32)
        self.first_piece = np.append(0, pieces).astype(np.int32)
        self.count, self.pieces = len(rows), int(self.first_piece[-1])


class CudaRows(GpuRows):
    """``DeviceRows`` of tierstore/cache/device.py in GPU memory.

    Kernels that compute are given to the caller's stream (``CudaDevice``), and no call waits for them, except
    updates that return something: with ``check_finite`` or ``squares``. Addresses are of the GPU.
    """

    # -- lookups ----------------------------------------------------------------------------------

    def lookup_pooled(
        self, args: LookupArgs, bags: Bags, out_addr: int, weights_addr: int = 0, argmax_addr: int = 0
    ) -> None:
        self._check_lookup(args)
        self._check_bags(bags, len(args.inverse))
        part = self._part(args.dim, _vec(args.dim, out_addr, bags.out_offset, bags.out_stride))
        with self._looking_up(part, "lookup_pooled", args, bags) as (compute, gather, bag_args):
            given = LookupPooledArgs(gather, bag_args, weights_addr, out_addr, argmax_addr)
            self._launch(compute, part, "lookup_pooled", given, len(bags.offsets) - 1)

    def lookup_rows(self, args: LookupArgs, out_addr: int, out_stride: int) -> None:
        self._check_lookup(args)
        _require(out_stride >= args.dim, "out_stride must be at least dim")
        part = self._part(args.dim, _vec(args.dim, out_addr, out_stride))
        with self._looking_up(part, "lookup_rows", args) as (compute, gather, _):
            given = LookupRowsArgs(gather, len(args.inverse), out_addr, out_stride)
            self._launch(compute, part, "lookup_rows", given, len(args.inverse))

    def weight_grads(self, args: LookupArgs, bags: Bags, grad_addr: int, out_addr: int) -> None:
        self._check_lookup(args)
        self._check_bags(bags, len(args.inverse))
        part = self._part(args.dim, _vec(args.dim, grad_addr, bags.out_offset, bags.out_stride))
        with self._looking_up(part, "weight_grads", args, bags) as (compute, gather, bag_args):
            given = kernel_args.WeightGradsArgs(gather, bag_args, grad_addr, out_addr)
            self._launch(compute, part, "weight_grads", given, len(bags.offsets) - 1)

    def _part(self, dim: int, vec: int, optimizer: int | None = None) -> Part:
        return Part(dim, vec, optimizer, self.weights)

    @contextmanager
    def _looking_up(
        self, part: Part, kernel: str, args: LookupArgs, bags: Bags | None = None
    ) -> Iterator[tuple[Operation, Structure, Structure | None]]:
        self.parts.kernels.load(part, kernel)
        arrays = [args.slots, args.inverse, *([] if bags is None else _bag_arrays(bags))]
        with self.indices(*arrays) as indices, self._computing(args.slots, indices) as compute:
            slots, inverse, *of_bags = indices.addresses
            gather = GatherArgs(self._rows_args, slots, inverse)
            yield compute, gather, None if bags is None else _bags_args(bags, of_bags)

    @contextmanager
    def _computing(self, slots: Slots, indices: Indices) -> Iterator[Operation]:
        """Copy ``indices`` to the GPU beside what computes there, and compute on the rows then."""
        streams = self.parts.streams
        with streams.operation(Stream.INDEX) as upload:
            indices.block.mark = upload.mark
            upload.copy(indices.block.device, indices.block.address, indices.size)
        with self.operation(Stream.COMPUTE, [slots], indices) as compute:
            compute.wait_for(upload.mark)
            yield compute

    def _launch(self, compute: Operation, part: Part, kernel: str, args: Structure, items: int) -> None:
        assert part.dim is not None
        assert part.vec is not None
        threads = items * lanes_of(part.dim, part.vec)
        self.parts.kernels.launch(compute, part, kernel, args, threads)

    def _check_lookup(self, args: LookupArgs) -> None:
        self._require_room(args.dim)
        wrong = len(args.inverse) and int(args.inverse.max()) >= len(args.slots)
        _require(not wrong, "an entry of inverse is past the end of slots")

    def _check_bags(self, bags: Bags, positions: int | None) -> None:
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
    ) -> Slots:
        self._check_bags(bags, None)
        vec = _vec(args.dim, grad_addr, bags.out_offset, bags.out_stride)
        return self._update(args, _Gradients(grad_addr, 0, bags, weights_addr, argmax_addr), vec, rounding)

    def update_rows(
        self, args: UpdateArgs, grad_addr: int, grad_stride: int, rounding: UpdateRounding | None = None
    ) -> Slots:
        _require(grad_stride >= args.dim, "grad_stride must be at least dim")
        vec = _vec(args.dim, grad_addr, grad_stride)
        return self._update(args, _Gradients(grad_addr, grad_stride), vec, rounding)

    def _update(
        self, args: UpdateArgs, gradients: _Gradients, vec: int, rounding: UpdateRounding | None
    ) -> Slots:
        wrong = rounding is not None and len(rounding.keys) != len(args.slots)
        _require(not wrong, "keys and slots differ in length")
        step, squares = args.step, args.squares
        self._require_room(args.dim, 0 if squares is not None else step.state_floats(args.dim))
        part = self._part(args.dim, vec, step.kind)
        for kernel in (*_UPDATES, *(["bag_shares"] if gradients.bags is not None else [])):
            self.parts.kernels.load(ANY_LAYOUT if kernel == "bag_shares" else part, kernel)
        arrays = _UpdateArrays(self, args, gradients, rounding)
        with arrays.indices as indices:
            with self._computing(args.slots, indices) as compute:
                self._launch_update(compute, part, arrays)
                for begin, size in arrays.returned():
                    compute.copy(indices.block.address + begin, indices.block.device + begin, size)
            if not arrays.returned():
                return np.empty(0, np.int32)
            self.parts.streams.synchronize(compute.mark)
            return arrays.read_back()

    def _launch_update(self, compute: Operation, part: Part, arrays: _UpdateArrays) -> None:
        if arrays.bags is not None:
            shares = arrays.shares_args(part.dim or 0)
            self.parts.kernels.launch(compute, ANY_LAYOUT, "bag_shares", shares, len(arrays.bags.offsets) - 1)
        given = arrays.update_args(self._rows_args)
        items = (len(arrays.args.slots), arrays.hot.pieces, arrays.hot.count)
        for kernel, count in zip(_UPDATES, items, strict=True):
            self._launch(compute, part, kernel, given, count)


class _UpdateArrays:
    """The index arrays of one update, and room for what its kernels hand to one another."""

    def __init__(
        self, rows: GpuRows, args: UpdateArgs, gradients: _Gradients, rounding: UpdateRounding | None
    ) -> None:
        self.args, self._gradients, self.bags = args, gradients, gradients.bags
        self.hot = _Hot(args.csr_start)
        rejected = np.zeros(len(args.slots) if args.check_finite else 0, np.uint8)
        self._rejected_bytes = rejected.nbytes
        used: NDArray[np.int32] | None = None
        bag_arrays: Sequence[NDArray[np.generic] | None] = [None] * _BAG_ARRAYS
        dice: Sequence[NDArray[np.generic] | None] = [None] * _ROUNDING_ARRAYS
        if rounding is not None and rows.weights != WIDE.weights:
            dice = [rounding.keys, rounding.seeds, rounding.columns]
        shares, bag_of = 0, 0
        if self.bags is not None:
            # Positions that count in a mean; the others have no row, or one that stays as it is.
            used = np.full(int(self.bags.offsets[-1]), -1, np.int32)
            used[args.csr_positions] = 0
            bag_arrays = _bag_arrays(self.bags)
            shares, bag_of = ctypes.sizeof(BagShare) * (len(self.bags.offsets) - 1), used.nbytes
        self.indices = rows.indices(
            *(args.slots, args.csr_start, args.csr_positions, self.hot.rows, self.hot.first_piece),
            *(args.means, rejected, args.squares, *dice, used, *bag_arrays),
            scratch=[shares, bag_of, 4 * args.dim * self.hot.pieces],
        )

    def shares_args(self, dim: int) -> Structure:
        used, *of_bags, shares, bag_of, _ = self.indices.addresses[_BEFORE_BAGS:]
        assert self.bags is not None
        return BagSharesArgs(_bags_args(self.bags, of_bags), dim, used, shares, bag_of)

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
            *(int(args.check_finite), 0, rejected, squares, means),
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
