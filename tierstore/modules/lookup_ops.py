"""Lookups as operators of torch: graphs of torch.compile and torch.export have each lookup as one node.

``pooled`` and ``rows`` read. ``trained_pooled`` and ``trained_rows`` are differentiable. They also get a
tensor without elements that autograd trains in place of the rows (None: only weights have gradients). They
return a tensor ``kept``, too: the context of the backward operator lives and ends with its memory. Operators
that train have ordered effects, so compilers neither join nor drop nor repeat them. Since Inductor does not
keep the order of effects, every backward operator takes what the one before it has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._library.effects import EffectType

from tierstore.errors import ConfigError
from tierstore.modules.autograd_context import NOT_TWICE, Context, derived_once
from tierstore.modules.handles import MODULES, Looked
from tierstore.modules.inputs import FeatureLookup
from tierstore.modules.jagged_rows import rows_by_feature
from tierstore.modules.kept_contexts import TracedContext, context_of, kept_tensor
from tierstore.modules.lookup import (
    PooledFunction,
    SequenceFunction,
    pooled_backward,
    sequence_backward,
)

Ctx: TypeAlias = "Context[object, object]"
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


def _pooling(arguments: Sequence[object]) -> Pooling:
    return Pooling(*arguments)  # type: ignore[arg-type]


def _rows_asked(arguments: Sequence[object]) -> Rows:
    return Rows(*arguments)  # type: ignore[arg-type]


def _lookup(module: Looked, asked: Pooling | Rows, updates: bool) -> FeatureLookup:
    """Return the lookup of a call, with its rows: pinned for an update, or copied."""
    arguments = module.forward_arguments(asked.ids, asked.lengths, asked.offsets, asked.keys)
    if module.observer is None:
        lookup: Any = module.find_lookup(*arguments)
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
    context: Any = TracedContext(module, (updates, False, False, *[weighs] * len(per_part)))
    own = module if updates else None
    return PooledFunction.forward(context, asked.ids, own, lookup, *per_part), context


def _pooled(*arguments: object) -> Tensor:
    """Return pooled rows, float32 (bags, dim)."""
    return _pool(_pooling(arguments), updates=False, weighs=False)[0]


def _trained_pooled(anchor: Tensor | None, weighs: bool, *arguments: object) -> tuple[Tensor, Tensor]:
    """Return pooled rows, and ``kept``. ``weighs``: whether the weights get gradients."""
    out, context = _pool(_pooling(arguments), anchor is not None, weighs)
    return out, kept_tensor(context if weighs or context.module is not None else None)


def _pooled_backward(
    after: Tensor | None, kept: Tensor, grad: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Update the rows; return the gradient of the weights, (0,) if they have none, and what the next backward
    operator takes as ``after``."""
    found = grad.new_empty(0) if weights is None else weights.new_zeros(weights.shape)
    context: Any = context_of(kept)
    if context is not None:
        if weights is not None and not _backward.derives_once:
            torch.autograd.Variable._execution_engine.queue_callback(_refuse_second_derivatives)
        grads = pooled_backward(context, grad, context.reaches_rows())
        for part, own in zip(context.lookup.parts, grads, strict=False):
            if own is not None:
                part.put_weights(own, found)
    return found, kept.new_zeros(1)


def _look_up(asked: Rows, updates: bool) -> tuple[list[Tensor], list[Tensor], TracedContext]:
    module = MODULES.find(asked.module)
    updates = updates and not module.frozen
    lookup = _lookup(module, asked, updates)
    if asked.counts is not None:
        _check_shape(asked, asked.counts, lookup.counts)
    context: Any = TracedContext(module, (updates, False, False))
    outputs = SequenceFunction.forward(context, asked.ids, module, lookup)
    rows = rows_by_feature(lookup, outputs)
    if len(rows) > len(outputs):  # outputs of an operator share no memory
        rows = [one.clone() for one in rows]
    _check_shape(asked, asked.dims, [one.size(1) for one in rows])
    given = asked.ids, asked.lengths, asked.offsets, asked.keys
    return rows, module.ids_by_feature(*given) if asked.with_ids else [], context


def _rows(*arguments: object) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows of each feature, float32 (ids, dim), and its ids if asked for."""
    return _look_up(_rows_asked(arguments), updates=False)[:2]


def _trained_rows(anchor: Tensor, *arguments: object) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return the rows of each feature, its ids if asked for, and ``kept``."""
    rows, ids, context = _look_up(_rows_asked(arguments), updates=True)
    return rows, ids, kept_tensor(context if context.needs_input_grad[0] else None)


def _rows_backward(after: Tensor | None, kept: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """Update the rows by the gradients of each feature's rows; return the next operator's ``after``."""
    context: Any = context_of(kept)
    if context is not None and context.reaches_rows():
        joined = [
            grads[members[0]] if len(members) == 1 else torch.cat([grads[one] for one in members])
            for members in context.lookup.features
        ]
        sequence_backward(context, joined)
    return kept.new_zeros(1)


# -- what a compiler runs in place of these: shapes, dtypes and devices ---------------------


def _fake_pooled(*arguments: object) -> Tensor:
    asked = _pooling(arguments)
    return asked.ids.new_empty((asked.bags, asked.dim), dtype=torch.float32, device=asked.device)


def _fake_kept(ids: Tensor) -> Tensor:
    return ids.new_empty((1,), dtype=torch.int64, device="cpu")


def _fake_trained_pooled(anchor: object, weighs: bool, *arguments: object) -> tuple[Tensor, Tensor]:
    return _fake_pooled(*arguments), _fake_kept(_pooling(arguments).ids)


def _fake_pooled_backward(
    after: object, kept: Tensor, grad: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    found = grad.new_empty(0) if weights is None else weights.new_empty(weights.shape)
    return found, kept.new_empty(1)


def _fake_rows(*arguments: object) -> tuple[list[Tensor], list[Tensor]]:
    asked = _rows_asked(arguments)
    counts: Any = asked.counts
    if counts is None:
        shapes = torch.library.get_ctx()
        counts = [shapes.new_dynamic_size() for _ in asked.dims]
    sizes = zip(counts, asked.dims, strict=True)
    rows = [asked.ids.new_empty(size, dtype=torch.float32, device=asked.device) for size in sizes]
    return rows, [asked.ids.new_empty((count,)) for count in counts] if asked.with_ids else []


def _fake_trained_rows(anchor: object, *arguments: object) -> tuple[list[Tensor], list[Tensor], Tensor]:
    return *_fake_rows(*arguments), _fake_kept(_rows_asked(arguments).ids)


def _fake_rows_backward(after: object, kept: Tensor, grads: object) -> Tensor:
    return kept.new_empty(1)


# -- autograd -----------------------------------------------------------------------------


class _Backward(threading.local):
    """What the last backward operator of this thread's backward pass, or of one that is traced, returned."""

    done: Tensor | None = None
    derives_once = False
    """Whether autograd itself calls the operator, and not the graph of a compiler."""

    def then(self, done: Tensor) -> None:
        """Keep ``done`` until the next operator, or the end of the pass."""
        if self.done is None:
            own = self.__dict__  # another thread may end a pass on a GPU
            torch.autograd.Variable._execution_engine.queue_callback(lambda: own.pop("done", None))
        self.done = done


_backward = _Backward()


def _refuse_second_derivatives() -> None:
    """Raise RuntimeError at the end of a compiled backward pass with ``create_graph``: what it returns would
    not depend on tensors that the compiler's graph computes, so that second derivatives would be None."""
    if torch.is_grad_enabled():
        raise RuntimeError(NOT_TWICE)


def _keep_pooled(ctx: Ctx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weighs, *arguments = inputs
    weights = _pooling(arguments).weights if weighs else None
    ctx.save_for_backward(output[1], *([] if weights is None else [weights]))


def _pooled_grads(ctx: Ctx, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    kept, *weights = ctx.saved_tensors
    given = _backward.done, kept, grad, weights[0] if weights else None
    _backward.derives_once = True
    try:
        with torch.no_grad():
            found, done = torch.ops.tierstore.pooled_backward(*given)
    finally:
        _backward.derives_once = False
    _backward.then(done)
    of_weights = derived_once(found, [grad, *weights]) if weights else None
    by_name = dict.fromkeys(Pooling.__annotations__) | {"weights": of_weights}
    return (None, None, *by_name.values())


def _keep_rows(ctx: Ctx, inputs: object, output: tuple[object, object, Tensor]) -> None:
    ctx.save_for_backward(output[2])


def _rows_grads(ctx: Ctx, grads: list[Tensor], *_: object) -> tuple[None, ...]:
    (kept,) = ctx.saved_tensors
    _backward.then(torch.ops.tierstore.rows_backward(_backward.done, kept, grads))
    return (None, *[None] * len(Rows.__annotations__))


_LIBRARY = torch.library.Library("tierstore", "FRAGMENT")


def _register(schema: str, run: Callable[..., object], fake: Callable[..., object], trains: bool) -> str:
    """Register an operator, with effects if it ``trains``; return its name."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    qualified = f"tierstore::{name}"
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if trains:
        _LIBRARY._register_effectful_op(qualified, EffectType.ORDERED)
    return qualified


_register(f"pooled({_POOLED}) -> Tensor", _pooled, _fake_pooled, trains=False)
_register(f"rows({_ROWS}) -> (Tensor[], Tensor[])", _rows, _fake_rows, trains=False)
_register(
    "pooled_backward(Tensor? after, Tensor kept, Tensor grad, Tensor? weights) -> (Tensor, Tensor)",
    *(_pooled_backward, _fake_pooled_backward),
    trains=True,
)
_register(
    "rows_backward(Tensor? after, Tensor kept, Tensor[] grads) -> Tensor",
    *(_rows_backward, _fake_rows_backward),
    trains=True,
)
_differentiable = _register(
    f"trained_pooled(Tensor? anchor, bool weighs, {_POOLED}) -> (Tensor, Tensor)",
    *(_trained_pooled, _fake_trained_pooled),
    trains=True,
)
torch.library.register_autograd(_differentiable, _pooled_grads, setup_context=_keep_pooled, lib=_LIBRARY)
_differentiable = _register(
    f"trained_rows(Tensor anchor, {_ROWS}) -> (Tensor[], Tensor[], Tensor)",
    *(_trained_rows, _fake_trained_rows),
    trains=True,
)
torch.library.register_autograd(_differentiable, _rows_grads, setup_context=_keep_rows, lib=_LIBRARY)
