"""Lookups as operators of torch: graphs of torch.compile and torch.export have each lookup as one node.

An operator gets the name of its module, and a tensor without elements that autograd trains. What its backward
operator needs lives as long as the memory of the output ``kept``: when no graph has that tensor any more, the
rows are released. All operators have effects, so compilers neither join, drop, repeat nor reorder them, and
updates have the order of a backward pass that is not compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType

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

_SCHEMAS = {
    "pooled": "(Tensor? anchor, str tables, Tensor ids, Tensor? lengths, Tensor? offsets, Tensor? weights, "
    "str[]? keys, SymInt bags, int dim, Device device, bool trains, bool weighs) -> (Tensor, Tensor)",
    "pooled_backward": "(Tensor kept, Tensor grad, Tensor? weights) -> Tensor",
    "rows": "(Tensor? anchor, str tables, Tensor ids, Tensor? lengths, Tensor? offsets, str[]? keys, "
    "SymInt[]? counts, int[] dims, Device device, bool trains, bool with_ids) "
    "-> (Tensor[], Tensor[], Tensor)",
    "rows_backward": "(Tensor kept, Tensor[] grads) -> Tensor",
}


def _lookup(
    module: Looked, ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, keys: Sequence[str] | None, trains: bool
) -> FeatureLookup:
    arguments = module.forward_arguments(ids, lengths, offsets, keys)
    if module.observer is None:
        return module.find_lookup(*arguments)
    with torch.set_grad_enabled(trains):  # which it is not inside of a graph, but prefetchers look at it
        return module.find_lookup(*arguments)


def _check_shape(tables: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if expected != found:
        raise ConfigError(
            f"a graph expects an output of shape {expected} from {tables!r}, which gives {found}: the graph "
            "was made for other tables; compile or export the model again"
        )


def _pooled(
    anchor: Tensor | None,
    tables: str,
    ids: Tensor,
    lengths: Tensor | None,
    offsets: Tensor | None,
    weights: Tensor | None,
    keys: Sequence[str] | None,
    bags: int,
    dim: int,
    device: torch.device,
    trains: bool,
    weighs: bool,
) -> tuple[Tensor, Tensor]:
    """Return pooled rows, float32 (bags, dim), and the memory of the context of the backward operator."""
    module = MODULES.find(tables)
    lookup = _lookup(module, ids, lengths, offsets, keys, trains)
    _check_shape(tables, (bags, dim), lookup.out_shape)
    updates = trains and not module.frozen
    module.pin(lookup, updates)
    per_part = [] if weights is None else [part.weights_of(weights) for part in lookup.parts]
    context = TracedContext(module, (updates, False, False, *[weighs] * len(per_part)))
    out = PooledFunction.forward(context, ids, module if updates else None, lookup, *per_part)
    return out, kept_tensor(context if updates or weighs else None, trains or weighs)


def _pooled_backward(kept: Tensor, grad: Tensor, weights: Tensor | None) -> Tensor:
    """Update the rows; return the gradient of the weights, or nothing (0,) if they have none."""
    found = torch.zeros_like(weights, memory_format=torch.contiguous_format) if weights is not None else grad.new_empty(0)
    context = context_of(kept)
    if context is not None:
        grads = pooled_backward(context, grad, context.reaches_rows)
        for part, own in zip(context.lookup.parts, grads, strict=False):
            if own is not None and weights is not None:
                part.put_weights(own, found)
    return found


def _rows(
    anchor: Tensor | None,
    tables: str,
    ids: Tensor,
    lengths: Tensor | None,
    offsets: Tensor | None,
    keys: Sequence[str] | None,
    counts: Sequence[int] | None,
    dims: Sequence[int],
    device: torch.device,
    trains: bool,
    with_ids: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return the rows of each feature, float32 (ids, dim), its ids if asked for, and the memory of the
    context of the backward operator."""
    module = MODULES.find(tables)
    lookup = _lookup(module, ids, lengths, offsets, keys, trains)
    if counts is not None:
        _check_shape(tables, tuple(counts), tuple(lookup.counts))
    updates = trains and not module.frozen
    module.pin(lookup, updates)
    context = TracedContext(module, (updates, False, False))
    outputs = SequenceFunction.forward(context, ids, module, lookup)
    rows = rows_by_feature(lookup, outputs)
    if len(rows) > len(outputs):  # outputs of an operator share no memory
        rows = [one.clone() for one in rows]
    _check_shape(tables, tuple(dims), tuple(one.size(1) for one in rows))
    own_ids = module.ids_by_feature(ids, lengths, offsets, keys) if with_ids else []
    return rows, own_ids, kept_tensor(context if updates else None, trains)


def _rows_backward(kept: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """Update the rows by the gradients of each feature's rows. Return nothing (0,): autograd can refuse to
    differentiate an operator with an output alone."""
    context = context_of(kept)
    if context is not None:
        lookup = context.lookup
        joined = [
            grads[members[0]] if len(members) == 1 else torch.cat([grads[one] for one in members])
            for members in lookup.features
        ]
        sequence_backward(context, joined)
    return kept.new_empty(0)


def _empty_kept(ids: Tensor, size: int) -> Tensor:
    return ids.new_empty((size,), dtype=torch.int64, device="cpu")


def _fake_pooled(
    anchor: Any, tables: Any, ids: Tensor, lengths: Any, offsets: Any, weights: Any, keys: Any,
    bags: int, dim: int, device: torch.device, trains: bool, weighs: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = ids.new_empty((bags, dim), dtype=torch.float32, device=device)
    return out, _empty_kept(ids, int(trains or weighs))


def _fake_pooled_backward(kept: Tensor, grad: Tensor, weights: Tensor | None) -> Tensor:
    return grad.new_empty((0,)) if weights is None else weights.new_empty(weights.shape)


def _fake_rows(
    anchor: Any, tables: Any, ids: Tensor, lengths: Any, offsets: Any, keys: Any,
    counts: Sequence[int] | None, dims: Sequence[int], device: torch.device, trains: bool, with_ids: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:  # fmt: skip
    if counts is None:
        shape = torch.library.get_ctx()
        counts = [shape.new_dynamic_size() for _ in dims]
    sizes = zip(counts, dims, strict=True)
    rows = [ids.new_empty(size, dtype=torch.float32, device=device) for size in sizes]
    own_ids = [ids.new_empty((count,)) for count in counts] if with_ids else []
    return rows, own_ids, _empty_kept(ids, int(trains))


def _fake_rows_backward(kept: Tensor, grads: Sequence[Tensor]) -> Tensor:
    return kept.new_empty(0)


def _keep_pooled(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    weights, weighs = inputs[5], inputs[11]
    ctx.save_for_backward(output[1], *([weights] if weighs else []))


def _pooled_grads(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    kept, *weights = ctx.saved_tensors
    found = torch.ops.tierstore.pooled_backward(kept, grad, *(weights or [None]))
    return (*[None] * 5, found if weights else None, *[None] * 6)


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(output[2])


def _rows_grads(ctx: Any, grads: list[Tensor], *_: object) -> tuple[None, ...]:
    (kept,) = ctx.saved_tensors
    torch.ops.tierstore.rows_backward(kept, grads)
    return (None,) * 11


def _refuse_second_order(ctx: Any, *grads: object) -> None:
    raise RuntimeError("lookups of tiered tables are differentiable once: there is no second derivative")


_LIBRARY = torch.library.Library("tierstore", "FRAGMENT")


def _register() -> None:
    functions = {
        "pooled": (_pooled, _fake_pooled, _pooled_grads, _keep_pooled),
        "rows": (_rows, _fake_rows, _rows_grads, _keep_rows),
        "pooled_backward": (_pooled_backward, _fake_pooled_backward, _refuse_second_order, None),
        "rows_backward": (_rows_backward, _fake_rows_backward, _refuse_second_order, None),
    }
    for name, (run, fake, backward, keep) in functions.items():
        qualified = f"tierstore::{name}"
        _LIBRARY.define(name + _SCHEMAS[name])
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(qualified, fake, lib=_LIBRARY)
        torch.library.register_autograd(qualified, backward, setup_context=keep, lib=_LIBRARY)
        _LIBRARY._register_effectful_op(qualified, EffectType.ORDERED)


_register()
