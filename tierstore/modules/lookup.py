"""The autograd functions over rows that are pinned in the fast tier: from ids to output and back.

The fused optimizer runs inside the backward pass; no gradient of a table is ever materialised.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tierstore import _core
from tierstore._core import LookupArgs, UpdateArgs, UpdateRounding
from tierstore.cache.device import DeviceRows
from tierstore.cache.pinned_rows import Rows
from tierstore.modules.autograd_context import Context, LookupFunction, PooledContext, derived_once
from tierstore.modules.parts import Lookup, Part, PooledPart, new_floats
from tierstore.modules.row_updates import Gradients, Rest, Updates, update_rows

PooledCtx: TypeAlias = "PooledContext[Updates | None, Lookup]"
SequenceCtx: TypeAlias = "Context[Updates, Lookup]"
AtOnceCtx: TypeAlias = "Context[Updates, LookupAtOnce]"


class LookupAtOnce(Protocol):
    """A lookup of one part whose output is made. ``out``: the output, until autograd has it."""

    out: Tensor | None

    def whole(self) -> Lookup:
        """Return the lookup with all that an update needs."""
        ...

    def gradients(self, grad: Tensor) -> Gradients:
        """Return the gradient of the output as updates read it."""
        ...


@dataclass
class PooledGradients(Gradients):
    """``grad`` (float32) is laid out as the output, but its rows may be further apart, see
    :func:`readable_gradient`; the other fields have an entry per part."""

    grad: Tensor
    weights: Sequence[Tensor | None]
    argmaxes: Sequence[Tensor | None]

    def prepared(
        self,
        index: int,
        part: PooledPart,
        rows: DeviceRows,
        args: UpdateArgs,
        rounding: UpdateRounding | None,
    ) -> partial[Rest]:
        weight, argmax = _address(self.weights[index]), _address(self.argmaxes[index])
        bags = _bags_of_gradient(part, self.grad)
        return partial(rows.update_pooled, args, bags, self.grad.data_ptr(), weight, argmax, rounding)

    def multiply(self, factor: float) -> None:
        self.grad.mul_(factor)


@dataclass
class SequenceGradients(Gradients):
    """``grads``: per part the gradient of every position, float32 (positions, dim), contiguous."""

    grads: Sequence[Tensor]

    def prepared(
        self, index: int, part: Part, rows: DeviceRows, args: UpdateArgs, rounding: UpdateRounding | None
    ) -> partial[Rest]:
        grad = self.grads[index].data_ptr()
        return partial(rows.update_rows, args, grad, part.group.layout.dim, rounding)

    def multiply(self, factor: float) -> None:
        for grad in self.grads:
            grad.mul_(factor)


def _lookup_args(part: Part, rows: Rows) -> LookupArgs:
    part.group.check_process()
    return LookupArgs(dim=part.group.layout.dim, slots=rows.slots, inverse=rows.device_inverse)


def readable_gradient(grad: Tensor) -> Tensor:
    """Return the gradient of an output as kernels read it: float32, with columns side by side.

    Rows may lie further apart, as in the gradient of a concatenation, of which ``grad`` is a view: a copy
    would take as long as the update."""
    grad = grad.to(torch.float32)
    return grad if grad.dim() == 2 and grad.stride(1) == 1 else grad.contiguous()


def _bags_of_gradient(part: PooledPart, grad: Tensor) -> _core.Bags:
    return part.bags if grad.is_contiguous() else part.bags.with_stride(grad.stride(0))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def kept_weights(parts: Sequence[Part], weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the weights, one tensor per part or none at all, as kernels read them: on the parts' device, and
    detached, since autograd passes the same tensors again as saved tensors."""
    if not weights:
        return [None] * len(parts)
    return [
        weight.detach().to(part.device, torch.float32).contiguous()
        for part, weight in zip(parts, weights, strict=True)
    ]


def pooled_forward(
    parts: Sequence[PooledPart], out: Tensor, weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Fill ``out`` (float32, contiguous); return the argmax (int32, bags x dim) of parts with max pooling."""
    argmaxes: list[Tensor | None] = []
    for part, weight in zip(parts, weights, strict=True):
        rows, argmax = part.rows, None
        if part.bags.takes_max:
            # one more, since an empty tensor has no address
            bags = len(part.bags.offsets) - 1
            argmax = torch.empty(bags * part.group.layout.dim + 1, dtype=torch.int32, device=part.device)
        assert rows is not None
        args, addresses = _lookup_args(part, rows), (out.data_ptr(), _address(weight), _address(argmax))
        begin = time.perf_counter()
        rows.device_rows.lookup_pooled(args, part.bags, *addresses)
        part.group.stats.counters.compute_seconds += time.perf_counter() - begin
        argmaxes.append(argmax)
    return argmaxes


class PooledFunction(LookupFunction):
    """``apply(anchor, module, lookup, *weights)`` → output of ``lookup.out_shape``. One weight tensor per
    part, or none at all. ``module`` None: rows are not updated, only the weights have gradients."""

    @staticmethod
    def forward(
        ctx: PooledCtx, anchor: Tensor, module: Updates | None, lookup: Lookup, *weights: Tensor
    ) -> Tensor:
        out = lookup.new_output()
        ctx.weights = kept_weights(lookup.parts, weights) if weights else [None] * len(lookup.parts)
        ctx.argmaxes = pooled_forward(lookup.parts, out, ctx.weights)  # type: ignore[arg-type]
        ctx.module, ctx.lookup, ctx.weighted = module, lookup, ()
        if weights:
            # autograd then notices weights changed in place
            ctx.save_for_backward(*weights)
            # their gradients need the rows as they are now; other backward passes may change the rows
            ctx.weighted = [_weighted(ctx, *one) for one in enumerate(weights)]
        return out

    @staticmethod
    def backward(ctx: PooledCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights = ctx.saved_tensors  # which autograd refuses in a second pass without retain_graph
        with torch.no_grad():
            found = pooled_backward(ctx, grads[0], _reaches_rows(ctx))
        return (None, None, None, *(derived_once(grad, [grads[0], *weights]) for grad in found))


class AtOnceFunction(LookupFunction):
    """``apply(anchor, module, lookup)`` → output of a lookup that has made it, without weights."""

    @staticmethod
    def forward(ctx: AtOnceCtx, anchor: Tensor, module: Updates, lookup: LookupAtOnce) -> Tensor:
        ctx.module, ctx.lookup = module, lookup
        out, lookup.out = lookup.out, None  # the output knows the lookup, which must not know the output then
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: AtOnceCtx, *grads: Tensor) -> tuple[None, None, None]:
        _ = ctx.saved_tensors  # which autograd refuses in a second pass without retain_graph, also if empty
        with torch.no_grad():
            if _reaches_rows(ctx):
                _update_or_keep(ctx.module, ctx.lookup.whole(), ctx.lookup.gradients(grads[0]))
        return None, None, None


def _weighted(
    ctx: PooledCtx, index: int, weight: Tensor
) -> tuple[Rows | None, tuple[torch.device, torch.dtype]]:
    rows = ctx.lookup.parts[index].rows
    kept = rows.copied() if rows is not None and ctx.needs_input_grad[3 + index] else None
    return kept, (weight.device, weight.dtype)


def pooled_backward(ctx: PooledCtx, grad: Tensor, reaches_rows: bool) -> list[Tensor | None]:
    """Update the rows by the gradient of the output; return the gradients of the weights.

    ``reaches_rows``: whether the backward pass is for the rows, too."""
    grad = readable_gradient(grad)
    weight_grads = [_weight_grad(ctx, index, grad) for index in range(len(ctx.weighted))]
    if ctx.module is not None and reaches_rows:
        _update_or_keep(ctx.module, ctx.lookup, PooledGradients(grad, ctx.weights, ctx.argmaxes))
    return weight_grads


def _weight_grad(ctx: PooledCtx, index: int, grad: Tensor) -> Tensor | None:
    part, weight, (rows, kind) = ctx.lookup.parts[index], ctx.weights[index], ctx.weighted[index]
    if rows is None or weight is None:
        return None
    out = torch.empty_like(weight)
    with part.group.stats.stage("compute_seconds"):
        bags = _bags_of_gradient(part, grad)  # type: ignore[arg-type]
        rows.device_rows.weight_grads(_lookup_args(part, rows), bags, _address(grad), _address(out))
    return out.to(*kind)


class SequenceFunction(LookupFunction):
    """``apply(anchor, module, lookup)`` → one (positions, dim) tensor per part."""

    @staticmethod
    def forward(ctx: SequenceCtx, anchor: Tensor, module: Updates, lookup: Lookup) -> tuple[Tensor, ...]:
        ctx.module, ctx.lookup = module, lookup
        return sequence_forward(lookup.parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: SequenceCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # which autograd refuses in a second pass without retain_graph, also if empty
        if _reaches_rows(ctx):
            sequence_backward(ctx, grads)
        return (None, None, None)


def sequence_backward(ctx: SequenceCtx, grads: Sequence[Tensor]) -> None:
    """Update the rows by the gradients of the outputs, one per part."""
    _update_or_keep(ctx.module, ctx.lookup, sequence_gradients(grads))


def sequence_gradients(grads: Sequence[Tensor]) -> SequenceGradients:
    """Return the gradients of the outputs, one per part, as updates read them."""
    return SequenceGradients([grad.to(torch.float32).contiguous() for grad in grads])


def _update_or_keep(module: Updates, lookup: Lookup, gradients: Gradients) -> None:
    """Update the rows by the gradients of a backward pass, or keep the gradients for a later update."""
    if module.accumulation is None:
        update_rows(module, lookup.parts, gradients)
    else:
        module.accumulation.keep(module, lookup, gradients)
        lookup.release()


def _reaches_rows(ctx: PooledCtx | SequenceCtx | AtOnceCtx) -> bool:
    """Return False under ``torch.autograd.grad``, of the per-sample weights or of the parameter that stands
    for a table: such a pass trains no rows."""
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[0][0])
    except RuntimeError:  # of a leaf that autograd.grad asks for
        return False


def sequence_forward(parts: Sequence[Part]) -> tuple[Tensor, ...]:
    outs = []
    for part in parts:
        assert part.rows is not None
        part.group.check_process()
        dim, inverse = part.group.layout.dim, part.rows.device_inverse
        args = LookupArgs(dim=dim, slots=part.rows.slots, inverse=inverse)
        out = new_floats((len(inverse), dim), part.device)
        begin = time.perf_counter()
        part.rows.device_rows.lookup_rows(args, out.data_ptr(), dim)
        part.group.stats.counters.compute_seconds += time.perf_counter() - begin
        outs.append(out)
    return tuple(outs)
