"""TieredEmbeddingBag: torch.nn.EmbeddingBag whose rows live in tiers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.types import Device

from tierstore import _core
from tierstore.cache.engine import Table
from tierstore.config import TierConfig
from tierstore.errors import ConfigError, InputError
from tierstore.initializers import as_init, normal
from tierstore.modules.at_once import PooledAtOnce, begun_at_once, finished, new_output
from tierstore.modules.compiling import compiled_as
from tierstore.modules.embedding import SingleTable, size_of
from tierstore.modules.inputs import FeatureLookup
from tierstore.modules.keyed_parts import KeyedFeature, KeyedFeatures, described
from tierstore.modules.parts import MODES
from tierstore.modules.tables import (
    Opening,
    SharedEngine,
    check_unsupported,
    table_dtype,
)
from tierstore.modules.traced import traced_pooling
from tierstore.optim import NOT_GIVEN
from tierstore.optim.tables import Optimizers

_ONLY_FEATURE = (0,)


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
        device: where ``hbm`` is, and outputs are: the CPU or a GPU; None: as ``config`` says.
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
        optimizer: Optimizers = NOT_GIVEN,
        seed: int = 0,
        init: object = None,
        name: str = "embedding",
        _shared: SharedEngine | None = None,
    ) -> None:
        check_unsupported(max_norm, scale_grad_by_freq)
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}; it must be one of {', '.join(map(repr, MODES))}")
        rule, kind = as_init(init, normal(0.0, 1.0)), table_dtype(dtype, _weight)
        table = Table(name, num_embeddings, embedding_dim, rule, dtype=kind)
        super().__init__(table, padding_idx, _weight, Opening(config, optimizer, seed, _shared, device))
        self.mode = mode
        self.include_last_offset = include_last_offset
        self._offsets_name = f"{table.name}: offsets"
        feature = KeyedFeature(table.name, 0, self.table_numbers[0], num_embeddings, MODES[mode])
        self._features = KeyedFeatures([feature], self._padding)
        self._output = _core.Places(np.zeros(1, np.int64), np.full(1, embedding_dim, np.int64))

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

    def forward_arguments(
        self, ids: Tensor, lengths: Tensor | None, offsets: Tensor | None, keys: Sequence[str] | None
    ) -> tuple[Tensor | None, ...]:
        return ids, offsets

    def make_lookup(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> FeatureLookup:
        ids = self.ids_of(input)
        bags = self._bags(ids, offsets)
        part = self._features.part(self.engine.group_of(self.table_numbers[0]), bags, ids, self._output)
        part.spans = [(0, ids.numel())]
        return FeatureLookup([part], (bags.num_bags, self.embedding_dim), [[0]], [bags.num_bags])

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> _core.KeyedBags:
        """Return the bags of ids."""
        if ids.dim() == 2:
            if offsets is not None:
                raise InputError(f"{self.name}: with 2-D ids every row is a bag, so offsets must be None")
            return _core.KeyedBags.equal(ids.size(0), ids.size(1))
        if ids.dim() != 1:
            raise InputError(
                f"{self.name}: ids must have one or two dimensions, got shape {tuple(ids.shape)}"
            )
        if offsets is None:
            raise InputError(f"{self.name}: 1-D ids need offsets, where each bag starts")
        offsets = self.on_host(self._offsets_name, offsets)
        if offsets.dim() != 1:
            raise InputError(
                f"{self.name}: offsets must have one dimension, got shape {tuple(offsets.shape)}"
            )
        try:
            return _core.KeyedBags.from_offsets(described(offsets), ids.numel(), self.include_last_offset)
        except ValueError:
            fault = self._fault(offsets.tolist(), ids.numel())
            raise InputError(f"{self.name}: {fault}") from None

    def _fault(self, bounds: list[int], count: int) -> str:
        """Return what is wrong with the offsets of ``count`` ids."""
        if not bounds:
            if self.include_last_offset:
                return "with include_last_offset there must be at least one offset"
            return f"{count} ids without a bag; offsets are empty"
        if bounds[0] != 0:
            return f"the first offset must be 0, got {bounds[0]}"
        for at, bound in enumerate(bounds):
            if bound > count:
                return f"offset {bound} at position {at} overruns the {count} ids"
        for at, (bound, after) in enumerate(pairwise(bounds), start=1):
            if after < bound:
                return f"offsets must not decrease, but {bound} is followed by {after} at position {at}"
        return f"the last offset is {bounds[-1]} but there are {count} ids"

    def _traced(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        if per_sample_weights is not None:
            per_sample_weights = self._checked_weights(per_sample_weights, input)
        bags = input.size(0) if offsets is None else offsets.numel() - int(self.include_last_offset)
        shape = (bags, self.embedding_dim)
        return traced_pooling(self, (input, None, offsets, None), per_sample_weights, shape).to(self.dtype)

    @compiled_as(_traced)
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
        pooled = None if per_sample_weights is not None else self._pooled_at_once(input, offsets)
        if pooled is None:
            pooled = self.pooled_rows(self.find_lookup(input, offsets), per_sample_weights)
        return pooled if self._output_dtype is torch.float32 else pooled.to(self._output_dtype)

    def _pooled_at_once(self, input: Tensor, offsets: Tensor | None) -> Tensor | None:
        """Return the pooled bags if one native call can find and pool the rows; None also for ids or offsets
        that are wrong."""
        own = self.__dict__  # which takes less time than attributes of an nn.Module one by one
        group, features = own["engine"].group_of(own["table_numbers"][0]), own["_features"]
        begun = None if features.takes_max else begun_at_once(self, group)
        if begun is None:
            return None
        ids = input if own["_bounds"] is None and isinstance(input, Tensor) else self.ids_of(input)
        has_end = own["include_last_offset"]
        if offsets is None and ids.dim() == 2:
            bags = ids.size(0)
        elif isinstance(offsets, Tensor):
            bags = offsets.numel() - has_end
        else:
            return None
        if bags < 0 or (out := new_output(bags, own["embedding_dim"])) is None:
            return None
        pool, native, places = begun[0].pool_bags, features.native, own["_output"]
        made = pool(native, places, ids, offsets, has_end, out.data_ptr())
        if made is NotImplemented:
            ids = ids if own["_bounds"] is not None else self.ids_of(input)
            offsets = None if offsets is None else self.on_host(own["_offsets_name"], offsets)
            made = pool(native, places, ids, offsets, has_end, out.data_ptr())
        if made is None or made is NotImplemented:  # the latter without DLPack's exchange
            return None
        lookup = PooledAtOnce(group, made[0], out, bags, _ONLY_FEATURE, [(0, ids.numel())])
        return finished(self, lookup, begun, made)

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
