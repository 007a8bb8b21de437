"""Makes a Lookup of checked ids and bags: one part per row layout, features in their order."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore import _core
from tierstore.cache.engine import Engine
from tierstore.cache.group import TierGroup
from tierstore.cache.layout import IdSegment
from tierstore.errors import InputError
from tierstore.modules.parts import Lookup, PooledPart, SequencePart
from tierstore.sparse import KeyedJaggedTensor

logger = logging.getLogger("tierstore")

NO_PADDING = -1
_DTYPES = torch.int64, torch.int32


@dataclass(slots=True, eq=False)  # not frozen, since that makes a lookup of many features twice as long
class Ids:
    """What one feature looks up: ``ids`` (n,) in ``table``; the first id is the module's id number
    ``begin``."""

    name: str
    table: int
    ids: Tensor
    begin: int = 0
    padding: int = NO_PADDING


@dataclass(slots=True, eq=False)
class Bags(Ids):
    """Ids in bags of ``lengths`` (bags,), pooled; bag b goes to float ``out_offset + b * out_stride``."""

    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    mode: int = 0
    out_offset: int = 0
    out_stride: int = 0


@dataclass
class FeatureLookup(Lookup):
    """A lookup that knows the numbers of each part's features, and how many bags (or ids) features have."""

    features: list[list[int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


Feature = TypeVar("Feature", bound=Ids)


def checked_ids(name: str, ids: Tensor, device: str = "cpu", *, warns: bool = True) -> Tensor:
    """Return ``ids`` in contiguous memory of the host. Raises InputError unless they are int64 or int32 (or
    empty), and on the CPU, or on a GPU if the tables are on a GPU. ``device``: of the tables; ``warns``: of
    ids on a GPU."""
    if not isinstance(ids, Tensor):
        raise InputError(f"{name} must be a torch.Tensor, not {type(ids).__name__}")
    if not ids.is_cpu:
        _check_gpu(name, ids, device, warns)
        ids = ids.cpu()
    if not ids.numel():
        return torch.empty(ids.shape, dtype=torch.int64, device="cpu")
    if ids.dtype not in _DTYPES:
        raise InputError(f"{name} must be int64 or int32, got {ids.dtype}")
    return in_memory(name, ids)


def in_memory(name: str, tensor: Tensor) -> Tensor:
    """Return ``tensor`` in contiguous memory. Raises as :func:`check_memory`."""
    check_memory(name, tensor)
    return tensor.contiguous()


def check_memory(name: str, tensor: Tensor) -> None:
    """Raise InputError for tensors that are sparse or nested, or that stand for others, such as those of
    ``torch.distributed.tensor``: kernels would find nothing at their address."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    if is_plain and (tensor.data_ptr() or not tensor.numel()):
        return
    kind = "nested tensor" if tensor.is_nested else f"{type(tensor).__name__} ({tensor.layout})"
    raise InputError(
        f"{name} must be a plain tensor, with memory of its own, not a {kind}; give the tensors that it is "
        "made of, such as values() of a nested one or to_local() of a DTensor"
    )


def keyed_on_host(keyed: KeyedJaggedTensor, device: str, *, warns: bool = True) -> KeyedJaggedTensor:
    """Return ``keyed`` in memory of the host. ``device``: of the tables; ``warns`` of a tensor on a GPU;
    raises as :func:`checked_ids`."""
    if (values := keyed.values()).is_cpu:
        return keyed
    _check_gpu("values of the KeyedJaggedTensor", values, device, warns)
    return keyed.to("cpu")


def _check_gpu(name: str, ids: Tensor, device: str, warns: bool = True) -> None:
    if device == "cpu" or ids.device.type != "cuda":
        where = "the CPU" if device == "cpu" else device
        raise InputError(f"{name} are on {ids.device}, but the tables on {where}; move them with .cpu()")
    if warns:
        warn_of_copied_ids(name)


@functools.cache
def warn_of_copied_ids(name: str) -> None:
    """Warn, once for each ``name``, that ids on a GPU cost a copy in every batch."""
    logger.warning(
        "%s are on a GPU. The host plans lookups, so it waits for a copy of them in every batch. Leave ids "
        "on the CPU, where the loader has made them. (said once)",
        name,
    )


def pooled_lookup(engine: Engine, features: Sequence[Bags], out_shape: tuple[int, ...]) -> FeatureLookup:
    """Deduplicate and check the ids of pooled features. InputError names the feature of a wrong id."""
    grouped = _by_group(engine, features)
    parts = []
    for group, members in grouped:
        own = [features[number] for number in members]
        offsets, bag_start = _core.bag_offsets([feature.lengths for feature in own])
        bags = _core.Bags(
            offsets=offsets,
            bag_start=bag_start,
            out_offset=np.array([feature.out_offset for feature in own], np.int64),
            out_stride=np.array([feature.out_stride for feature in own], np.int64),
            modes=np.array([feature.mode for feature in own], np.uint8),
        )
        batch = group.batch([_id_segment(engine, feature) for feature in own])
        spans = joined_spans((feature.begin, feature.begin + feature.ids.numel()) for feature in own)
        parts.append(PooledPart(group, batch, spans, bags=bags))
    return FeatureLookup(
        parts, out_shape, [members for _, members in grouped], [len(feature.lengths) for feature in features]
    )


def sequence_lookup(engine: Engine, features: Sequence[Ids]) -> FeatureLookup:
    """Deduplicate and check the ids of features whose rows are returned one by one."""
    grouped = _by_group(engine, features)
    parts = [
        SequencePart(group, group.batch([_id_segment(engine, features[number]) for number in members]), [])
        for group, members in grouped
    ]
    return FeatureLookup(
        parts, (), [members for _, members in grouped], [feature.ids.numel() for feature in features]
    )


def _by_group(engine: Engine, features: Sequence[Ids]) -> list[tuple[TierGroup, list[int]]]:
    groups: dict[int, tuple[TierGroup, list[int]]] = {}
    for number, feature in enumerate(features):
        group = engine.group_of(feature.table)
        groups.setdefault(id(group), (group, []))[1].append(number)
    return list(groups.values())


def _id_segment(engine: Engine, feature: Ids) -> IdSegment:
    return IdSegment(
        feature.name,
        feature.ids.data_ptr(),
        feature.ids.numel(),
        feature.ids.dtype == torch.int32,
        feature.table,
        engine.tables[feature.table].num_embeddings,
        feature.padding,
    )


def joined_spans(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of the module's ids, joined where possible: weights then need no copy."""
    spans: list[tuple[int, int]] = []
    for begin, end in ranges:
        if spans and spans[-1][1] == begin:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    return spans
