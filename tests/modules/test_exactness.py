"""Collections in tiers against the same collections with every row in memory: equal, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.modules.keyed_batches import ROWS, keyed_batch
from tests.modules.module_oracles import scramble, small_tiers
from tierstore import TierConfig, optim
from tierstore.cache.engine import set_num_threads
from tierstore.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from tierstore.pipeline.prefetch import prefetch
from tierstore.sparse import KeyedJaggedTensor

KEYS = ["f0", "f1", "f2", "f3"]
OPTIMIZERS = [
    optim.SGD(lr=0.1, weight_decay=0.1),
    optim.RowWiseAdagrad(lr=0.1),
    optim.Adagrad(lr=0.1, initial_accumulator_value=0.5),
    optim.Adam(lr=0.1, weight_decay=0.01),
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True),
    optim.PartialRowWiseAdam(lr=0.1, weight_decay=0.01),
    optim.LAMB(lr=0.1),
]
STEPS = 6


@dataclass
class Setting:
    """Everything that must not change a bit, and what the collection is."""

    pooled: bool
    dims: list[int]
    poolings: list[PoolingType]
    weighted: bool
    spec: optim.OptimizerSpec
    tiers: dict[str, Any]
    slots: int
    host_slots: int
    depth: int
    window: int
    threads: int
    reopen_after: int | None


@st.composite
def all_settings(draw: st.DrawFn) -> Setting:
    dims = draw(st.lists(st.sampled_from([1, 3, 4, 8, 17]), min_size=1, max_size=3))
    weighted = draw(st.booleans())
    poolings = [PoolingType.SUM, PoolingType.MEAN, *([] if weighted else [PoolingType.MAX])]
    return Setting(
        pooled=draw(st.booleans()),
        dims=dims,
        poolings=draw(st.lists(st.sampled_from(poolings), min_size=len(dims), max_size=len(dims))),
        weighted=weighted,
        spec=draw(st.sampled_from(OPTIMIZERS)),
        tiers={
            "policy": draw(st.sampled_from(["lru", "lfu", "lookahead"])),
            "engine": draw(st.sampled_from(["memory", "native", "rocksdb"])),
        },
        slots=draw(st.integers(16, 80)),
        host_slots=draw(st.sampled_from([0, 16, 40])),
        depth=draw(st.integers(0, 8)),
        window=draw(st.integers(0, 6)),
        threads=draw(st.integers(1, 2)),
        reopen_after=draw(st.one_of(st.none(), st.integers(1, STEPS - 1))),
    )


def build(setting: Setting, config: TierConfig) -> Any:
    options: dict[str, Any] = {"config": config, "optimizer": setting.spec, "seed": 9}
    names = [KEYS[t :: len(setting.dims)] for t in range(len(setting.dims))]
    if setting.pooled:
        bags = [
            EmbeddingBagConfig(ROWS, dim, f"t{t}", feature_names=names[t], pooling=setting.poolings[t])
            for t, dim in enumerate(setting.dims)
        ]
        return EmbeddingBagCollection(bags, setting.weighted, **options)
    rows = [EmbeddingConfig(ROWS, dim, f"t{t}", feature_names=names[t]) for t, dim in enumerate(setting.dims)]
    return EmbeddingCollection(rows, **options)


def train(module: Any, batches: Iterable[KeyedJaggedTensor]) -> list[Tensor]:
    found = []
    for batch in batches:
        out = module(batch)
        values = [part.values() for part in out.values()] if isinstance(out, dict) else [out.values()]
        torch.stack([scramble(value) for value in values]).sum().backward()
        found += [value.detach().clone() for value in values]
    return found


def everything(module: Any, setting: Setting) -> list[Tensor]:
    ids = torch.arange(ROWS)
    found = []
    for t in range(len(setting.dims)):
        found += [module.rows(ids, f"t{t}"), *module.optimizer_rows(ids, f"t{t}").values()]
    return found


def in_tiers(setting: Setting, batches: list[KeyedJaggedTensor]) -> list[Tensor]:
    dims = sorted(set(setting.dims))
    with tempfile.TemporaryDirectory() as folder:
        tiers = dict(setting.tiers)
        if setting.reopen_after is not None:
            tiers |= {"path": folder + "/store", "engine": tiers["engine"].replace("memory", "native")}
        if setting.host_slots:
            tiers["uvm"] = small_tiers(dims, setting.spec, setting.host_slots, policy=tiers["policy"]).hbm
        config = small_tiers(dims, setting.spec, setting.slots, **tiers)
        cut = STEPS if setting.reopen_after is None else setting.reopen_after
        found = []
        for part in filter(None, (batches[:cut], batches[cut:])):
            with build(setting, config) as module:
                found += train(module, prefetch(part, module, depth=setting.depth, window=setting.window))
                last = everything(module, setting)
        return found + last


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(all_settings())
def test_tiers_change_no_bit(setting: Setting) -> None:
    batches = [keyed_batch(seed, KEYS, 3, weighted=setting.weighted).ours for seed in range(STEPS)]
    with build(setting, TierConfig(hbm="all")) as module:
        expected = train(module, batches) + everything(module, setting)
    set_num_threads(setting.threads)
    try:
        found = in_tiers(setting, batches)
    finally:
        set_num_threads(2)
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)
