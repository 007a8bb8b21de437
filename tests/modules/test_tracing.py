"""Models that torch.fx traces: a tiered module is one call in the graph, and trains the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.modules.keyed_batches import ROWS, keyed_batch
from tests.modules.module_oracles import small_tiers
from tierstore import optim
from tierstore.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    TieredEmbedding,
    TieredEmbeddingBag,
)

SPEC = optim.SGD(lr=0.1)
OPTIONS: dict[str, Any] = {"config": small_tiers([4], SPEC), "optimizer": SPEC}


class Keyed(nn.Module):
    """Passes jagged tensors on, and looks at what comes back."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        if kind == "bags":
            self.tables: Any = EmbeddingBagCollection(
                [EmbeddingBagConfig(ROWS, 4, "t", feature_names=["a"])], **OPTIONS
            )
        else:
            self.tables = EmbeddingCollection([EmbeddingConfig(ROWS, 4, "t", feature_names=["a"])], **OPTIONS)
        self.top = nn.Linear(4, 1)
        self.kind = kind

    def forward(self, batch: Any) -> Tensor:
        out = self.tables(features=batch["keyed"]) if self.kind == "bags" else self.tables(batch["keyed"])
        return self.top(out["a"] if self.kind == "bags" else out["a"].values()).sum()


class Plain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        make: Any = TieredEmbedding if kind == "embedding" else TieredEmbeddingBag
        self.table = make(ROWS, 4, **OPTIONS)
        self.top = nn.Linear(4, 1)

    def forward(self, batch: Any) -> Tensor:
        return self.top(self.table(batch["ids"])).sum()


@pytest.mark.parametrize("kind", ["bags", "rows", "embedding", "bag"])
def test_a_traced_model_trains_the_same_rows(kind: str) -> None:
    make = Keyed if kind in ("bags", "rows") else Plain
    plain, model = make(kind), make(kind)
    traced = fx.symbolic_trace(model)
    name = "tables" if make is Keyed else "table"
    assert [node.op for node in traced.graph.nodes if node.target == name] == ["call_module"]
    for seed in range(3):
        ids = torch.randint(0, ROWS, (4, 2), generator=torch.Generator().manual_seed(seed))
        batch = {"keyed": keyed_batch(seed, ["a"]).ours, "ids": ids}
        found, expected = traced(batch), plain(batch)
        assert torch.equal(found, expected)
        found.backward()
        expected.backward()
    every = torch.arange(ROWS)
    tables = [getattr(one, name) for one in (model, plain)]
    assert torch.equal(tables[0].rows(every), tables[1].rows(every))
    for table in tables:
        table.close()
