"""Lookups of a collection's features in the tables of its own engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from tierstore.modules.at_once import (
    Begun,
    PooledAtOnce,
    RowsAtOnce,
    begun_at_once,
    finished,
    new_output,
)
from tierstore.modules.base import TieredModule
from tierstore.modules.features import Features, PooledFeatures
from tierstore.modules.inputs import FeatureLookup, keyed_on_host
from tierstore.modules.jagged_rows import rows_by_feature
from tierstore.modules.keyed_parts import KeyedPart, KeyedParts, as_integers, bags_of
from tierstore.modules.tables import OpenTables
from tierstore.sparse import KeyedJaggedTensor, as_keyed_jagged_tensor, uniform

_Begun: TypeAlias = tuple[KeyedPart, Begun, Tensor, Tensor, Tensor | None, int]
"""A part, what its lookup takes, ids, lengths and offsets of all keys, and how many keys there are."""


class _Local:
    """Features whose tables one engine has."""

    def __init__(self, features: Features, opened: OpenTables) -> None:
        self._engine = opened.engine
        self.features = features
        self._tables = [opened.numbers[feature.table] for feature in features.all]
        self._parts: KeyedParts | None = None

    def _parts_of(self, keyed: KeyedJaggedTensor) -> KeyedParts:
        """Return the parts of the batch's lookup: the last batch's parts, if they are the same."""
        parts = self._parts
        if parts is None or not parts.fit(keyed, self._engine):
            parts = self._parts = KeyedParts(self.features, self._engine, self._tables, keyed)
        return parts

    def _begun(self, module: TieredModule, keyed: KeyedJaggedTensor) -> _Begun | None:
        """Return the part of a lookup in one native call, and what the call takes. None where a lookup takes
        more, and for the first batch with other keys."""
        parts, plain = self._parts, uniform(keyed)
        if parts is None or plain is None or (part := parts.only) is None:
            return None
        keys, ids, lengths, offsets = plain
        if not parts.are_of(keys, self._engine) or not ids.is_cpu:
            return None
        if (begun := begun_at_once(module, part.group)) is None:
            return None
        if self.features.bounds_ids:
            ids = self.features.values_of(keyed)
        return part, begun, ids, lengths, offsets, len(keys)

    def _ready(
        self, keyed: KeyedJaggedTensor, ids: Tensor, lengths: Tensor, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what :meth:`_begun` has returned as the core can read it."""
        ids = ids if self.features.bounds_ids else self.features.values_of(keyed)
        return ids, as_integers(lengths), None if offsets is None else as_integers(offsets)


class LocalPooling(_Local):
    """Pools bags of the rows of one engine."""

    features: PooledFeatures

    def make(self, features: object) -> FeatureLookup:
        """Return the lookup of a KeyedJaggedTensor; see :meth:`TieredModule.make_lookup`."""
        keyed, own = as_keyed_jagged_tensor(features), self.features
        if not keyed.values().is_cpu:
            keyed = keyed_on_host(keyed, self._engine.device_name)
        ids, bags = own.values_of(keyed), bags_of(keyed)
        parts = self._parts_of(keyed)
        if keyed.variable_stride_per_key():
            bags_per_key = keyed.stride_per_key()
            counts = [bags_per_key[key] for key in parts.key_of]
            own.check_counts(keyed, counts)
        else:
            counts = [keyed.stride()] * len(own.all)
        places, shape = own.places(counts, own.expands(keyed))
        id_begin = bags.id_begin if own.is_weighted else None
        return FeatureLookup(parts.lookup(bags, ids, places, id_begin), shape, parts.members, counts)

    def pooled(self, module: TieredModule, features: object) -> Tensor:
        """Return the pooled rows of a batch, float32 (examples, sum of dims)."""
        keyed, own = as_keyed_jagged_tensor(features), self.features
        if (pooled := self._pooled_at_once(module, keyed)) is not None:
            return pooled
        if self._engine.on_meta and keyed.values().is_meta:
            return _described(own, keyed)
        weights = own.weights_of(keyed) if own.is_weighted else None
        expand = own.inverse_rows(keyed) if own.expands(keyed) else None
        lookup = module.find_lookup(keyed)
        values = module.pooled_rows(lookup, weights)
        if expand is None:
            return values
        assert isinstance(lookup, FeatureLookup)
        return own.expanded(values, lookup.counts, expand)

    def _pooled_at_once(self, module: TieredModule, keyed: KeyedJaggedTensor) -> Tensor | None:
        """Return the pooled rows of a batch if one native call can find and pool them; None also for a batch
        with a fault, and for the first one with other keys."""
        own = self.features
        if own.is_weighted or own.takes_max or (begun := self._begun(module, keyed)) is None:
            return None
        part, at_once, ids, lengths, offsets, keys = begun
        bags = lengths.numel() // keys
        if (out := new_output(bags, own.width)) is None:
            return None
        pool, features, places = at_once[0].pool_lengths, part.features.native, part.output(own.side_by_side)
        made = pool(features, places, ids, lengths, offsets, keys, out.data_ptr())
        if made is NotImplemented:
            made = pool(features, places, *self._ready(keyed, ids, lengths, offsets), keys, out.data_ptr())
        if made is None or made is NotImplemented:  # the latter without DLPack's exchange
            return None
        lookup = PooledAtOnce(part.group, made[0], out, bags, part.members, [])
        return finished(module, lookup, at_once, made)


def _described(features: PooledFeatures, keyed: KeyedJaggedTensor) -> Tensor:
    """Return the pooled rows of a batch on the meta device: a shape without rows."""
    bags = keyed.stride_per_key()
    counts = [bags[key] for key in features.keys_of(keyed)]
    features.check_counts(keyed, counts)
    examples = keyed.stride() if features.expands(keyed) else counts[0]
    return torch.empty(examples, sum(features.dims), dtype=torch.float32, device="meta")


class LocalRows(_Local):
    """Looks up the rows of one engine one by one."""

    def make(self, features: object) -> FeatureLookup:
        """Return the lookup of a KeyedJaggedTensor; see :meth:`TieredModule.make_lookup`."""
        keyed = as_keyed_jagged_tensor(features)
        if not keyed.values().is_cpu:
            keyed = keyed_on_host(keyed, self._engine.device_name)
        ids, bags = self.features.values_of(keyed), bags_of(keyed)
        parts = self._parts_of(keyed)
        return FeatureLookup(parts.rows(bags, ids), (), parts.members, bags.counts(parts.keys))

    def rows(self, module: TieredModule, keyed: KeyedJaggedTensor) -> Callable[[], Sequence[Tensor]]:
        """Look the rows of a batch up. Return what returns for every feature the rows of its ids, float32
        (ids, dim)."""
        if (at_once := self._rows_at_once(module, keyed)) is not None:
            return at_once
        if self._engine.on_meta and keyed.values().is_meta:
            counts, own = keyed.length_per_key(), self.features
            pairs = zip(own.keys_of(keyed), own.dims, strict=True)
            described = [
                torch.empty(counts[key], dim, dtype=torch.float32, device="meta") for key, dim in pairs
            ]
            return lambda: described
        lookup = module.find_lookup(keyed)
        assert isinstance(lookup, FeatureLookup)
        outputs = module.rows_one_by_one(lookup)
        return lambda: rows_by_feature(lookup, outputs)

    def _rows_at_once(
        self, module: TieredModule, keyed: KeyedJaggedTensor
    ) -> Callable[[], Sequence[Tensor]] | None:
        """Return what returns the rows if one native call can find and copy them; None also for a batch with
        a fault, and for the first one with other keys."""
        if (begun := self._begun(module, keyed)) is None:
            return None
        part, at_once, ids, lengths, offsets, keys = begun
        parts = self._parts
        if parts is None or not parts.cover_keys:
            return None
        if (out := new_output(ids.numel(), part.group.layout.dim)) is None:
            return None
        copy, features = at_once[0].copy_lengths, part.features.native
        made = copy(features, ids, lengths, offsets, keys, out.data_ptr())
        if made is NotImplemented:
            made = copy(features, *self._ready(keyed, ids, lengths, offsets), keys, out.data_ptr())
        if made is None or made is NotImplemented:  # the latter without DLPack's exchange
            return None
        lookup = RowsAtOnce(part.group, made[0], out, parts.keys)
        rows = finished(module, lookup, at_once, made)
        return lambda: rows_by_feature(lookup.whole(), [rows])
