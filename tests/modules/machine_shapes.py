"""Random modules and random batches for them, as plain data that the tiered and the dense side both read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
import torchrec
from torch import Tensor

from tierstore import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    optim,
)

KINDS = ("embedding", "bag", "bags", "rows")
"""TieredEmbedding, TieredEmbeddingBag, EmbeddingBagCollection, EmbeddingCollection."""


DATA_TYPES = {
    torch.float32: DataType.FP32,
    torch.float16: DataType.FP16,
    torch.bfloat16: DataType.BF16,
}


@dataclass(frozen=True)
class TableShape:
    name: str
    rows: int
    dim: int
    pooling: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class Shape:
    """A module without its tiers. ``bounds``: of config.BOUNDS_CHECKS."""

    kind: str
    tables: tuple[TableShape, ...]
    specs: dict[str, Any]
    """The optimizer of each table; None: it is never trained."""
    by_table: bool = False
    """Whether the optimizers are given by table."""
    weighted: bool = False
    padding_idx: int | None = None
    last_offset: bool = False
    bounds: str = "fatal"
    dtype: torch.dtype = torch.float32
    theirs: bool = False
    """Whether batches are torchrec's."""

    @property
    def keyed(self) -> bool:
        return self.kind in ("bags", "rows")

    @property
    def padding(self) -> int | None:
        return None if self.padding_idx is None else self.padding_idx % self.tables[0].rows

    @property
    def features(self) -> list[tuple[str, TableShape]]:
        """The features with their tables, in the order of the output."""
        return [(name, table) for table in self.tables for name in table.features]

    @property
    def rows_of(self) -> dict[str, int]:
        """How many ids each key may have."""
        return {name: table.rows for name, table in self.features}

    def configs(self) -> list[Any]:
        found: list[Any] = []
        for table in self.tables:
            given = (table.rows, table.dim, table.name)
            more: dict[str, Any] = {
                "feature_names": list(table.features),
                "data_type": DATA_TYPES[self.dtype],
            }
            if self.kind == "rows":
                found.append(EmbeddingConfig(*given, **more))
            else:
                pooling = PoolingType[table.pooling.upper()]
                found.append(EmbeddingBagConfig(*given, pooling=pooling, **more))
        return found


def spec_of(random: Random) -> Any:
    decay = random.choice([0.0, 0.0, 0.05])
    clip = random.choice([None, None, 0.5])
    more: dict[str, Any] = {"weight_decay": decay, "clip_grad_norm": clip}
    return random.choice(
        [
            optim.SGD(lr=0.1, **more),
            optim.SGD(lr=0.1, momentum=0.9, **more),
            optim.Adagrad(lr=0.1, eps=1e-3, **more),
            optim.RowWiseAdagrad(lr=0.1, eps=1e-3, **more),
            optim.Adam(lr=0.05, eps=1e-3, **more),
            optim.AdamW(lr=0.05, eps=1e-3, **{**more, "weight_decay": 0.05}),
            optim.SGD(lr=0.1, clip_grad_norm=clip, weight_decay=0.3, weight_decay_mode="decoupled_global"),
            optim.Adagrad(lr=0.1, eps=1e-3, weight_decay=0.3, weight_decay_mode="decoupled_global"),
            optim.PartialRowWiseAdam(lr=0.05, eps=1e-3, **more),
        ]
    )


def shape_of(random: Random) -> Shape:
    made = _shape_of(random)
    specs = {table.name: spec_of(random) for table in made.tables}
    by_table = random.random() < 0.3
    if by_table:
        last = made.tables[-1].name
        if len(specs) > 1 and random.random() < 0.3:
            specs[last] = None
    else:
        specs = dict.fromkeys(specs, specs[made.tables[0].name])
    dtype = random.choice([torch.float32] * 6 + [torch.float16, torch.bfloat16])
    theirs = made.keyed and random.random() < 0.2
    return replace(made, specs=specs, by_table=by_table, dtype=dtype, theirs=theirs)


def _shape_of(random: Random) -> Shape:
    kind = random.choice(KINDS)
    bounds = random.choice(["fatal", "fatal", "warning", "ignore"])
    if kind in ("bags", "rows"):
        return _collection(random, kind, bounds)
    rows, dim = random.choice([4, 17, 40, 60]), random.choice([1, 3, 4, 64])
    pooling = random.choice(["sum", "mean", "max"]) if kind == "bag" else "sum"
    padding = random.choice([None, 0, 0, -1, -rows, random.randrange(rows)])
    table = TableShape("embedding", rows, dim, pooling, ("x",))
    weighted = kind == "bag" and pooling == "sum" and random.random() < 0.5
    last = random.random() < 0.5
    return Shape(kind, (table,), {}, False, weighted, padding, last, bounds)


def _collection(random: Random, kind: str, bounds: str) -> Shape:
    names = ["a", "b", "c", "d"][: random.randint(1, 4)]
    sizes = random.choice([[30], [5, 30, 60]])
    weighted = kind == "bags" and random.random() < 0.4
    poolings = ["sum", "mean"] if weighted else ["sum", "mean", "max"]
    dims = random.choice([[1], [3], [4], [4, 64], [1, 3, 4]])
    tables, rest = [], list(names)
    while rest:
        count = random.randint(1, len(rest))
        own, rest = rest[:count], rest[count:]
        if len(sizes) == 1 and random.random() < 0.3:
            own.append(random.choice([name for name in names if name not in own] or own))
            own = list(dict.fromkeys(own))
        random.shuffle(own)
        tables.append(
            TableShape(
                f"t{len(tables)}",
                random.choice(sizes),
                random.choice(dims),
                random.choice(poolings),
                tuple(own),
            )
        )
    return Shape(kind, tuple(tables), {}, False, weighted, bounds=bounds)


@dataclass
class Batch:
    """Bags of ids by key. ``form`` of single tables: "2d", "offsets" or, of embeddings, "flat"."""

    keys: list[str]
    bags: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]] | None
    form: str
    dtype: torch.dtype
    inverse: dict[str, list[int]] | None = None
    """Which bag of each key every example has; None where each has its own."""
    made: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Batch({self.keys}, {self.bags}, {self.form}, {self.dtype}, {self.inverse})"

    @property
    def size(self) -> int:
        return len(self.bags[self.keys[0]])

    @property
    def even(self) -> bool:
        """Whether all keys have as many bags, one per example."""
        return self.inverse is None and len({len(own) for own in self.bags.values()}) == 1

    def flat(self, key: str) -> list[int]:
        return [id for bag in self.bags[key] for id in bag]

    def part(self, begin: int, end: int) -> Batch:
        """The examples from ``begin`` to ``end``."""
        bags = {key: own[begin:end] for key, own in self.bags.items()}
        weights = self.weights
        if weights is not None:
            weights = {key: own[begin:end] for key, own in weights.items()}
        return Batch(self.keys, bags, weights, self.form, self.dtype)

    def under(self, keys: list[str]) -> Batch:
        """The same ids under other keys, place by place."""
        new = dict(zip(keys, self.keys, strict=True))
        weights = self.weights
        if weights is not None:
            weights = {key: weights[old] for key, old in new.items()}
        bags = {key: self.bags[old] for key, old in new.items()}
        return Batch(keys, bags, weights, self.form, self.dtype)

    def ordered(self, keys: list[str]) -> Batch:
        return Batch(keys, self.bags, self.weights, self.form, self.dtype, self.inverse)


def batch_of(random: Random, shape: Shape, outside: bool = False) -> Batch:
    """``outside``: whether there is an id that its table does not have."""
    rows_of = shape.rows_of
    keys = list(rows_of)
    if shape.keyed:
        random.shuffle(keys)
        if random.random() < 0.2:
            keys.insert(random.randint(0, len(keys)), "unused")
    size = random.choice([0, 1, 2, 3, 4, 6])
    sizes = dict.fromkeys(keys, size)
    uneven = shape.keyed and size > 0 and random.random() < 0.2
    if uneven:
        sizes = {key: random.randint(1, size) for key in keys}
    inverse = None
    if uneven and shape.kind == "bags":
        inverse = {key: [random.randrange(sizes[key]) for _ in range(size)] for key in keys}
    form = random.choice(["2d", "offsets"]) if shape.kind == "bag" else random.choice(["2d", "flat"])
    width = random.choice([0, 1, 2, 3]) if form == "2d" and not shape.keyed else None
    bags, weights = {}, {}
    for key in keys:
        size = sizes[key]
        rows = rows_of.get(key, 7)
        skew = random.choice([1.0, 2.0, 4.0])
        lengths = [width if width is not None else random.choice([0, 1, 1, 2, 4]) for _ in range(size)]
        if shape.kind == "embedding" and form == "flat":
            lengths = [1] * size
        bags[key] = [[int(rows * random.random() ** skew) for _ in range(n)] for n in lengths]
        weights[key] = [[random.uniform(-1, 1) for _ in range(n)] for n in lengths]
    if outside:
        places = [(key, bag) for key, own in bags.items() if key in rows_of for bag in own if bag]
        if places:
            key, bag = random.choice(places)
            bag[random.randrange(len(bag))] = random.choice([-1, rows_of[key], rows_of[key] + 5])
    dtype = random.choice([torch.int64, torch.int64, torch.int32])
    return Batch(keys, bags, weights if shape.weighted else None, form, dtype, inverse)


@dataclass
class Given:
    """The tensors of a batch of a single table; ``keyed`` is that of a collection."""

    ids: Tensor | None = None
    offsets: Tensor | None = None
    weights: Tensor | None = None
    keyed: Any = None


def given_of(batch: Batch, shape: Shape) -> Given:
    """New tensors for a batch."""
    values = [id for key in batch.keys for id in batch.flat(key)]
    ids, weights = torch.tensor(values, dtype=batch.dtype), None
    if batch.weights is not None:
        every = [w for key in batch.keys for bag in batch.weights[key] for w in bag]
        weights = torch.tensor(every, dtype=torch.float32).requires_grad_()
    lengths = torch.tensor([len(bag) for key in batch.keys for bag in batch.bags[key]], dtype=batch.dtype)
    if shape.keyed:
        return Given(keyed=_keyed_of(batch, shape, ids, weights, lengths))
    if batch.form == "2d":
        width = len(batch.bags["x"][0]) if batch.size else 2
        ids = ids.view(batch.size, width)
        weights = None if weights is None else weights.detach().view(batch.size, width).requires_grad_()
        return Given(ids, None, weights)
    if shape.kind == "embedding":
        return Given(ids)
    ends = lengths.cumsum(0).to(batch.dtype)
    offsets = torch.cat([ends.new_zeros(1), ends])
    return Given(ids, offsets if shape.last_offset else offsets[:-1], weights)


def _keyed_of(batch: Batch, shape: Shape, ids: Tensor, weights: Tensor | None, lengths: Tensor) -> Any:
    kind = torchrec.KeyedJaggedTensor if shape.theirs else KeyedJaggedTensor
    more: dict[str, Any] = {"lengths": lengths}
    if not batch.even:
        more["stride_per_key_per_rank"] = [[len(batch.bags[key])] for key in batch.keys]
    elif batch.form == "2d":
        more = {"offsets": torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])}
    if batch.inverse is not None:
        more["inverse_indices"] = list(batch.keys), torch.tensor([batch.inverse[key] for key in batch.keys])
    return kind(list(batch.keys), ids, weights, **more)
