"""Hits, misses and evictions of a cache in lanes: on a fake GPU, on the host, and simulated, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cache_policies import simulate
from cache_policies.lanes import lane_slots
from tests.bags import build, everything
from tests.cache_policies.test_live_equals_simulated import assert_equal, keys_of, skewed_batches
from tests.cuda.fake import fake_gpu
from tests.cuda.fake_torch import fake_torch
from tests.cuda.test_training_on_fake_gpu import counters
from tests.density import in_turns
from tierstore import TierConfig, optim
from tierstore.pipeline.prefetch import prefetch

POLICIES = ("lookahead", "lru", "s3_fifo", "lfu")
DIM = 8


@pytest.fixture(autouse=True, params=[16, 1 << 20], ids=["lanes", "one lane"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let small caches have lanes, too; return whether they have."""
    monkeypatch.setattr("cache_policies.lanes.LEAST_SLOTS", request.param)
    return bool(request.param == 16)


def trained(config: TierConfig, batches: list[Any], depth: int, window: int) -> tuple[Any, int, list[Any]]:
    """The group of one row layout, the rows that its cache has, and everything that must be the same on
    every device."""
    module = build(config, optim.RowWiseAdagrad(lr=0.1), (DIM, DIM))
    outs = []
    for ids in prefetch(batches, module, inputs={module: lambda ids: (ids,)}, depth=depth, window=window):
        out = module(ids)
        out.square().sum().backward()
        outs.append(out.detach().cpu())
    (group,) = module.engine.groups
    held, counts = len(group.fast.native), counters(module.stats())
    found = [*outs, *everything(module)]
    module.close()
    return group, held, [counts, *found]


@pytest.mark.parametrize(("depth", "window"), [(0, 0), (2, 6)])
@pytest.mark.parametrize(("policy", "uvm"), in_turns(POLICIES, [0, 20_000]))
def test_a_gpu_the_host_and_the_simulator_agree(
    policy: str, depth: int, window: int, uvm: int, lanes: bool
) -> None:
    batches = skewed_batches(tables=2, count=30, bags=24, hotness=3)
    config = TierConfig(hbm=60_000, uvm=uvm, ssd="1GiB", engine="memory", policy=policy)
    host, held, expected = trained(config, batches, depth, window)
    with fake_torch("random", seed=3):
        gpu, held_there, found = trained(replace(config, device="cuda:0"), batches, depth, window)
        assert fake_gpu().counts["launches"] > 60
    keys = [keys_of(batch) for batch in batches]
    result = simulate(keys, policy, host.fast.capacity, depth=depth, window=window)
    assert (len(lane_slots(host.fast.capacity)) > 4) == lanes
    assert 0.05 < result.unique_miss_ratio < 0.95
    assert held == held_there == host.fast.capacity  # so all slots were filled once before rows left
    for group in (host, gpu):
        assert_equal(group, result)
        evicted = result.misses - result.overflowed - result.refused - result.capacity
        assert group.stats.counters.evicted_rows == evicted > 100
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(ours, theirs)
