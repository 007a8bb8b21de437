"""The hit rates that training reports are those of the simulator on the same batches, exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cache_policies
import tierstore
from cache_policies import simulate
from tests.bags import build
from tierstore import TierConfig, optim
from tierstore.keys import make_keys
from tierstore.pipeline.prefetch import prefetch
from tierstore.sparse import KeyedJaggedTensor

# The optional hook "admit" is not called by the engine: policies that learn from it differ a little live.
POLICIES = [
    name
    for name in cache_policies.names()
    if not cache_policies.get(name).offline and "admit" not in cache_policies.get(name).hook_names()
]


def skewed_batches(tables: int, count: int, bags: int, hotness: int) -> list[list[torch.Tensor]]:
    rng = np.random.default_rng(5)
    return [
        [torch.from_numpy((2000 * rng.random((bags, hotness)) ** 3).astype(np.int64)) for _ in range(tables)]
        for _ in range(count)
    ]


def keys_of(batch: list[torch.Tensor]) -> np.ndarray:
    return np.concatenate([make_keys(table, ids.numpy().reshape(-1)) for table, ids in enumerate(batch)])


def train(config: TierConfig, batches, **options):
    """The chain of one row layout after one pass, and its capacity."""
    module = build(config, optim.SGD(lr=0.1), (8, 8))
    for ids in prefetch(batches, module, inputs={module: lambda ids: (ids,)}, **options):
        module(ids).sum().backward()
    (chain,) = module.engine.chains
    return chain, module


@pytest.mark.parametrize(("depth", "window"), [(0, 0), (1, 4), (3, 12)])
@pytest.mark.parametrize("policy", POLICIES)
def test_hit_rates_are_equal(tmp_path, policy, depth, window):
    batches = skewed_batches(tables=2, count=60, bags=24, hotness=3)
    config = TierConfig(hbm=80_000, path=tmp_path, engine="memory", policy=policy)
    chain, module = train(config, batches, depth=depth, window=window)
    live = chain.tiers["hbm"]
    assert chain.counters.overflow_rows == 0
    keys = [keys_of(batch) for batch in batches]
    result = simulate(keys, policy, chain.fast.capacity, depth=depth, window=window)
    assert (live.rows, live.accesses) == (result.uniques, result.accesses)
    assert live.rows - live.row_hits == result.misses
    assert live.accesses - live.access_hits == result.access_misses
    assert chain.counters.shrunk_plans == result.shrunk_plans
    assert 0.05 < result.unique_miss_ratio < 0.95
    module.close()


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_a_prefetch_that_learns_looks_its_first_batch_up_on_demand(tmp_path, policy):
    rng = np.random.default_rng(6)
    tables = [
        tierstore.EmbeddingBagConfig(
            name=f"t{t}", embedding_dim=8, num_embeddings=2000, feature_names=[f"t{t}"]
        )
        for t in range(2)
    ]
    config = TierConfig(hbm=80_000, path=tmp_path, engine="memory", policy=policy)
    bags = tierstore.EmbeddingBagCollection(tables=tables, config=config, optimizer=optim.SGD(lr=0.1))
    ids = [torch.from_numpy((2000 * rng.random(150) ** 3).astype(np.int64)) for _ in range(60)]
    lengths = torch.full((100,), 3)
    batches = [
        KeyedJaggedTensor(["t0", "t1"], torch.cat([one, other]), lengths=lengths)
        for one, other in zip(ids[::2], ids[1::2], strict=True)
    ]
    for batch in prefetch(batches, bags, depth=2, window=6):
        bags(batch).values().sum().backward()
    (chain,) = bags.engine.chains
    keys = [keys_of([one, other]) for one, other in zip(ids[::2], ids[1::2], strict=True)]
    result = simulate(keys, policy, chain.fast.capacity, depth=2, window=6, on_demand=1)
    assert chain.tiers["hbm"].rows - chain.tiers["hbm"].row_hits == result.misses
    bags.close()
