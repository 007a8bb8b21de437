"""Lookups of a collection's features in the tables of its own engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tierstore.modules.base import TieredModule
from tierstore.modules.features import Features, PooledFeatures
from tierstore.modules.inputs import FeatureLookup, keyed_on_host, sequence_lookup
from tierstore.modules.keyed_parts import KeyedParts, bags_of
from tierstore.modules.tables import OpenTables
from tierstore.sparse import KeyedJaggedTensor, as_keyed_jagged_tensor


class LocalPooling:
    """Pools bags of the rows of one engine."""

    def __init__(self, features: PooledFeatures, opened: OpenTables) -> None:
        self._features, self._engine = features, opened.engine
        self._tables = [opened.numbers[feature.table] for feature in features.all]
        self._parts: KeyedParts | None = None

    def make(self, features: object) -> FeatureLookup:
        """Return the lookup of a KeyedJaggedTensor; see :meth:`TieredModule.make_lookup`."""
        keyed, own, parts = self._on_host(features), self._features, self._parts
        ids, bags = own.values_of(keyed), bags_of(keyed)
        if parts is None or not parts.fit(keyed, self._engine):
            parts = self._parts = KeyedParts(own, self._engine, self._tables, keyed)
        bags_per_key = keyed.stride_per_key()
        counts = [bags_per_key[key] for key in parts.key_of]
        own.check_counts(keyed, counts)
        places, shape = own.places(counts, own.expands(keyed))
        id_begin = bags.id_begin if own.is_weighted else None
        return FeatureLookup(parts.lookup(bags, ids, places, id_begin), shape, parts.members, counts)

    def _on_host(self, features: object) -> KeyedJaggedTensor:
        return keyed_on_host(as_keyed_jagged_tensor(features), self._engine.device_name)

    def pooled(self, module: TieredModule, features: object) -> Tensor:
        """Return the pooled rows of a batch, float32 (examples, sum of dims)."""
        keyed, own = as_keyed_jagged_tensor(features), self._features
        if self._engine.on_meta and keyed.values().is_meta:
            return _described(own, keyed)
        weights, expand = own.weights_of(keyed), own.inverse_rows(keyed)
        lookup = module.find_lookup(keyed)
        values = module.pooled_rows(lookup, weights)
        if expand is None:
            return values
        assert isinstance(lookup, FeatureLookup)
        return own.expanded(values, lookup.counts, expand)


def _described(features: PooledFeatures, keyed: KeyedJaggedTensor) -> Tensor:
    """Return the pooled rows of a batch on the meta device: a shape without rows."""
    bags = keyed.stride_per_key()
    counts = [bags[key] for key in features.keys_of(keyed)]
    features.check_counts(keyed, counts)
    examples = keyed.stride() if features.expands(keyed) else counts[0]
    return torch.empty(examples, sum(features.dims), device="meta")


class LocalRows:
    """Looks up the rows of one engine one by one."""

    def __init__(self, features: Features, opened: OpenTables) -> None:
        self._features, self._engine = features, opened.engine
        self._tables = [opened.numbers[feature.table] for feature in features.all]

    def make(self, features: object) -> FeatureLookup:
        """Return the lookup of a KeyedJaggedTensor; see :meth:`TieredModule.make_lookup`."""
        keyed = keyed_on_host(as_keyed_jagged_tensor(features), self._engine.device_name)
        return sequence_lookup(self._engine, self._features.ids_of(keyed, self._tables))

    def rows(self, module: TieredModule, features: object) -> Sequence[Tensor]:
        """Return for every feature the rows of its ids, float32 (ids, dim)."""
        keyed = as_keyed_jagged_tensor(features)
        if self._engine.on_meta and keyed.values().is_meta:
            counts, own = keyed.length_per_key(), self._features
            pairs = zip(own.keys_of(keyed), own.dims, strict=True)
            return [torch.empty(counts[key], dim, device="meta") for key, dim in pairs]
        lookup = module.find_lookup(keyed)
        assert isinstance(lookup, FeatureLookup)
        return rows_by_feature(lookup, module.rows_one_by_one(lookup))


def rows_by_feature(lookup: FeatureLookup, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return for every feature of ``lookup`` its share (ids, dim) of the parts' ``outputs``."""
    pieces: list[Any] = [None] * len(lookup.counts)
    for members, output in zip(lookup.features, outputs, strict=True):
        # one split node, since slices would each be a full gradient in the backward pass
        for number, piece in zip(members, output.split([lookup.counts[m] for m in members]), strict=True):
            pieces[number] = piece
    return pieces
