"""Tables of float16 and bfloat16: as torch's modules of these dtypes, the same in every tier and file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierstore
from tests.modules.module_oracles import scramble
from tierstore import TableOverride, TierConfig, TieredEmbedding, TieredEmbeddingBag, optim
from tierstore.cache.engine import Table
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.initializers import constant
from tierstore.modules.configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from tierstore.row_format import RowFormat
from tierstore.sparse import KeyedJaggedTensor

ROWS, DIM = 300, 12
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SGD = optim.SGD(lr=0.125)
dtypes = pytest.mark.parametrize("name", sorted(DTYPES))


def tiered(name: str, spec: optim.OptimizerSpec = SGD, slots: int = 30, **more: Any) -> TierConfig:
    size = RowFormat(name).row_bytes(DIM, spec.state_floats(DIM))
    return TierConfig(**{"hbm": bytes_for(slots, size, "lookahead"), "engine": "memory", **more})


def batches(count: int = 20, seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.permutation(ROWS)[:25]) for _ in range(count)]


@dtypes
def test_training_gives_the_bits_of_torch(name: str) -> None:
    """Rows that a batch uses once, and SGD: torch rounds to the nearest value after each step, too."""
    dtype = DTYPES[name]
    theirs = nn.Embedding(ROWS, DIM, dtype=dtype)
    descent = torch.optim.SGD(theirs.parameters(), lr=SGD.lr)
    with TieredEmbedding(
        ROWS, DIM, _weight=theirs.weight.detach(), dtype=dtype, config=tiered(name), optimizer=SGD
    ) as ours:
        for ids in batches():
            outs = ours(ids), theirs(ids)
            assert outs[0].dtype is dtype
            assert torch.equal(*outs)
            descent.zero_grad()
            for out in outs:
                (out * out).sum().backward()
            descent.step()
        assert ours.stats()["evicted_rows"]
        assert torch.equal(ours.rows(torch.arange(ROWS)), theirs.weight)


@dtypes
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_add_in_float32(name: str, mode: str) -> None:
    dtype, ids = DTYPES[name], torch.randint(0, ROWS, (40, 9))
    with TieredEmbeddingBag(ROWS, DIM, mode=mode, dtype=dtype, config=tiered(name), optimizer=SGD) as bags:
        wide = nn.EmbeddingBag(ROWS, DIM, mode=mode, _weight=bags.rows(torch.arange(ROWS)).float())
        out = bags(ids)
        assert out.dtype is dtype
        torch.testing.assert_close(out, wide(ids).to(dtype), rtol=0.01, atol=0.001)
        before = bags.rows(torch.arange(ROWS)).float()
        scramble(out.float()).backward()
        scramble(wide(ids).to(dtype).float()).backward()
        expected = (before - SGD.lr * wide.weight.grad).to(dtype)
        torch.testing.assert_close(bags.rows(torch.arange(ROWS)), expected, rtol=0.02, atol=0.01)


@dtypes
def test_per_sample_weights_have_gradients(name: str) -> None:
    dtype, ids = DTYPES[name], torch.randint(0, ROWS, (10, 4))
    with TieredEmbeddingBag(ROWS, DIM, mode="sum", dtype=dtype, config=tiered(name), optimizer=SGD) as bags:
        rows = bags.rows(ids.view(-1)).float().view(10, 4, DIM)
        weights = torch.rand(10, 4, dtype=dtype).requires_grad_()
        bags(ids, None, weights).sum().backward()
        assert weights.grad is not None
        assert weights.grad.dtype is dtype
        torch.testing.assert_close(weights.grad, rows.sum(-1).to(dtype), rtol=0.01, atol=0.02)


@dtypes
def test_initial_values_are_float32_ones_rounded(name: str) -> None:
    ids = torch.arange(ROWS)
    with (
        TieredEmbedding(ROWS, DIM, dtype=DTYPES[name], config=tiered(name), seed=4) as short,
        TieredEmbedding(ROWS, DIM, config=tiered("fp32"), seed=4) as wide,
    ):
        assert torch.equal(short.rows(ids), wide.rows(ids).to(DTYPES[name]))
        assert torch.equal(short(ids), short.rows(ids))


def trained(config: TierConfig, name: str, spec: optim.OptimizerSpec, steps: int = 20) -> list[torch.Tensor]:
    with TieredEmbeddingBag(ROWS, DIM, dtype=DTYPES[name], config=config, optimizer=spec, seed=1) as bags:
        for ids in batches(steps):
            scramble(bags(ids.view(5, 5)).float()).backward()
        ids = torch.arange(ROWS)
        return [bags.rows(ids), *bags.optimizer_rows(ids).values()]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@dtypes
@pytest.mark.parametrize("spec", [SGD, optim.Adam(lr=0.01)], ids=lambda spec: spec.name)
def test_random_rounding_is_the_same_everywhere_and_differs_from_nearest(
    name: str, spec: optim.OptimizerSpec
) -> None:
    nearest = trained(TierConfig(hbm="all"), name, spec)
    assert equal(nearest, trained(TierConfig(hbm="all", stochastic_rounding=False), name, spec))
    random = trained(TierConfig(hbm="all", stochastic_rounding=True), name, spec)
    assert not torch.equal(nearest[0], random[0])
    uvm = bytes_for(40, RowFormat(name).row_bytes(DIM, spec.state_floats(DIM)), "lru")
    for more in ({}, {"uvm": uvm, "policy": "lru"}, {"slots": 90, "ssd_dtype": name}):
        assert equal(nearest, trained(tiered(name, spec, **more), name, spec))
        assert equal(random, trained(tiered(name, spec, stochastic_rounding=True, **more), name, spec))
    own = {"embedding": TableOverride(stochastic_rounding=True)}
    assert equal(random, trained(tiered(name, spec, tables=own), name, spec))
    tierstore.set_num_threads(3)
    try:
        assert equal(random, trained(tiered(name, spec, stochastic_rounding=True), name, spec))
    finally:
        tierstore.set_num_threads(2)


@dtypes
def test_every_tier_and_file_has_two_bytes_a_weight(name: str, tmp_path: Path) -> None:
    spec = optim.RowWiseAdagrad(lr=0.1)
    config = tiered(name, spec, engine="native", path=tmp_path / "rows", ssd="64MiB")
    with TieredEmbeddingBag(ROWS, DIM, dtype=DTYPES[name], config=config, optimizer=spec) as bags:
        assert bags.stats()["groups"][f"dim{DIM}_{name}"]["row_bytes"] == 32  # 12 * 2 + 4, padded
        (stored,) = bags.engine.specs
        assert (stored.row_bytes, stored.weight_dtype, stored.state_dtype) == (32, name, "fp32")
        for ids in batches():
            bags(ids.view(5, 5)).float().sum().backward()
        bags.commit()
        want = [bags.rows(torch.arange(ROWS)), *bags.optimizer_rows(torch.arange(ROWS)).values()]
        bags.close()
    with TieredEmbeddingBag(ROWS, DIM, dtype=DTYPES[name], config=config, optimizer=spec) as bags:
        found = [bags.rows(torch.arange(ROWS)), *bags.optimizer_rows(torch.arange(ROWS)).values()]
        assert equal(found, want)
    for other in (None, torch.float16 if name == "bf16" else torch.bfloat16):
        with pytest.raises(StoreMismatchError, match=f"weight_dtype is '{name}' there"):
            TieredEmbeddingBag(ROWS, DIM, dtype=other, config=config, optimizer=spec)


@dtypes
def test_state_dicts_have_the_dtype(name: str) -> None:
    dtype, ids = DTYPES[name], torch.arange(ROWS)
    theirs = nn.Embedding(ROWS, DIM, dtype=dtype)
    with TieredEmbedding(ROWS, DIM, dtype=dtype, config=tiered(name), optimizer=SGD) as ours:
        ours.load_state_dict(theirs.state_dict())
        state = ours.state_dict()
        assert state["weight"].dtype is dtype
        assert torch.equal(state["weight"], theirs.weight)
        ours(ids[:20]).sum().backward()
        theirs.load_state_dict(ours.state_dict())
        assert torch.equal(ours.rows(ids), theirs.weight)
        ours.load_rows(ids[:3], torch.full((3, DIM), torch.inf))
        assert torch.equal(ours.rows(ids[:2])[0], torch.full((DIM,), torch.inf, dtype=dtype))
        ours.load_rows(ids[:3], torch.full((3, DIM), -3.4e38))
        assert torch.equal(ours.rows(ids[:1])[0], torch.full((DIM,), torch.finfo(dtype).min, dtype=dtype))


@dtypes
def test_models_of_16_bits_are_offloaded(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(ROWS, DIM, padding_idx=3)
            self.bags = nn.EmbeddingBag(ROWS, DIM, mode="sum")

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.words(ids).sum(1), self.bags(ids)], 1)

    model, ids = Net().to(DTYPES[name]), torch.randint(0, ROWS, (8, 3))
    words, weight = model.words(ids), model.words.weight.detach().clone()
    with tierstore.offload(model, optimizer=SGD, config=tiered(name)):
        assert torch.equal(model.words(ids), words)
        assert torch.equal(model.words.rows(torch.arange(ROWS)), weight)
        out = model(ids)
        assert out.dtype is DTYPES[name]
        out.sum().backward()
        assert not torch.equal(model.words.rows(ids[0]), weight[ids[0]])


@dtypes
def test_pretrained_weights_say_the_dtype(name: str) -> None:
    weight = torch.randn(ROWS, DIM).to(DTYPES[name])
    with TieredEmbedding.from_pretrained(weight, config=tiered(name)) as table:
        assert table.dtype is DTYPES[name]
        assert torch.equal(table(torch.arange(ROWS)), weight)
    with TieredEmbedding.from_pretrained(weight, dtype=torch.float32, config=tiered("fp32")) as table:
        assert torch.equal(table(torch.arange(ROWS)), weight.float())


def test_tables_of_two_dtypes_are_one_collection() -> None:
    kinds = [DataType.FP32, DataType.BF16, DataType.FP16, DataType.BF16]
    tables = [
        EmbeddingBagConfig(ROWS, DIM, f"t{i}", kind, feature_names=[f"t{i}"]) for i, kind in enumerate(kinds)
    ]
    found = []
    for config in (TierConfig(hbm="all"), TierConfig(hbm="24KiB", engine="memory")):
        with tierstore.EmbeddingBagCollection(tables, config=config, optimizer=SGD, seed=9) as bags:
            assert {group.name for group in bags.engine.groups} == {"dim12", "dim12_bf16", "dim12_fp16"}
            for ids in batches():
                ids = ids[:20].repeat(4)
                names, lengths = [f"t{i}" for i in range(4)], torch.full((20,), 4)
                out = bags(KeyedJaggedTensor(names, ids, lengths=lengths)).values()
                assert out.dtype is torch.float32
                scramble(out).backward()
            found.append([bags.state_dict()[f"embedding_bags.t{i}.weight"] for i in range(4)])
    assert [weight.dtype for weight in found[0]] == [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.bfloat16,
    ]
    assert equal(*found)


BAD = [
    (lambda: TieredEmbedding(4, 4, dtype=torch.float64), r"dtype is torch\.float64, but weights of a table"),
    (lambda: TieredEmbeddingBag(4, 4, dtype=torch.int8), r"dtype is torch\.int8, .*ssd_dtype=\"int8\""),
    (lambda: EmbeddingConfig(4, 4, "t", DataType.INT8), r"INT8.*ssd_dtype=\"int8\".*for inference, quantize"),
    (lambda: EmbeddingBagConfig(4, 4, "t", "FP16"), "data_type is 'FP16'"),
    (lambda: Table("t", 4, 4, constant(0.0), dtype="int8"), "dtype is 'int8'; it must be one of"),
    (
        lambda: TieredEmbedding(4, 4, dtype=torch.bfloat16, config=TierConfig(ssd_dtype="int8")),
        "ssd_dtype is 'int8', but table 'embedding' has bf16 weights",
    ),
    (
        lambda: TieredEmbedding(4, 4, dtype=torch.bfloat16, config=TierConfig(ssd_dtype="fp16")),
        "ssd_dtype is 'fp16', but table 'embedding' has bf16 weights",
    ),
    (
        lambda: TieredEmbedding(
            4, 4, dtype=torch.float16, config=TierConfig(ssd=0, uvm="1MiB", uvm_dtype="int8")
        ),
        "uvm_dtype is 'int8', but table 'embedding' has fp16 weights",
    ),
    (
        lambda: TieredEmbedding(4, 4, dtype=torch.float16, config=TierConfig(state_dtype="bf16")),
        "state_dtype is 'bf16', but table 'embedding' has fp16 weights",
    ),
    (lambda: TableOverride(stochastic_rounding="yes"), "stochastic_rounding is 'yes'"),
    (lambda: TierConfig(stochastic_rounding=1), "stochastic_rounding is 1; it must be True or False"),
    (
        lambda: tierstore.offload(nn.Sequential(nn.Embedding(4, 4, dtype=torch.float64)), optimizer=SGD),
        r"0: dtype is torch\.float64",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_dtypes_that_cannot_be_held(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
