"""Calls of the lookup operators, as a compiler traces them out of a module's forward call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tierstore.modules import lookup_ops  # noqa: F401  # which registers the operators
from tierstore.modules.base import TieredModule
from tierstore.sparse import KeyedJaggedTensor


def _anchor(module: TieredModule) -> Tensor | None:
    """Return what autograd trains; None for a forward call that is followed by no update. Tables that are
    frozen now may be trained by the same graph later."""
    if module.training and torch.is_grad_enabled() and module.has_optimizer:
        return module.gradient_anchor()
    return None


def traced_pooling(
    module: TieredModule,
    ids: Tensor,
    lengths: Tensor | None,
    offsets: Tensor | None,
    weights: Tensor | None,
    keys: Sequence[str] | None,
    shape: tuple[int, int],
) -> Tensor:
    """Return the pooled rows of forward's tensors, float32, as a node of a graph."""
    anchor = _anchor(module)
    weighs = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    out, _ = torch.ops.tierstore.pooled(
        anchor, module.handle, ids, lengths, offsets, weights, keys, *shape,
        torch.device(module.engine.device_name), anchor is not None, weighs,
    )  # fmt: skip
    return out


def traced_rows(
    module: TieredModule,
    ids: Tensor,
    jagged: tuple[Tensor | None, Tensor | None, Sequence[str] | None],
    counts: Sequence[int] | None,
    dims: Sequence[int],
    with_ids: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows of each feature, float32, and its ids if asked for, as a node of a graph. ``jagged``:
    lengths, offsets and keys of ``ids``. ``counts``: ids of each feature, if they are known."""
    anchor = _anchor(module)
    rows, own_ids, _ = torch.ops.tierstore.rows(
        anchor, module.handle, ids, *jagged, counts, dims,
        torch.device(module.engine.device_name), anchor is not None, with_ids,
    )  # fmt: skip
    return rows, own_ids


def bags_of_keys(keyed: KeyedJaggedTensor) -> int | None:
    """Return how many bags every key has; None if the keys differ, or examples share bags."""
    inverse = keyed.inverse_indices_or_none()
    if keyed.variable_stride_per_key() or (inverse is not None and inverse[1].numel() > 0):
        return None
    lengths, offsets = keyed.lengths_or_none(), keyed.offsets_or_none()
    bags = lengths.numel() if lengths is not None else offsets.numel() - 1  # type: ignore[union-attr]
    return bags // max(1, len(keyed.keys()))
