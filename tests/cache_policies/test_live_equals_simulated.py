"""The hit rates that training reports are those of the simulator on the same batches, exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import cache_policies
import tierstore
from cache_policies import simulate
from cache_policies.lanes import lane_slots
from cache_policies.lru import Lru
from tests.bags import build, everything
from tests.density import thinned
from tierstore import TierConfig, optim
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.keys import make_keys
from tierstore.pipeline.prefetch import prefetch
from tierstore.sparse import KeyedJaggedTensor

POLICIES = [name for name in cache_policies.names() if not cache_policies.get(name).offline]


@pytest.fixture(autouse=True, params=["one lane", "lanes"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small caches have lanes, too."""
    if request.param == "lanes":
        monkeypatch.setattr("cache_policies.lanes.LEAST_SLOTS", 16)


class Picky(Lru):
    """Gives rows with odd ids no slot."""

    name = "picky"

    @staticmethod
    def admit(s, keys, now, admitted):
        for i in range(keys.size):
            if keys[i] & np.uint64(1):
                admitted[i] = 0


def skewed_batches(tables: int, count: int, bags: int, hotness: int) -> list[list[torch.Tensor]]:
    rng = np.random.default_rng(5)
    return [
        [torch.from_numpy((2000 * rng.random((bags, hotness)) ** 3).astype(np.int64)) for _ in range(tables)]
        for _ in range(count)
    ]


def keys_of(batch: list[torch.Tensor]) -> np.ndarray:
    return np.concatenate([make_keys(table, ids.numpy().reshape(-1)) for table, ids in enumerate(batch)])


def train(config: TierConfig, batches, **options):
    """The group of one row layout after one pass, and its capacity."""
    module = build(config, optim.SGD(lr=0.1), (8, 8))
    for ids in prefetch(batches, module, inputs={module: lambda ids: (ids,)}, **options):
        module(ids).sum().backward()
    (group,) = module.engine.groups
    return group, module


def assert_equal(group, result) -> None:
    live = group.stats.tiers["hbm"]
    assert (live.rows, live.accesses) == (result.uniques, result.accesses)
    assert live.rows - live.row_hits == result.misses
    assert live.accesses - live.access_hits == result.access_misses
    assert group.stats.counters.overflow_rows == result.overflowed
    assert group.stats.counters.refused_rows == result.refused
    assert group.stats.counters.shrunk_plans == result.shrunk_plans
    assert group.fast.native.lanes == len(lane_slots(group.fast.capacity))


@pytest.mark.parametrize(("depth", "window"), [(0, 0), (1, 4), (3, 12)])
@pytest.mark.parametrize("policy", POLICIES)
def test_hit_rates_are_equal(tmp_path, policy, depth, window):
    batches = skewed_batches(tables=2, count=60, bags=24, hotness=3)
    config = TierConfig(hbm=80_000, path=tmp_path, engine="memory", policy=policy)
    group, module = train(config, batches, depth=depth, window=window)
    keys = [keys_of(batch) for batch in batches]
    result = simulate(keys, policy, group.fast.capacity, depth=depth, window=window)
    assert_equal(group, result)
    assert result.overflowed == 0
    assert 0.05 < result.unique_miss_ratio < 0.95
    module.close()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_at_overflow_slots_miss_whenever_they_are_drained(tmp_path, policy, depth):
    batches = skewed_batches(tables=2, count=40, bags=48, hotness=4)
    config = TierConfig(hbm=bytes_for(120, 32, policy), path=tmp_path, engine="memory", policy=policy)
    group, module = train(config, batches, depth=depth, window=4)
    keys = [keys_of(batch) for batch in batches]
    result = simulate(keys, policy, group.fast.capacity, depth=depth, window=4)
    assert_equal(group, result)
    assert result.overflowed > 500
    module.close()


REFUSING = itertools.product(
    ["counter(2)", "bloom(500)", "always"],
    ["lookahead", "lru", "arc", "s3_fifo", Picky()],
    [(0, 0), (3, 0), (2, 20_000)],
)


@pytest.mark.parametrize(("admission", "policy", "tiers"), thinned(REFUSING, 4))
def test_refused_rows_are_written_through_and_train_all_the_same(tmp_path, admission, policy, tiers):
    depth, uvm = tiers
    batches = skewed_batches(tables=2, count=40, bags=24, hotness=3)
    memory = build(TierConfig(hbm="all"), optim.SGD(lr=0.1), (8, 8))
    for ids in batches:
        memory(ids).sum().backward()
    config = TierConfig(
        hbm=60_000, uvm=uvm, path=tmp_path, engine="memory", policy=policy, admission=admission
    )
    group, module = train(config, batches, depth=depth, window=6)
    keys = [keys_of(batch) for batch in batches]
    result = simulate(keys, policy, group.fast.capacity, depth=depth, window=6, admission=admission)
    assert_equal(group, result)
    if admission != "always" or isinstance(policy, Picky):
        assert result.refused > 300
    assert all(torch.equal(a, b) for a, b in zip(everything(module), everything(memory), strict=True))
    module.close()
    memory.close()


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
    (group,) = bags.engine.groups
    keys = [keys_of([one, other]) for one, other in zip(ids[::2], ids[1::2], strict=True)]
    result = simulate(keys, policy, group.fast.capacity, depth=2, window=6, on_demand=1)
    assert group.stats.tiers["hbm"].rows - group.stats.tiers["hbm"].row_hits == result.misses
    bags.close()
