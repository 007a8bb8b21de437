"""TieredEmbeddingBag: torch.nn.EmbeddingBag whose rows live in tiers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.types import Device

from tierstore.cache.engine import Table
from tierstore.config import TierConfig
from tierstore.errors import ConfigError, InputError
from tierstore.initializers import as_init, normal
from tierstore.modules.compiling import opaque
from tierstore.modules.embedding import SingleTable, size_of
from tierstore.modules.inputs import Bags, FeatureLookup, checked_ids, pooled_lookup
from tierstore.modules.lookup import MODES
from tierstore.modules.tables import (
    Opening,
    SharedEngine,
    check_placement,
    check_unsupported,
    table_dtype,
)
from tierstore.optim import NOT_GIVEN, OptimizerSpec


class TieredEmbeddingBag(SingleTable):
    """Pooled bags of rows: torch.nn.EmbeddingBag with its positional arguments, and rows in tiers.

    The backward pass applies ``optimizer`` to the rows looked up; there is no ``weight`` parameter.

    Args:
        num_embeddings, embedding_dim: of the table; up to 2**48 rows, of which touched rows take space.
        max_norm, scale_grad_by_freq: must stay at their defaults (ConfigError).
        norm_type, sparse: accepted, without effect: gradients are never materialised.
        mode: "sum", "mean" or "max".
        _weight: initial rows (num_embeddings, embedding_dim).
        include_last_offset: ``offsets`` also has the end of the last bag.
        padding_idx: ids that are left out of their bags.
        device: None or the CPU.
        dtype: of weights and outputs, as for TieredEmbedding.
        config, optimizer, seed, init, name: as for TieredEmbedding.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        config: TierConfig | None = None,
        optimizer: OptimizerSpec | None = NOT_GIVEN,
        seed: int = 0,
        init: object = None,
        name: str = "embedding",
        _shared: SharedEngine | None = None,
    ) -> None:
        check_unsupported(max_norm, scale_grad_by_freq)
        check_placement(device)
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}; it must be one of {', '.join(map(repr, MODES))}")
        rule, kind = as_init(init, normal(0.0, 1.0)), table_dtype(dtype, _weight)
        table = Table(name, num_embeddings, embedding_dim, rule, dtype=kind)
        super().__init__(table, padding_idx, _weight, Opening(config, optimizer, seed, _shared))
        self.mode = mode
        self.include_last_offset = include_last_offset

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **options: Any,
    ) -> TieredEmbeddingBag:
        """Make a table of these rows (num_embeddings, embedding_dim). ``options``: the keyword-only
        arguments."""
        rows, dim = size_of(embeddings)
        arguments = (max_norm, norm_type, scale_grad_by_freq, mode, sparse, embeddings)
        options |= {"optimizer": None} if freeze else {}
        return cls(rows, dim, *arguments, include_last_offset, padding_idx, **options)

    def lookup_inputs(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return (input,) if offsets is None else (input, offsets)

    def lookup_arguments(self, args: tuple[object, ...], kwargs: dict[str, object]) -> set[int | str]:
        return {*range(min(len(args), 2)), *kwargs} - {"per_sample_weights"}

    def make_lookup(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> FeatureLookup:
        ids = checked_ids(f"{self.name}: ids", input)
        lengths = self._lengths(ids, offsets)
        dim = self.embedding_dim
        bags = Bags(
            self.name,
            self.table_numbers[0],
            ids.view(-1),
            padding=self._padding,
            lengths=lengths,
            mode=MODES[self.mode],
            out_stride=dim,
        )
        return pooled_lookup(self.engine, [bags], (len(lengths), dim))

    def _lengths(self, ids: Tensor, offsets: Tensor | None) -> NDArray[np.int64]:
        """Return the number of ids per bag."""
        if ids.dim() == 2:
            if offsets is not None:
                raise InputError(f"{self.name}: with 2-D ids every row is a bag, so offsets must be None")
            return np.full(ids.size(0), ids.size(1), np.int64)
        if ids.dim() != 1:
            raise InputError(
                f"{self.name}: ids must have one or two dimensions, got shape {tuple(ids.shape)}"
            )
        if offsets is None:
            raise InputError(f"{self.name}: 1-D ids need offsets, where each bag starts")
        offsets = checked_ids(f"{self.name}: offsets", offsets)
        if offsets.dim() != 1:
            raise InputError(
                f"{self.name}: offsets must have one dimension, got shape {tuple(offsets.shape)}"
            )
        starts = offsets.numpy().astype(np.int64)
        if self.include_last_offset and not len(starts):
            raise InputError(f"{self.name}: with include_last_offset there must be at least one offset")
        if not len(starts) and ids.numel():
            raise InputError(f"{self.name}: {ids.numel()} ids without a bag; offsets are empty")
        bounds = starts if self.include_last_offset else np.append(starts, ids.numel())
        return self._checked_lengths(bounds, ids.numel())

    def _checked_lengths(self, bounds: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        if bounds[0] != 0:
            raise InputError(f"{self.name}: the first offset must be 0, got {bounds[0]}")
        over = np.flatnonzero(bounds > count)
        if len(over):
            raise InputError(
                f"{self.name}: offset {bounds[over[0]]} at position {over[0]} overruns the {count} ids"
            )
        lengths = np.diff(bounds)
        back = np.flatnonzero(lengths < 0)
        if len(back):
            at = int(back[0])
            raise InputError(
                f"{self.name}: offsets must not decrease, but {bounds[at]} is followed by {bounds[at + 1]} "
                f"at position {at + 1}"
            )
        if bounds[-1] != count:
            raise InputError(f"{self.name}: the last offset is {bounds[-1]} but there are {count} ids")
        return lengths

    @opaque
    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return the pooled bags, (bags, embedding_dim) of the table's dtype; empty bags give zeros. Rows are
        added in float32.

        Args:
            input: ids, int64 or int32: (n,) with ``offsets``, or (bags, n) without.
            offsets: where each bag starts, int64 or int32 (bags,); (bags + 1,) with ``include_last_offset``.
            per_sample_weights: for mode "sum", floats in the shape of ``input``; differentiable.
        """
        if per_sample_weights is not None:
            per_sample_weights = self._checked_weights(per_sample_weights, input)
        return self.pooled_rows(self.find_lookup(input, offsets), per_sample_weights).to(self.dtype)

    def _checked_weights(self, weights: Tensor, input: Tensor) -> Tensor:
        if self.mode != "sum":
            raise InputError(f"{self.name}: per_sample_weights need mode 'sum', not {self.mode!r}")
        if weights.shape != input.shape:
            raise InputError(
                f"{self.name}: per_sample_weights have shape {tuple(weights.shape)}, ids {tuple(input.shape)}"
            )
        if not weights.is_floating_point():
            raise InputError(f"{self.name}: per_sample_weights must be floats, got {weights.dtype}")
        return weights.reshape(-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"
