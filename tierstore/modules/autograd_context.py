"""The types of ``ctx``: what autograd functions keep of a forward call for its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from tierstore.cache.pinned_rows import Rows

Module = TypeVar("Module")
Lookup = TypeVar("Lookup")


class Context(Protocol[Module, Lookup]):
    """What every lookup keeps. ``module`` updates the rows that ``lookup`` has found."""

    module: Module
    lookup: Lookup

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class PooledContext(Context[Module, Lookup], Protocol[Module, Lookup]):
    """What pooling keeps as well, one entry per part. ``weighted``: if there are weights, the rows of parts
    whose weights get gradients, and the weights' dtype."""

    argmaxes: Sequence[Tensor | None]
    weights: Sequence[Tensor | None]
    weighted: Sequence[tuple[Rows | None, tuple[torch.device, torch.dtype]]]

    @property
    def needs_input_grad(self) -> tuple[bool, ...]: ...

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]: ...
