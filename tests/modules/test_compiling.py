"""Models that are compiled: lookups are operators of the graphs, and train the same rows."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

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
from tierstore.pipeline.prefetch import prefetch

SPEC = optim.Adagrad(lr=0.1)


class OneTable(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        more = {"mode": "sum"} if kind is TieredEmbeddingBag else {}
        self.table = kind(ROWS, 4, config=small_tiers([4], SPEC), optimizer=SPEC, **more)
        self.top = nn.Linear(4, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        scale = batch["ids"].sum() * 0.001 + 1
        found = self.table(batch["ids"]) * scale
        return self.top(found.relu()).sigmoid().sum()


class Collection(nn.Module):
    def __init__(self, pooled: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        options: dict[str, Any] = {"config": small_tiers([4], SPEC), "optimizer": SPEC}
        kind, table = (
            (EmbeddingBagCollection, EmbeddingBagConfig) if pooled else (EmbeddingCollection, EmbeddingConfig)
        )
        tables = [table(ROWS, 4, f"t{feature}", feature_names=[feature]) for feature in "ab"]
        self.table = kind(tables, **options)
        self.top = nn.Linear(4, 3)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        found = self.table(batch["keyed"])
        parts = [found["a"], found["b"]]
        parts = [part if isinstance(part, Tensor) else part.values() for part in parts]
        return self.top(torch.cat(parts).relu()).sigmoid().sum()


MODELS = {
    "embedding": lambda: OneTable(TieredEmbedding),
    "bag": lambda: OneTable(TieredEmbeddingBag),
    "bags": lambda: Collection(pooled=True),
    "rows": lambda: Collection(pooled=False),
}


def batches(count: int) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(0)
    return [
        {"ids": torch.randint(0, ROWS, (4, 3), generator=random), "keyed": keyed_batch(n, ["a", "b"]).ours}
        for n in range(count)
    ]


def train(model: nn.Module, batches: Any) -> list[Tensor]:
    """Losses, dense parameters, rows and their state."""
    found = []
    own = getattr(model, "_orig_mod", model)
    optimizer = torch.optim.SGD(own.top.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    for table in own.table.table_names():
        name = None if len(own.table.table_names()) == 1 else table
        ids = torch.arange(ROWS)
        found += [own.table.rows(ids, name), *own.table.optimizer_rows(ids, name).values()]
    return [*found, *(parameter.detach() for parameter in own.top.parameters())]


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "backend", "prefetched"),
    [
        *((name, "eager", True) for name in MODELS),
        *((name, "aot_eager", False) for name in MODELS),
        ("bag", "inductor", True),
    ],
)
def test_compiled_models_train_the_same_rows(name: str, backend: str, prefetched: bool) -> None:
    model, plain = MODELS[name](), MODELS[name]()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    given = batches(5)
    found = train(compiled, prefetch(given, model, depth=1, window=2) if prefetched else given)
    expected = train(plain, given)
    for mine, other in zip(found, expected, strict=True):
        if backend == "inductor":  # which computes the dense layers in another order
            torch.testing.assert_close(mine, other)
        else:
            assert torch.equal(mine, other)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_one_graph(name: str) -> None:
    told = torch._dynamo.explain(MODELS[name]())(batches(1)[0])
    assert told.graph_count == 1, told


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "aot_eager") for name in MODELS), ("bags", "inductor")]
)
def test_compiled_models_find_lookups_made_ahead(name: str, backend: str) -> None:
    model = MODELS[name]()
    threads: list[str] = []
    make_lookup = model.table.make_lookup

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return make_lookup(*args)

    model.table.make_lookup = noted
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    train(compiled, prefetch(batches(6), model, depth=1, window=2))
    assert len(threads) == 6
    assert threads.count(threading.main_thread().name) == 1  # for the batch that it learned from


def test_the_compiler_is_not_imported_to_train() -> None:
    code = (
        "import sys, torch, tierstore\n"
        "bag = tierstore.TieredEmbeddingBag(9, 4, optimizer=tierstore.optim.SGD(lr=0.1))\n"
        "bag(torch.tensor([[1]])).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
