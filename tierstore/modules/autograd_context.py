"""How autograd functions are called, and the types of ``ctx``: what they keep of a forward call for its
backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from tierstore.cache.pinned_rows import Rows

Module = TypeVar("Module")
Lookup = TypeVar("Lookup")


NOT_TWICE = (
    "cannot differentiate a lookup twice: gradients of per_sample_weights have no derivatives; "
    "multiply the rows of a TieredEmbedding by the weights instead"
)


class LookupFunction(torch.autograd.Function):
    """An autograd function that is called as often as lookups are: ``apply`` leaves out what torch prepares
    for transforms of functions, in which rows are not looked up."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.apply = super(torch.autograd.Function, cls).apply  # type: ignore[method-assign, misc]


def derived_once(grad: Tensor | None, of: Sequence[Tensor]) -> Tensor | None:
    """Return ``grad``, which a backward pass has computed from ``of``: deriving it again raises RuntimeError.

    torch's ``once_differentiable`` loses that ``grad`` depends on ``of``, so that hessians are zero."""
    if grad is None or not torch.is_grad_enabled():
        return grad
    found: Tensor = _DerivedOnce.apply(grad, *of)
    return found


class _DerivedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, grad: Tensor, *of: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> NoReturn:
        raise RuntimeError(NOT_TWICE)


class Context(Protocol[Module, Lookup]):
    """What every lookup keeps. ``module`` updates the rows that ``lookup`` has found."""

    module: Module
    lookup: Lookup

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class PooledContext(Context[Module, Lookup], Protocol[Module, Lookup]):
    """What pooling keeps as well, one entry per part. ``weighted``: if there are weights, the rows of parts
    whose weights get gradients, and the weights' dtype."""

    argmaxes: Sequence[Tensor | None]
    weights: Sequence[Tensor | None]
    weighted: Sequence[tuple[Rows | None, tuple[torch.device, torch.dtype]]]

    @property
    def needs_input_grad(self) -> tuple[bool, ...]: ...
