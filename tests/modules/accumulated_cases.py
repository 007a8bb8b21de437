"""Modules of every kind with the same batches, whole and in parts, and a model beside torch's in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.modules.module_oracles import Pair, load_all
from tierstore import KeyedJaggedTensor, PoolingType, optim
from tierstore.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
)

ROWS, DIM, BAGS, PER_BAG = 40, 4, 12, 3
ONE = torch.tensor([[6]])
SPECS = [
    optim.SGD(lr=0.1, weight_decay=0.1),
    optim.RowWiseAdagrad(lr=0.1),
    optim.Adagrad(lr=0.1),
    optim.Adam(lr=0.1, weight_decay=0.1),
]


@dataclass
class Batch:
    """``ids`` and ``weights`` (bags, per bag), and the gradient of every output."""

    ids: Tensor
    weights: Tensor
    grads: Tensor

    def part(self, begin: int, end: int) -> Batch:
        return Batch(self.ids[begin:end], self.weights[begin:end], self.grads[begin:end])


def batch_of(seed: int, bags: int = BAGS, rows: int = ROWS) -> Batch:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, rows, (bags, PER_BAG), generator=random)
    return Batch(
        ids,
        torch.rand(bags, PER_BAG, generator=random),
        torch.randn(bags, PER_BAG, 3 * DIM, generator=random),
    )


@dataclass
class Case:
    """A module, and the sum of its outputs times given gradients."""

    make: Callable[..., Any]
    loss: Callable[[Any, Batch], Tensor]


def bag(mode: str, **more: Any) -> Case:
    return Case(
        lambda **options: TieredEmbeddingBag(ROWS, DIM, mode=mode, **more, **options),
        lambda module, batch: (module(batch.ids) * batch.grads[:, 0, :DIM]).sum(),
    )


def keyed(batch: Batch, weighted: bool) -> KeyedJaggedTensor:
    """Three features, of a column each: bags of one id, or of none for some ids of the first two."""
    kept = [batch.ids[:, 0] % 2 == 1, batch.ids[:, 1] > 5, batch.ids[:, 2] >= 0]
    values = torch.cat([batch.ids[kept[f], f] for f in range(3)])
    weights = torch.cat([batch.weights[kept[f], f] for f in range(3)]) if weighted else None
    lengths = torch.cat([mask.long() for mask in kept])
    return KeyedJaggedTensor.from_lengths_sync(["a", "b", "c"], values, lengths, weights)


def bags(weighted: bool, poolings: list[PoolingType]) -> Case:
    """Two features share a table; dims differ, so there are two row layouts."""
    tables = [
        EmbeddingBagConfig(ROWS, DIM, "t0", feature_names=["a", "c"], pooling=poolings[0]),
        EmbeddingBagConfig(ROWS, DIM + 3, "t1", feature_names=["b"], pooling=poolings[1]),
    ]

    def loss(module: Any, batch: Batch) -> Tensor:
        out = module(keyed(batch, weighted)).values()
        return (out * batch.grads.flatten(1)[:, : out.size(1)]).sum()

    return Case(lambda **options: EmbeddingBagCollection(tables, weighted, **options), loss)


def rows() -> Case:
    tables = [
        EmbeddingConfig(ROWS, DIM, "t0", feature_names=["a", "c"]),
        EmbeddingConfig(ROWS, DIM + 3, "t1", feature_names=["b"]),
    ]

    def loss(module: Any, batch: Batch) -> Tensor:
        found = module(keyed(batch, False))
        parts = []
        for at, name in enumerate("abc"):
            jagged = found[name]
            grads = batch.grads[:, at, : jagged.values().size(1)][jagged.lengths() > 0]
            parts.append((jagged.values() * grads).sum())
        return torch.stack(parts).sum()

    return Case(lambda **options: EmbeddingCollection(tables, **options), loss)


CASES: dict[str, Case] = {
    "sum": bag("sum"),
    "mean": bag("mean"),
    "max": bag("max"),
    "padding": bag("mean", padding_idx=3),
    "weights": Case(
        lambda **options: TieredEmbeddingBag(ROWS, DIM, mode="sum", **options),
        lambda module, batch: (module(batch.ids, None, batch.weights) * batch.grads[:, 0, :DIM]).sum(),
    ),
    "embedding": Case(
        lambda **options: TieredEmbedding(ROWS, DIM, padding_idx=7, **options),
        lambda module, batch: (module(batch.ids) * batch.grads[..., :DIM]).sum(),
    ),
    "bags": bags(False, [PoolingType.MAX, PoolingType.MEAN]),
    "weighted bags": bags(True, [PoolingType.SUM, PoolingType.MEAN]),
    "rows": rows(),
}


def everything(module: Any) -> list[Tensor]:
    found = []
    for table in module.table_names():
        name = None if len(module.table_names()) == 1 else table
        ids = torch.arange(ROWS)
        found += [module.rows(ids, name), *module.optimizer_rows(ids, name).values()]
    return found


def equal(one: Any, other: Any) -> None:
    for mine, theirs in zip(everything(one), everything(other), strict=True):
        assert torch.equal(mine, theirs)
    assert one.fused_optimizer.num_updates == other.fused_optimizer.num_updates


def sum_loss(module: Any, ids: Tensor, factor: float = 1.0) -> Tensor:
    return (module(ids) * torch.linspace(-1, 1, DIM) * factor).sum()


class Model(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        torch.manual_seed(1)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.table(ids).to(self.top.weight.dtype) - 0.3).square().sum() + self.top(
            self.table(ids.flip(0)).to(self.top.weight.dtype)
        ).square().sum()


def models(pair: Pair, **options: Any) -> tuple[Model, Model]:
    theirs = Model(nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=pair.sparse)).double()
    bag = TieredEmbeddingBag(ROWS, DIM, mode="sum", optimizer=pair.spec, **options)
    load_all(bag, theirs.table.weight.float())
    return Model(bag), theirs
