"""Calls of the lookup operators, as a compiler traces them out of a module's forward call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tierstore.modules import lookup_ops  # noqa: F401  # which registers the operators
from tierstore.modules.base import TieredModule
from tierstore.sparse import KeyedJaggedTensor

Jagged = tuple[Tensor, Tensor | None, Tensor | None, Sequence[str] | None]
"""Ids, lengths or offsets of their bags, and keys: what a lookup needs of forward's arguments."""


def _trains(module: TieredModule) -> bool:
    """Return whether an update may follow. Tables that are frozen now may be trained by the same graph
    later."""
    return module.training and torch.is_grad_enabled() and module.has_optimizer


def traced_pooling(
    module: TieredModule, jagged: Jagged, weights: Tensor | None, shape: tuple[int, int]
) -> Tensor:
    """Return the pooled rows of forward's tensors, float32 of ``shape``, as a node of a graph."""
    arguments = (module.handle, *jagged, weights, *shape, torch.device(module.engine.device_name))
    trains = _trains(module)
    weighs = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    if not (trains or weighs):
        return torch.ops.tierstore.pooled(*arguments)
    anchor = module.gradient_anchor() if trains else None
    return torch.ops.tierstore.trained_pooled(anchor, weighs, *arguments)[0]


def traced_rows(
    module: TieredModule,
    jagged: Jagged,
    counts: Sequence[int] | None,
    dims: Sequence[int],
    with_ids: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows of each feature, float32, and its ids if asked for, as a node of a graph. ``counts``:
    ids of each feature, if they are known."""
    place = torch.device(module.engine.device_name)
    arguments = (module.handle, *jagged, counts, dims, with_ids, place)
    if not _trains(module):
        return torch.ops.tierstore.rows(*arguments)
    rows, ids, _ = torch.ops.tierstore.trained_rows(module.gradient_anchor(), *arguments)
    return rows, ids


def jagged_of(keyed: KeyedJaggedTensor) -> Jagged:
    return keyed.values(), keyed.lengths_or_none(), keyed.offsets_or_none(), keyed.keys()


def bags_of_keys(keyed: KeyedJaggedTensor) -> int | None:
    """Return how many bags every key has; None if the keys differ, or examples share bags."""
    inverse = keyed.inverse_indices_or_none()
    if keyed.variable_stride_per_key() or (inverse is not None and inverse[1].numel() > 0):
        return None
    lengths, offsets = keyed.lengths_or_none(), keyed.offsets_or_none()
    bags = lengths.numel() if lengths is not None else offsets.numel() - 1  # type: ignore[union-attr]
    return bags // max(1, len(keyed.keys()))
