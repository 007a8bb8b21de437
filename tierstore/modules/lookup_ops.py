"""Lookups as operators of torch: graphs of torch.compile and torch.export have each lookup as one node.

``pooled`` and ``rows`` read. ``trained_pooled`` and ``trained_rows`` are differentiable. They also get a
tensor without elements that autograd trains in place of the rows (None: only weights have gradients). They
return a tensor ``kept``, too: the context of the backward operator lives and ends with its memory. They have
ordered effects, so compilers neither join nor drop nor repeat them. Backward operators say that they change
``order``, a tensor of the module, so compilers keep them in the order of an uncompiled backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.autograd.function import once_differentiable

from tierstore.errors import ConfigError
from tierstore.modules.handles import MODULES, Looked
from tierstore.modules.inputs import FeatureLookup
from tierstore.modules.kept_contexts import TracedContext, context_of, kept_tensor
from tierstore.modules.local_lookups import rows_by_feature
from tierstore.modules.lookup import (
    PooledFunction,
    SequenceFunction,
    pooled_backward,
    sequence_backward,
)

_INPUT = "str module, Tensor ids, Tensor? lengths, Tensor? offsets, str[]? keys"
_POOLED = f"{_INPUT}, Tensor? weights, SymInt bags, int dim, Device device"
_ROWS = f"{_INPUT}, SymInt[]? counts, int[] dims, bool with_ids, Device device"


class Pooling(NamedTuple):
    """Arguments of a pooled lookup. ``module``: its handle; ``bags`` and ``dim``: the output's shape;
    ``device``: where the output is."""

    module: str
    ids: Tensor
    lengths: Tensor | None
    offsets: Tensor | None
    keys: Sequence[str] | None
    weights: Tensor | None
    bags: int
    dim: int
    device: torch.device


class Rows(NamedTuple):
    """Arguments of a lookup of rows one by one. ``counts``: ids of each feature, None where they are not
    known; ``dims``: of each feature's rows; ``with_ids``: whether its ids are returned, too."""

    module: str
    ids: Tensor
    lengths: Tensor | None
    offsets: Tensor | None
    keys: Sequence[str] | None
    counts: Sequence[int] | None
    dims: Sequence[int]
    with_ids: bool
    device: torch.device


def _lookup(module: Looked, asked: Pooling | Rows, updates: bool) -> FeatureLookup:
    """Return the lookup of a call, with its rows: pinned for an update, or copied."""
    arguments = module.forward_arguments(asked.ids, asked.lengths, asked.offsets, asked.keys)
    if module.observer is None:
        lookup = module.find_lookup(*arguments)
    else:
        with torch.set_grad_enabled(updates):  # prefetchers look at it; graphs of autograd run without it
            lookup = module.find_lookup(*arguments)
    module.pin(lookup, updates)
    return lookup


def _check_shape(asked: Pooling | Rows, expected: Sequence[int], found: Sequence[int]) -> None:
    if tuple(expected) != tuple(found):
        raise ConfigError(
            f"a graph expects sizes {tuple(expected)} of a lookup in {asked.module!r}, which has "
            f"{tuple(found)}: the graph was made for other tables; compile or export the model again"
        )


def _pool(asked: Pooling, updates: bool, weighs: bool) -> tuple[Tensor, TracedContext]:
    module = MODULES.find(asked.module)
    updates = updates and not module.frozen
    lookup = _lookup(module, asked, updates)
    _check_shape(asked, (asked.bags, asked.dim), lookup.out_shape)
    weights = asked.weights
    per_part = [] if weights is None else [part.weights_of(weights) for part in lookup.parts]
    context = TracedContext(module, (updates, False, False, *[weighs] * len(per_part)))
    own = module if updates else None
    return PooledFunction.forward(context, asked.ids, own, lookup, *per_part), context


def _pooled(*arguments: Any) -> Tensor:
    """Return pooled rows, float32 (bags, dim)."""
    return _pool(Pooling(*arguments), updates=False, weighs=False)[0]


def _trained_pooled(
    anchor: Tensor | None, order: Tensor, weighs: bool, *arguments: Any
) -> tuple[Tensor, Tensor]:
    """Return pooled rows, and ``kept``. ``weighs``: whether the weights get gradients."""
    out, context = _pool(Pooling(*arguments), anchor is not None, weighs)
    return out, kept_tensor(context if weighs or context.module is not None else None)


def _pooled_backward(order: Tensor, kept: Tensor, grad: Tensor, weights: Tensor | None) -> Tensor:
    """Update the rows; return the gradient of the weights, or nothing (0,) if they have none."""
    found = grad.new_empty(0) if weights is None else weights.new_zeros(weights.shape)
    context = context_of(kept)
    if context is not None:
        grads = pooled_backward(context, grad, context.reaches_rows)
        for part, own in zip(context.lookup.parts, grads, strict=False):
            if own is not None:
                part.put_weights(own, found)
    return found


def _look_up(asked: Rows, updates: bool) -> tuple[list[Tensor], list[Tensor], TracedContext]:
    module = MODULES.find(asked.module)
    updates = updates and not module.frozen
    lookup = _lookup(module, asked, updates)
    if asked.counts is not None:
        _check_shape(asked, asked.counts, lookup.counts)
    context = TracedContext(module, (updates, False, False))
    outputs = SequenceFunction.forward(context, asked.ids, module, lookup)
    rows = rows_by_feature(lookup, outputs)
    if len(rows) > len(outputs):  # outputs of an operator share no memory
        rows = [one.clone() for one in rows]
    _check_shape(asked, asked.dims, [one.size(1) for one in rows])
    given = asked.ids, asked.lengths, asked.offsets, asked.keys
    return rows, module.ids_by_feature(*given) if asked.with_ids else [], context


def _rows(*arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows of each feature, float32 (ids, dim), and its ids if asked for."""
    return _look_up(Rows(*arguments), updates=False)[:2]


def _trained_rows(
    anchor: Tensor, order: Tensor, *arguments: Any
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return the rows of each feature, its ids if asked for, and ``kept``."""
    rows, ids, context = _look_up(Rows(*arguments), updates=True)
    return rows, ids, kept_tensor(context if context.needs_input_grad[0] else None)


def _rows_backward(order: Tensor, kept: Tensor, grads: Sequence[Tensor]) -> None:
    """Update the rows by the gradients of each feature's rows."""
    context = context_of(kept)
    if context is not None:
        joined = [
            grads[members[0]] if len(members) == 1 else torch.cat([grads[one] for one in members])
            for members in context.lookup.features
        ]
        sequence_backward(context, joined)


# -- what a compiler runs in place of these: shapes, dtypes and devices ---------------------


def _fake_pooled(*arguments: Any) -> Tensor:
    asked = Pooling(*arguments)
    return asked.ids.new_empty((asked.bags, asked.dim), dtype=torch.float32, device=asked.device)


def _fake_kept(ids: Tensor) -> Tensor:
    return ids.new_empty((1,), dtype=torch.int64, device="cpu")


def _fake_trained_pooled(anchor: Any, order: Any, weighs: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _fake_pooled(*arguments), _fake_kept(Pooling(*arguments).ids)


def _fake_pooled_backward(order: Any, kept: Tensor, grad: Tensor, weights: Tensor | None) -> Tensor:
    return grad.new_empty(0) if weights is None else weights.new_empty(weights.shape)


def _fake_rows(*arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
    asked = Rows(*arguments)
    counts = asked.counts
    if counts is None:
        shapes = torch.library.get_ctx()
        counts = [shapes.new_dynamic_size() for _ in asked.dims]
    sizes = zip(counts, asked.dims, strict=True)
    rows = [asked.ids.new_empty(size, dtype=torch.float32, device=asked.device) for size in sizes]
    return rows, [asked.ids.new_empty((count,)) for count in counts] if asked.with_ids else []


def _fake_trained_rows(anchor: Any, order: Any, *arguments: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    return *_fake_rows(*arguments), _fake_kept(Rows(*arguments).ids)


def _fake_rows_backward(order: Any, kept: Any, grads: Any) -> None:
    return None


# -- autograd -----------------------------------------------------------------------------


def _keep_pooled(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, ctx.order, weighs, *arguments = inputs
    ctx.save_for_backward(output[1], *([Pooling(*arguments).weights] if weighs else []))


@once_differentiable
def _pooled_grads(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    kept, *weights = ctx.saved_tensors
    found = torch.ops.tierstore.pooled_backward(ctx.order, kept, grad, *(weights or [None]))
    by_name = dict.fromkeys(Pooling._fields) | {"weights": found if weights else None}
    return (None, None, None, *by_name.values())


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.order = inputs[1]
    ctx.save_for_backward(output[2])


def _rows_grads(ctx: Any, grads: list[Tensor], *_: object) -> tuple[None, ...]:
    (kept,) = ctx.saved_tensors
    torch.ops.tierstore.rows_backward(ctx.order, kept, grads)
    return (None, None, *[None] * len(Rows._fields))


_LIBRARY = torch.library.Library("tierstore", "FRAGMENT")


def _register(schema: str, run: Any, fake: Any, grads: Any = None, keep: Any = None) -> None:
    """Register an operator. ``grads``, ``keep``: autograd's formula, for operators with effects."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tierstore::{name}", fake, lib=_LIBRARY)
    if grads is not None:
        torch.library.register_autograd(f"tierstore::{name}", grads, setup_context=keep, lib=_LIBRARY)
        _LIBRARY._register_effectful_op(f"tierstore::{name}", EffectType.ORDERED)


_register(f"pooled({_POOLED}) -> Tensor", _pooled, _fake_pooled)
_register(f"rows({_ROWS}) -> (Tensor[], Tensor[])", _rows, _fake_rows)
_register(
    f"trained_pooled(Tensor? anchor, Tensor order, bool weighs, {_POOLED}) -> (Tensor, Tensor)",
    *(_trained_pooled, _fake_trained_pooled, _pooled_grads, _keep_pooled),
)
_register(
    f"trained_rows(Tensor anchor, Tensor order, {_ROWS}) -> (Tensor[], Tensor[], Tensor)",
    *(_trained_rows, _fake_trained_rows, _rows_grads, _keep_rows),
)
_register(
    "pooled_backward(Tensor(a!) order, Tensor kept, Tensor grad, Tensor? weights) -> Tensor",
    *(_pooled_backward, _fake_pooled_backward),
)
_register(
    "rows_backward(Tensor(a!) order, Tensor kept, Tensor[] grads) -> ()",
    *(_rows_backward, _fake_rows_backward),
)
