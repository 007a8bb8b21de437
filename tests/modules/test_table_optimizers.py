"""Optimizers and learning rates by table: torch in float64, other tables' bits, schedules, stores, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.modules.keyed_batches import ROWS, keyed_batch
from tests.modules.module_oracles import scramble
from tierstore import (
    ConfigError,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    GradientError,
    StoreMismatchError,
    TierConfig,
    optim,
)
from tierstore.modules.configs import DataType, PoolingType

NAMES = ["a", "b", "c", "d"]
KEYS = ["f0", "f1", "f2", "f3", "f4"]
FEATURES = {"a": ["f0", "f2"], "b": ["f1"], "c": ["f3"], "d": ["f4"]}
POOLINGS = {"b": PoolingType.MEAN}
DIMS = {"a": 6, "b": 6, "c": 6, "d": 3}
OPTIMIZERS: dict[str, Any] = {
    "a": optim.SGD(lr=0.1),
    "b": optim.SGD(lr=0.01, weight_decay=0.1),
    "c": optim.Adagrad(lr=0.05, eps=1e-6),
    "*": optim.RowWiseAdagrad(lr=0.05, eps=1e-6),
}
MEMORY = TierConfig(hbm="all")


def bags(optimizer: Any = None, config: TierConfig = MEMORY, only: str = "", **changes: Any) -> Any:
    tables = [
        EmbeddingBagConfig(
            ROWS, DIMS[n], n, feature_names=FEATURES[n], pooling=POOLINGS.get(n, PoolingType.SUM), **changes
        )
        for n in only or NAMES
    ]
    return EmbeddingBagCollection(tables, config=config, optimizer=optimizer or OPTIMIZERS, seed=4)


def train(module: Any, seeds: range = range(4), prefetched: bool = False) -> None:
    batches = [keyed_batch(seed, KEYS, 5).ours for seed in seeds]
    for batch in tierstore.prefetch(batches, module, depth=2) if prefetched else batches:
        scramble(module(batch).values()).backward()


def everything(module: Any, names: str = "abcd") -> list[Tensor]:
    ids = torch.arange(ROWS)
    found = []
    for name in names:
        found += [module.rows(ids, name), *module.optimizer_rows(ids, name).values()]
    return found


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Dense(nn.Module):
    """The same tables in float64, trained by torch's optimizers with parameter groups."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        ids = torch.arange(ROWS)
        self.tables = nn.ParameterDict({n: nn.Parameter(ours.rows(ids, n).double()) for n in NAMES})
        self.optimizers = [
            torch.optim.SGD([self.tables["a"]], lr=0.1),
            torch.optim.SGD([self.tables["b"]], lr=0.01),
            torch.optim.Adagrad([self.tables["c"]], lr=0.05, eps=1e-6),
        ]
        self.sums = torch.zeros(ROWS, dtype=torch.float64)

    def forward(self, batch: Any) -> Tensor:
        parts = []
        features = batch.to_dict()
        for table, jagged in ((n, features[key]) for n in NAMES for key in FEATURES[n]):
            mode = "mean" if table == "b" else "sum"
            offsets = jagged.offsets()[:-1]
            parts.append(nn.functional.embedding_bag(jagged.values(), self.tables[table], offsets, mode=mode))
        return torch.cat(parts, dim=1)

    @torch.no_grad()
    def step(self, touched: Tensor) -> None:
        """``touched``: the rows of b, which alone decay."""
        self.tables["b"].grad[touched] += 0.1 * self.tables["b"][touched]
        for optimizer in self.optimizers:
            optimizer.step()
        grad = self.tables["d"].grad
        self.sums += grad.square().mean(dim=1)
        self.tables["d"] -= 0.05 * grad / (self.sums.sqrt() + 1e-6)[:, None]


def test_float64_reference() -> None:
    ours = bags()
    theirs = Dense(ours)
    for seed in range(6):
        batch = keyed_batch(seed, KEYS, 5).ours
        scramble(ours(batch).values()).backward()
        theirs.zero_grad()
        scramble(theirs(batch)).backward()
        theirs.step(batch["f1"].values().unique())
        if seed == 2:  # a schedule, by table
            ours.fused_optimizer.param_groups[0]["lr"] = theirs.optimizers[0].param_groups[0]["lr"] = 0.02
    for name in NAMES:
        found = ours.rows(torch.arange(ROWS), name).double()
        torch.testing.assert_close(found, theirs.tables[name].detach(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [DataType.FP32, DataType.BF16], ids=str)
def test_every_table_has_the_bits_of_a_training_of_its_own(dtype: DataType) -> None:
    """Also where steps of one layout are merged again, and where updates round at random."""
    config = TierConfig(hbm="all", stochastic_rounding=True)
    together = bags(config=config, data_type=dtype)
    each = {name: OPTIMIZERS.get(name, OPTIMIZERS["*"]) for name in NAMES}
    alone = {name: bags(spec, config, name, data_type=dtype) for name, spec in each.items()}
    for seed in range(4):
        batch = keyed_batch(seed, KEYS, 5).ours
        out = together(batch)
        targets = {key: torch.randn(out[key].shape) for key in KEYS}
        sum((out[key] * targets[key]).sum() for key in KEYS).backward()
        for name, module in alone.items():
            own = module(batch)
            sum((own[key] * targets[key]).sum() for key in FEATURES[name]).backward()
    for name, module in alone.items():
        same(everything(together, name), everything(module, name))


@pytest.mark.parametrize("threads", [1, 3])
def test_tiers_and_prefetch_change_no_bit(threads: int) -> None:
    optimizers = OPTIMIZERS | {"b": optim.AdamW(lr=0.02), "d": optim.SGD(lr=0.1, momentum=0.9)}
    expected = bags(optimizers)
    train(expected)
    tierstore.set_num_threads(threads)
    try:
        tiers = TierConfig(hbm="12KiB", uvm="8KiB", ssd="1GiB", engine="memory", policy="lru")
        with bags(optimizers, tiers) as found:
            train(found, prefetched=True)
            assert found.stats()["evicted_rows"] > 0
            same(everything(found), everything(expected))
    finally:
        tierstore.set_num_threads(2)


def test_groups_and_their_schedules() -> None:
    module = bags()
    groups = module.fused_optimizer.param_groups
    assert [group["tables"] for group in groups] == [["a"], ["b"], ["c"], ["d"]]
    assert [group["lr"] for group in groups] == [0.1, 0.01, 0.05, 0.05]
    assert "eps" not in groups[0]
    factors: list[Callable[[int], float]] = [lambda step: 1.0, lambda step: 0.0, *[lambda step: 1.0] * 2]
    schedule = torch.optim.lr_scheduler.LambdaLR(module.fused_optimizer, factors)
    train(module, range(1))
    schedule.step()
    before = module.rows(torch.arange(ROWS), "b")
    train(module, range(1, 3))
    assert torch.equal(module.rows(torch.arange(ROWS), "b"), before)
    with pytest.raises(ConfigError, match="parameter groups of its tables"):
        module.fused_optimizer.add_param_group({"params": [torch.zeros(1)]})


def test_equal_steps_are_one() -> None:
    spec = optim.SGD(lr=0.1)
    module = bags({name: spec for name in NAMES})
    assert module.fused_optimizer.next_step()[0][0][1] is None
    module.fused_optimizer.param_groups[2]["lr"] = 0.3
    assert [tables for _, tables in module.fused_optimizer.next_step()[0]] == [("a", "b", "d"), ("c",)]


def test_row_layouts_are_those_of_the_optimizers() -> None:
    groups = bags().stats()["groups"]
    assert set(groups) == {"dim6_sgd", "dim6_adagrad_0.0", "dim3_rowwise_adagrad_0.0"}


def test_commits_and_state_dicts(tmp_path: Path) -> None:
    expected = bags()
    train(expected, range(2))
    with bags(config=TierConfig(hbm="1MiB", path=tmp_path / "store")) as first:
        train(first, range(2))
        state, weights = first.fused_optimizer.state_dict(), first.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [
        [f"embedding_bags.{name}.weight"] for name in NAMES
    ]
    assert set(state["state"]["embedding_bags.a.weight"]) == {"a.step"}
    assert set(state["state"]["embedding_bags.c.weight"]) == {"c.step", "c.sum"}
    with bags(config=TierConfig(hbm="1MiB", path=tmp_path / "store")) as again:
        same(everything(again), everything(expected))
    loaded = bags()
    loaded.load_state_dict(weights)
    loaded.fused_optimizer.load_state_dict(state)
    train(loaded, range(2, 4))
    train(expected, range(2, 4))
    same(everything(loaded), everything(expected))
    changed = OPTIMIZERS | {"c": optim.Adam()}
    with pytest.raises(StoreMismatchError, match=r"table 'c': .*row_bytes|table 'c': .*optimizer"):
        bags(changed, TierConfig(hbm="1MiB", path=tmp_path / "store"))
    with pytest.raises(ConfigError, match=r"not the state of a fused .*'c': 'adam'"):
        bags(changed).fused_optimizer.load_state_dict(state)


@pytest.mark.parametrize("spec", [optim.SGD(lr=0.1), optim.RowWiseAdagrad(lr=0.1), optim.Adam(lr=0.1)])
def test_a_table_without_an_optimizer_is_frozen(spec: optim.OptimizerSpec) -> None:
    """Its rows have no state, whatever the other tables' rows have."""
    module = bags({"a": None, "*": spec})
    before = everything(module)
    train(module)
    after = everything(module)
    assert torch.equal(after[0], before[0])
    assert not any(torch.equal(x, y) for x, y in zip(after[1:], before[1:], strict=True))
    module.requires_grad_(True)
    with pytest.raises(ConfigError, match="tables a were built with optimizer=None"):
        train(module)
    assert bags({"*": None}).frozen


def test_accumulated_gradients() -> None:
    expected, found = bags(), bags()
    train(expected, range(2))
    for seed in range(2):
        with tierstore.accumulate(found) as rows:
            train(found, range(seed, seed + 1))
            assert rows.parameters()[0].grad is not None
    same(everything(found), everything(expected))


def test_gradients_that_are_not_finite_are_named() -> None:
    module = bags(config=TierConfig(hbm="all", check_gradients=True))
    batch = keyed_batch(0, KEYS, 5).ours
    out = module(batch).values()
    grad = torch.ones_like(out)
    grad[:, 12:18] = torch.nan  # f1 in the order of the tables: a's two features, then b's
    before = module.rows(torch.arange(ROWS), "a")
    with pytest.raises(GradientError, match=r"b id \d+"):
        out.backward(grad)
    assert not torch.equal(module.rows(torch.arange(ROWS), "a"), before)


def test_rows_one_by_one_and_single_tables() -> None:
    tables = [EmbeddingConfig(ROWS, 6, n, feature_names=[k]) for n, k in zip("ab", KEYS, strict=False)]
    both = {"a": optim.SGD(lr=1.0), "b": optim.SGD(lr=0.0)}
    module = EmbeddingCollection(tables, config=MEMORY, optimizer=both)
    before = everything(module, "ab")
    batch = keyed_batch(0, KEYS[:2], 5).ours
    sum(part.values().sum() for part in module(batch).values()).backward()
    after = everything(module, "ab")
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])
    single = tierstore.TieredEmbedding(9, 4, config=MEMORY, optimizer={"item": optim.Adam()}, name="item")
    assert single.fused_optimizer.spec == optim.Adam()


def test_offloaded_tables() -> None:
    parts = {"user": nn.Embedding(9, 4), "item": nn.EmbeddingBag(9, 4), "old": nn.Embedding(9, 4)}
    model = nn.ModuleDict(parts)
    model["old"].requires_grad_(False)
    optimizers = {"user": optim.SGD(lr=1.0), "*": optim.Adam()}
    with tierstore.offload(model, MEMORY, optimizers) as replaced:
        assert replaced["user"].fused_optimizer.spec == optim.SGD(lr=1.0)
        assert replaced["item"].fused_optimizer.spec == optim.Adam()
        assert replaced["old"].frozen
        model["user"](torch.tensor([1])).sum().backward()
        model["item"](torch.tensor([[1]])).sum().backward()
        assert set(replaced["item"].optimizer_rows([1])) == {"exp_avg", "exp_avg_sq"}
    with pytest.raises(ConfigError, match=r"optimizer names tables \['person'\]"):
        tierstore.offload(nn.ModuleDict({"user": nn.Embedding(9, 4)}), MEMORY, {"person": optim.SGD()})


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"a": optim.SGD()}, r"no entry for tables \['b', 'c', 'd'\]; name them, or give .* one as '\*'"),
        ({"x": optim.SGD(), "*": None}, r"optimizer names tables \['x'\], and the tables are \['a', 'b'"),
        ({"*": "adam"}, "the optimizer of table '\\*' is 'adam'; it must be one of tierstore.optim"),
        ("adam", "optimizer is 'adam'; the backward pass applies it .* or a dict of such"),
        ({}, "no entry for tables"),
    ],
    ids=str,
)
def test_wrong_optimizers(optimizer: Any, message: str) -> None:
    tables = [EmbeddingBagConfig(ROWS, 6, n, feature_names=FEATURES[n]) for n in NAMES]
    with pytest.raises(ConfigError, match=message):
        EmbeddingBagCollection(tables, config=MEMORY, optimizer=optimizer)
