"""From ids to output and back: the autograd functions over rows that are pinned in the fast tier.

The fused optimizer runs inside the backward pass; no gradient of a table is ever materialised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore import _core
from tierstore.cache.chain import Chain
from tierstore.cache.outside import read_rows
from tierstore.cache.ticket import Rows, Ticket
from tierstore.errors import GradientError
from tierstore.keys import split
from tierstore.optim.fused import FusedOptimizer

_RowArguments: TypeAlias = tuple[int, int, int, NDArray[np.int32]]
"""Address and bytes of the rows, their dimension, their slots."""
MODES = {"sum": 0, "mean": 1, "max": 2}


class Updates(Protocol):
    """What the backward pass needs of its module."""

    fused_optimizer: FusedOptimizer
    check_gradients: bool

    def count_update(self) -> Any:
        """Counts one optimizer step and returns the native core's arguments for it."""
        ...

    def mean_squares(
        self, parts: Sequence[Part], squares_of: Callable[[int], NDArray[np.float32]]
    ) -> Sequence[NDArray[np.float32] | None]:
        """By part the mean square of the gradient of each unique row over all columns of its table; None: the
        rows have all of them. ``squares_of(part)``: the sums over the columns that are here, of the backward
        pass under way."""
        ...

    def table_name(self, table: int) -> str: ...


@dataclass
class Part:
    """The share of one lookup that one chain (row layout) serves.

    ``spans``: which positions of the module's ids are this part's, as (begin, end), in order.
    """

    chain: Chain
    batch: Any
    spans: list[tuple[int, int]]
    rows: Rows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the part keeps from the moment it is made ready: ids, their next uses, bags."""
        return 12 * len(self.batch.unique) + self.batch.inverse.nbytes

    def weights_of(self, weights: Tensor) -> Tensor:
        """The per-sample weights, float32, of this part's positions."""
        pieces = [weights[begin:end] for begin, end in self.spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass
class PooledPart(Part):
    """Bags grouped by feature; arrays as ``_core.lookup_pooled`` takes them."""

    offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    bag_start: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    out_offset: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    out_stride: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    modes: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.offsets.nbytes

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.offsets, self.bag_start, self.out_offset, self.out_stride, self.modes


@dataclass
class SequencePart(Part):
    """One output row of ``chain.layout.dim`` floats per position."""


@dataclass
class Lookup:
    """A module's input made ready for the tiers: deduplicated, checked, nothing fetched yet."""

    parts: Sequence[Part]
    out_shape: tuple[int, ...] = ()

    def new_output(self) -> Tensor:
        """Room for a pooled output, float32, not initialised."""
        return torch.empty(self.out_shape, dtype=torch.float32)

    def acquire(self) -> None:
        """Pins the rows of every part in the fast tier; waits for those that were planned ahead."""
        try:
            for part in self.parts:
                if not (isinstance(part.rows, Ticket) and part.rows.wait()):
                    part.rows = part.chain.lookup(part.batch)
        except BaseException:
            self.release()
            raise

    def read(self) -> None:
        """Copies the rows of every part; changes nothing. Tickets of a plan made ahead are given back."""
        self.release()
        for part in self.parts:
            part.rows = read_rows(part.chain, part.batch)

    def release(self) -> None:
        for part in self.parts:
            if isinstance(part.rows, Ticket):
                part.rows.release()


def _held_again(part: Part) -> Ticket:
    """The part's rows, pinned once more if a former backward pass has released them
    (``retain_graph=True``)."""
    assert isinstance(part.rows, Ticket)
    if not part.rows.held:
        part.rows = part.chain.lookup(part.batch)
    return part.rows


def _row_arguments(part: Part) -> _RowArguments:
    assert part.rows is not None
    return part.rows.rows_addr, part.chain.layout.row_bytes, part.chain.layout.dim, part.rows.slots


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def pooled_forward(
    parts: Sequence[PooledPart], out: Tensor, weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Fills ``out`` (float32, contiguous); returns the argmax (int32, bags x dim) of parts that have
    max pooling."""
    argmaxes: list[Tensor | None] = []
    for part, weight in zip(parts, weights, strict=True):
        argmax = None
        if (part.modes == MODES["max"]).any():
            # one more, since an empty tensor has no address
            argmax = torch.empty((len(part.offsets) - 1) * part.chain.layout.dim + 1, dtype=torch.int32)
        assert part.rows is not None
        _core.lookup_pooled(
            *_row_arguments(part),
            part.rows.inverse,
            *part.layout,
            _address(weight),
            out.data_ptr(),
            _address(argmax),
        )
        argmaxes.append(argmax)
    return argmaxes


class PooledFunction(torch.autograd.Function):
    """``apply(anchor, module, lookup, *weights)`` → output of ``lookup.out_shape``. One weight tensor
    or None per part. ``module`` None: rows are not updated, only the weights have gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, module: Updates | None, lookup: Lookup, *weights: Tensor | None
    ) -> Tensor:
        out = lookup.new_output()
        # autograd hands the same tensors over again as saved ones; detached copies are what the kernels read.
        kept = [None if w is None else w.detach().to(torch.float32).contiguous() for w in weights]
        ctx.argmaxes = pooled_forward(lookup.parts, out, kept)  # type: ignore[arg-type]
        ctx.module, ctx.lookup, ctx.weights = module, lookup, kept
        # so that autograd notices weights changed in place, and a second backward pass that was not asked for
        ctx.save_for_backward(anchor, *(w for w in weights if w is not None))
        # the weights' gradients are those of the rows as they are now, which other backward passes may change
        ctx.rows = [
            part.rows.copied() if part.rows is not None and ctx.needs_input_grad[3 + index] else None
            for index, part in enumerate(lookup.parts)
        ]
        ctx.weight_types = [None if w is None else w.dtype for w in weights]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        assert ctx.saved_tensors
        grad = grads[0].to(torch.float32).contiguous()
        weight_grads = [PooledFunction._weight_grad(ctx, index, grad) for index in range(len(ctx.weights))]
        if ctx.module is not None and _reaches_rows(ctx):
            PooledFunction._update(ctx, grad)
        return (None, None, None, *weight_grads)

    @staticmethod
    def _weight_grad(ctx: Any, index: int, grad: Tensor) -> Tensor | None:
        part, rows, weight = ctx.lookup.parts[index], ctx.rows[index], ctx.weights[index]
        if rows is None:
            return None
        out = torch.empty_like(weight)
        layout = part.chain.layout
        _core.weight_grads(
            rows.rows_addr,
            layout.row_bytes,
            layout.dim,
            rows.slots,
            rows.inverse,
            *part.layout,
            grad.data_ptr(),
            out.data_ptr(),
        )
        return out.to(ctx.weight_types[index])

    @staticmethod
    def _update(ctx: Any, grad: Tensor) -> None:
        def update(index: int, rows: _RowArguments, csr: Any, *more: Any) -> NDArray[np.int32]:
            part, weight, argmax = ctx.lookup.parts[index], ctx.weights[index], ctx.argmaxes[index]
            return _core.update_pooled(  # type: ignore[no-any-return]
                *rows, *csr, *part.layout, _address(weight), _address(argmax), grad.data_ptr(), *more
            )

        _update_rows(ctx.module, ctx.lookup.parts, update)


class SequenceFunction(torch.autograd.Function):
    """``apply(anchor, module, lookup)`` → one (positions, dim) tensor per part."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: Updates, lookup: Lookup) -> tuple[Tensor, ...]:
        ctx.module, ctx.lookup = module, lookup
        ctx.save_for_backward(anchor)
        return sequence_forward(lookup.parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        assert ctx.saved_tensors
        kept = [grad.to(torch.float32).contiguous() for grad in grads]

        def update(index: int, rows: _RowArguments, csr: Any, *more: Any) -> NDArray[np.int32]:
            dim = ctx.lookup.parts[index].chain.layout.dim
            return _core.update_rows(*rows, *csr, kept[index].data_ptr(), dim, *more)  # type: ignore[no-any-return]

        _update_rows(ctx.module, ctx.lookup.parts, update)
        return (None, None, None)


def _update_rows(module: Updates, parts: Sequence[Part], update: Callable[..., NDArray[np.int32]]) -> None:
    """One optimizer step for the rows of every part. ``update(part, rows, csr, step, check, squares, means)``
    calls the kernel."""
    step = module.count_update()
    tickets = [_held_again(part) for part in parts]
    for part, ticket in zip(parts, tickets, strict=True):
        part.chain.mark_updated(ticket)

    def squares_of(index: int) -> NDArray[np.float32]:
        squares = np.zeros(len(parts[index].batch.unique), np.float32)
        update(index, _row_arguments(parts[index]), tickets[index].csr, step, False, squares.ctypes.data, 0)
        return squares

    wrong = []
    for index, means in enumerate(module.mean_squares(parts, squares_of)):
        address = 0 if means is None else means.ctypes.data
        rows, csr = _row_arguments(parts[index]), tickets[index].csr
        wrong.append((parts[index], update(index, rows, csr, step, module.check_gradients, 0, address)))
        parts[index].chain.mark_updated(
            tickets[index]
        )  # a flush since the first mark has seen the rows as before
        tickets[index].release()
    _report_wrong(module, wrong)


def _reaches_rows(ctx: Any) -> bool:
    """False under ``torch.autograd.grad`` of the per-sample weights alone, which must not train the rows."""
    return torch._C._will_engine_execute_node(ctx.next_functions[0][0])  # type: ignore[attr-defined]


def sequence_forward(parts: Sequence[Part]) -> tuple[Tensor, ...]:
    outs = []
    for part in parts:
        assert part.rows is not None
        dim = part.chain.layout.dim
        out = torch.empty((len(part.rows.inverse), dim), dtype=torch.float32)
        _core.lookup_rows(*_row_arguments(part), part.rows.inverse, out.data_ptr(), dim)
        outs.append(out)
    return tuple(outs)


def _report_wrong(module: Updates, wrong: list[tuple[Part, NDArray[np.int32]]]) -> None:
    found = []
    for part, unique in wrong:
        if len(unique):
            tables, ids = split(part.batch.unique[unique])
            found += [f"{module.table_name(int(t))} id {i}" for t, i in zip(tables[:8], ids[:8], strict=True)]
    if found:
        total = sum(len(unique) for _, unique in wrong)
        raise GradientError(
            f"the gradient of {total} row(s) is NaN or infinite; they were not updated, all others were: "
            f"{', '.join(found[:8])}{' ...' if total > 8 else ''}. Look at the loss and the learning rate."
        )
