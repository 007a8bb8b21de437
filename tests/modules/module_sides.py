"""The tiered modules of a random shape, their tiers, and what models do to a batch before they look it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import tierstore
from tests.modules.machine_shapes import Batch, Given, Shape, given_of
from tierstore import TierConfig
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.optim import SGD

STYLES = ("plain", "plain", "clones", "parts", "twice", "renamed", "ordered", "rebuilt", "changed")
"""What a model does with a batch: looks it up as it is, twice, in two parts, with copies of its ids, under
other keys, with its keys in another order, in a new keyed jagged tensor, or with other ids in its memory."""


def tiers_of(
    random: Random, shape: Shape, path: Path, tables: Sequence[tuple[Any, int]] | None = None
) -> TierConfig:
    """Tiers that rows leave in most steps, if the tables have more than 16 rows. ``tables``: the optimizer
    and the columns of each, where these are not the shape's."""
    policy = random.choice(["lru", "lfu", "lookahead", "lfu_aged"])
    admission = random.choice(["always", "always", "counter(2)"])
    pairs = tables or [
        (spec or SGD(), table.dim) for spec, table in zip(shape.specs.values(), shape.tables, strict=True)
    ]
    sizes = {spec.row_bytes(dim) for spec, dim in pairs}  # as of float32, which are the largest
    layouts = len({(str(spec.identity), dim) for spec, dim in pairs})

    def budget(slots: int) -> int:
        return layouts * max(bytes_for(slots, size, policy, admission) for size in sizes)

    return TierConfig(
        hbm=budget(random.choice([16, 18, 24])),
        uvm=random.choice([0, 0, budget(16), budget(24)]),
        ssd="64MiB",
        path=path,
        engine="native",
        policy=policy,
        read_ahead=random.choice([0, "auto", "64KiB"]),
        admission=admission,
        bounds_check=shape.bounds,
    )


def module_of(shape: Shape, config: TierConfig) -> Any:
    optimizer: Any = dict(shape.specs) if shape.by_table else next(iter(shape.specs.values()))
    options: dict[str, Any] = {"config": config, "optimizer": optimizer, "seed": 5}
    table = shape.tables[0]
    if not shape.keyed:
        options |= {"padding_idx": shape.padding_idx, "dtype": shape.dtype}
    if shape.kind == "embedding":
        return tierstore.TieredEmbedding(table.rows, table.dim, **options)
    if shape.kind == "bag":
        options |= {"mode": table.pooling, "include_last_offset": shape.last_offset}
        return tierstore.TieredEmbeddingBag(table.rows, table.dim, **options)
    if shape.kind == "bags":
        return tierstore.EmbeddingBagCollection(shape.configs(), shape.weighted, **options)
    return tierstore.EmbeddingCollection(shape.configs(), **options)


def outputs_of(module: Any, shape: Shape, given: Given) -> list[Tensor]:
    """The output of each feature."""
    if shape.kind == "embedding":
        found = module(given.ids)
        return [found.view(-1, found.shape[-1])]
    if shape.kind == "bag":
        return [module(given.ids, given.offsets, given.weights)]
    if shape.kind == "bags":
        out = module(given.keyed)
        return list(out.values().split([table.dim for _, table in shape.features], 1))
    return [jagged.values() for jagged in module(given.keyed).values()]


def item_of(given: Given) -> Any:
    """What a loader yields."""
    if given.keyed is not None:
        return given.keyed
    return {"ids": given.ids, "offsets": given.offsets, "weights": given.weights}


def arguments_of(item: Any) -> Any:
    """What a forward call gets of it, as prefetch is told."""
    if not isinstance(item, dict):
        return item
    return (item["ids"],) if item["offsets"] is None else (item["ids"], item["offsets"])


def weights_of(given: Given) -> Tensor | None:
    return given.weights if given.keyed is None else given.keyed.weights_or_none()


@dataclass
class Call:
    """One forward call: the logical batch, and its tensors on the two tiered sides."""

    batch: Batch
    subject: Given
    twin: Given


def call_of(batch: Batch, shape: Shape) -> Call:
    """The call with the tensors of ``batch`` itself."""
    if not batch.made:
        with torch.inference_mode(False):
            batch.made = {"subject": given_of(batch, shape), "twin": given_of(batch, shape)}
    return Call(batch, batch.made["subject"], batch.made["twin"])


def calls_of(random: Random, batch: Batch, shape: Shape, style: str) -> list[Call]:
    """What a model of this style looks up for a batch."""
    whole = call_of(batch, shape)
    both = whole.subject, whole.twin
    if style == "twice":
        return [whole, whole]
    if style == "changed":
        _change(random, batch, shape, both)
        return [whole]
    if style == "parts" and batch.even:
        cut = random.randint(0, batch.size)
        return [call_of(batch.part(0, cut), shape), call_of(batch.part(cut, batch.size), shape)]
    if not shape.keyed:
        return [Call(batch, *map(_cloned, both))] if style == "clones" else [whole]
    keys = random.sample(batch.keys, len(batch.keys))
    if style == "renamed" and batch.even and len(set(shape.rows_of.values())) == 1 and "unused" not in keys:
        return [Call(batch.under(keys), *(_rebuilt(given, keys) for given in both))]
    if style == "ordered":
        return [call_of(batch.ordered(keys), shape)]
    if style == "rebuilt" and batch.even:
        return [Call(batch, *(_rebuilt(given, batch.keys) for given in both))]
    return [whole]


def _cloned(given: Given) -> Given:
    assert given.ids is not None
    return Given(given.ids.clone(), None if given.offsets is None else given.offsets.clone(), given.weights)


def _rebuilt(given: Given, keys: list[str]) -> Given:
    old = given.keyed
    return Given(keyed=type(old)(list(keys), old.values(), old.weights_or_none(), lengths=old.lengths()))


def _change(random: Random, batch: Batch, shape: Shape, both: tuple[Given, Given]) -> None:
    """Write other ids into the memory of a batch: seen by torch, or behind its back."""
    values = []
    for key in batch.keys:
        rows = shape.rows_of.get(key, 7)
        batch.bags[key] = [[random.randrange(rows) for _ in bag] for bag in batch.bags[key]]
        values += batch.flat(key)
    how = random.choice(["torch", "data", "numpy"])
    for given in both:
        ids = given.ids if given.keyed is None else given.keyed.values()
        assert ids is not None
        new = torch.tensor(values, dtype=ids.dtype).view(ids.shape)
        if how == "torch":
            ids.copy_(new)
        elif how == "data":
            ids.data.copy_(new)
        else:
            ids.numpy()[...] = new.numpy()
