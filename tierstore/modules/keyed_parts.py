"""Features as the core takes them: one call per row layout makes the lookup of a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tierstore import _core
from tierstore.cache.engine import Engine
from tierstore.cache.group import TierGroup
from tierstore.cache.layout import out_of_range
from tierstore.errors import InputError
from tierstore.modules.features import Features
from tierstore.modules.inputs import NO_PADDING, in_memory, joined_spans
from tierstore.modules.parts import MODES, PooledPart, SequencePart
from tierstore.sparse import KeyedJaggedTensor

_DTYPES = torch.int64, torch.int32
Integers = tuple[int, int, bool]
"""Contiguous numbers: address, count, and whether they are int32; else they are int64."""
Places = Sequence[tuple[int, int]]
"""The first float and the stride of every feature's vectors in the output."""


class KeyedFeature(NamedTuple):
    """A feature whose bags are those of key number ``key``; ``bound``: the rows of its table."""

    name: str
    key: int
    table: int
    bound: int
    mode: int


class KeyedFeatures:
    """Features that one tier group serves. Ids equal to ``padding`` are left out of bags."""

    def __init__(self, features: Sequence[KeyedFeature], padding: int = NO_PADDING) -> None:
        self._features = features
        self.takes_max = any(feature.mode == MODES["max"] for feature in features)
        self.native = _core.KeyedFeatures(
            keys=np.array([feature.key for feature in features], np.int64),
            tables=np.array([feature.table for feature in features], np.int64),
            bounds=np.array([feature.bound for feature in features], np.int64),
            modes=np.array([feature.mode for feature in features], np.uint8),
            padding=padding,
        )

    def part(self, group: TierGroup, bags: _core.KeyedBags, ids: Tensor, output: _core.Places) -> PooledPart:
        """Deduplicate the ids of the features; the caller adds the spans. Raises InputError for a wrong
        id."""
        group.check_open()
        begin = time.perf_counter()
        if ids.numel() < group.device.makes_from:
            batch, own, *bad = self.native.lookup(bags, described(ids), output)
        else:
            batch, *bad = group.device.make_batch(self.native.segments(bags, described(ids)))
            own = self.native.bags(bags, output)
        group.stats.counters.announce_seconds += time.perf_counter() - begin
        if bad[0] >= 0:
            raise self._wrong_id(*bad)
        return PooledPart(group, batch, [], bags=own)

    def rows(self, group: TierGroup, bags: _core.KeyedBags, ids: Tensor) -> SequencePart:
        """Deduplicate the ids of features whose rows are returned one by one, as :meth:`part` does."""
        group.check_open()
        begin = time.perf_counter()
        if ids.numel() < group.device.makes_from:
            batch, *bad = self.native.lookup_rows(bags, described(ids))
        else:
            batch, *bad = group.device.make_batch(self.native.segments(bags, described(ids)))
        group.stats.counters.announce_seconds += time.perf_counter() - begin
        if bad[0] >= 0:
            raise self._wrong_id(*bad)
        return SequencePart(group, batch, [])

    def _wrong_id(self, feature: int, position: int, value: int) -> InputError:
        return out_of_range(self._features[feature].name, value, position, self._features[feature].bound)

    def spans(self, id_begin: Sequence[int]) -> list[tuple[int, int]]:
        """Return which ids of a batch are these features'. ``id_begin``: where the ids of each key begin."""
        return joined_spans((id_begin[one.key], id_begin[one.key + 1]) for one in self._features)


class KeyedPart:
    """The features number ``members`` of a collection, which ``group`` serves."""

    def __init__(self, group: TierGroup, members: Sequence[int], features: KeyedFeatures) -> None:
        self.group, self.members, self.features = group, members, features
        self._known: tuple[Places, _core.Places] | None = None

    def output(self, places: Places) -> _core.Places:
        """Return the places of the part's features; they are kept for the next batch."""
        known = self._known
        if known is None or known[0] is not places:
            own = np.array([places[number] for number in self.members], np.int64).reshape(-1, 2)
            first, stride = np.ascontiguousarray(own.T)
            known = self._known = places, _core.Places(first, stride)
        return known[1]


class KeyedParts:
    """The parts of a collection's lookups in batches with the keys of ``keyed``. ``tables``: the engine's
    number of each feature's table.

    Raises InputError if a feature's key is missing or doubled.
    """

    def __init__(
        self, features: Features, engine: Engine, tables: Sequence[int], keyed: KeyedJaggedTensor
    ) -> None:
        self._keys, self._groups = list(keyed.keys()), engine.groups
        self.key_of = features.keys_of(keyed)
        """The number of every feature's key."""
        self.keys = np.array(self.key_of, np.int64)
        self.cover_keys = sorted(self.key_of) == list(range(len(self._keys)))
        """Whether the features have all keys, each once."""
        groups = [engine.group_of(table) for table in tables]
        numbers = range(len(groups))
        distinct = list({id(group): group for group in groups}.values())
        self.members = [[number for number in numbers if groups[number] is group] for group in distinct]
        """The numbers of every part's features."""
        every = [
            KeyedFeature(one.title, self.key_of[n], tables[n], features.bounds[n], features.modes[n])
            for n, one in enumerate(features.all)
        ]
        self._parts = [
            KeyedPart(group, members, KeyedFeatures([every[number] for number in members]))
            for group, members in zip(distinct, self.members, strict=True)
        ]
        self.only = self._parts[0] if len(self._parts) == 1 else None
        """The part, if there is one alone."""

    def fit(self, keyed: KeyedJaggedTensor, engine: Engine) -> bool:
        """Return whether these are the parts of this batch, too. Going to a commit makes other tier
        groups."""
        return self.are_of(keyed.keys(), engine)

    def are_of(self, keys: list[str], engine: Engine) -> bool:
        """Return whether these are the parts of batches with these keys; see :meth:`fit`."""
        return keys == self._keys and engine.groups is self._groups

    def lookup(
        self, bags: _core.KeyedBags, ids: Tensor, places: Places, id_begin: Sequence[int] | None
    ) -> list[PooledPart]:
        """Return the parts for a batch. ``id_begin``: where the ids of each key begin, if they have
        weights."""
        made = []
        for part in self._parts:
            made.append(part.features.part(part.group, bags, ids, part.output(places)))
            if id_begin is not None:
                made[-1].spans = part.features.spans(id_begin)
        return made

    def rows(self, bags: _core.KeyedBags, ids: Tensor) -> list[SequencePart]:
        """Return the parts for a batch whose rows are returned one by one."""
        return [part.features.rows(part.group, bags, ids) for part in self._parts]


def bags_of(keyed: KeyedJaggedTensor) -> _core.KeyedBags:
    """Return the bags of all keys. Raises InputError if lengths, offsets and values do not fit one
    another."""
    lengths, offsets, first = as_integers(keyed.lengths()), keyed.offsets_or_none(), None
    if offsets is not None:
        offsets = as_integers(offsets)
        first = described(offsets)
    try:
        return _core.KeyedBags(described(lengths), keyed.stride_per_key(), keyed.values().numel(), first)
    except ValueError as error:
        keyed.sync().validate()  # which say where
        raise InputError(f"KeyedJaggedTensor: {error}") from None


def described(tensor: Tensor) -> Integers:
    """Return contiguous int32 or int64 numbers as the core takes them; ``tensor`` must outlive the call."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype is torch.int32


def as_integers(tensor: Tensor) -> Tensor:
    """Return integers of any dtype in contiguous memory, as int32 or int64."""
    tensor = tensor if tensor.dtype in _DTYPES else tensor.to(torch.int64)
    return in_memory("a tensor of lengths or offsets", tensor)
