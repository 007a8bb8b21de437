"""Training with ``hbm`` on a fake GPU: rows, outputs, hits, misses and evictions are those of the host."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import tierstore
from tests.cuda.fake import ORDERS, fake_gpu
from tests.cuda.fake_torch import GpuTensor, fake_torch
from tests.density import thinned
from tierstore import TierConfig, TieredEmbeddingBag, optim

DIM = 8
DIM_OF_CUT_ROWS = 32  # whose weights a GPU keeps apart
COUNTED = ("row_hits", "row_misses", "access_hits", "evicted_rows", "overflow_rows", "initialised_rows")


def trained(prefetch: bool, config: TierConfig, dim: int = DIM) -> tuple[list[torch.Tensor], list[int]]:
    """Outputs and rows of a training whose tiers are too small, and its counters."""
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(400, (8, 3), generator=generator) for _ in range(20)]
    optimizer = optim.RowWiseAdagrad(lr=0.1)
    with TieredEmbeddingBag(400, dim, mode="sum", config=config, optimizer=optimizer) as table:
        found = []
        for ids in tierstore.prefetch(batches, table, depth=2, window=4) if prefetch else batches:
            weights = torch.rand(ids.shape, generator=generator, requires_grad=True)
            out = table(ids, per_sample_weights=weights)
            assert out.device == torch.device(config.device or "cpu")
            out.square().sum().backward()
            assert weights.grad is not None
            found += [out.detach().cpu(), weights.grad]
        with torch.no_grad():
            found.append(table(batches[0]).cpu())
        stats = table.stats()
        found.append(table.rows(torch.arange(400)))
        return found, counters(stats)


def counters(stats: Any) -> list[int]:
    """Every count of hits, misses and evictions in ``stats``, in order."""
    if isinstance(stats, dict):
        own = [stats[name] for name in COUNTED if name in stats]
        return own + [n for key in sorted(stats, key=str) for n in counters(stats[key])]
    return []


CONFIGS = {
    "uvm and ssd": TierConfig(hbm="8KiB", uvm="6KiB", ssd="1GiB", engine="memory"),
    "managed uvm": TierConfig(hbm="8KiB", uvm="6KiB", ssd="1GiB", engine="memory", uvm_kind="managed"),
    "lookahead": TierConfig(hbm="8KiB", ssd="1GiB", engine="memory", policy="lookahead"),
    "encoded": TierConfig(hbm="8KiB", ssd="1GiB", engine="memory", ssd_dtype="int8"),
    "encoded uvm": TierConfig(
        hbm="8KiB", uvm="6KiB", ssd="1GiB", engine="memory", ssd_dtype="fp16", uvm_dtype="fp16",
        state_dtype="bf16",
    ),
    "overflow": TierConfig(hbm="3KiB", uvm="4KiB", ssd="1GiB", engine="memory"),
    "hbm alone": TierConfig(hbm="64KiB"),
    "cut rows": TierConfig(hbm="24KiB", uvm="18KiB", ssd="1GiB", engine="memory"),
    "cut rows, encoded": TierConfig(hbm="24KiB", ssd="1GiB", engine="memory", ssd_dtype="int8"),
}  # fmt: skip


def dim_of(config: str) -> int:
    """The columns of rows in one of ``CONFIGS``."""
    return DIM_OF_CUT_ROWS if config.startswith("cut") else DIM


ON_HOST: dict[tuple[str, bool], tuple[list[torch.Tensor], list[int]]] = {}


@pytest.mark.parametrize(
    ("config", "prefetch", "order"), thinned(itertools.product(CONFIGS, [False, True], ORDERS), 5)
)
def test_training_is_that_of_the_host(config: str, prefetch: bool, order: str) -> None:
    dim = dim_of(config)
    if (config, prefetch) not in ON_HOST:
        ON_HOST[config, prefetch] = trained(prefetch, replace(CONFIGS[config], uvm_kind="pinned"), dim)
    with fake_torch(order, seed=7):
        outputs, counts = trained(prefetch, replace(CONFIGS[config], device="cuda:0"), dim)
        launches = fake_gpu().counts["launches"]
    expected, expected_counts = ON_HOST[config, prefetch]
    assert launches > 50
    # When rows leave overflow slots for uvm depends on when a batch ahead is released, on the host, too.
    if not (prefetch and config == "overflow"):
        assert counts == expected_counts
    assert len(counts) >= 18
    assert any(counts)
    for ours, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(ours.numpy().view(np.uint32), theirs.numpy().view(np.uint32))


def test_a_training_thread_does_not_wait_for_the_gpu() -> None:
    """Neither in our code nor by ``item()`` and its like."""
    with (
        fake_torch("lazy"),
        TieredEmbeddingBag(
            400, DIM, device="cuda", config=CONFIGS["uvm and ssd"], optimizer=optim.Adam(lr=0.1)
        ) as table,
    ):
        batches = [torch.randint(400, (8, 3), generator=torch.Generator().manual_seed(n)) for n in range(16)]
        for step, ids in enumerate(tierstore.prefetch(batches, table, depth=2, window=3)):
            before = fake_gpu().waits
            with (
                mock.patch.object(GpuTensor, "cpu", side_effect=AssertionError),
                mock.patch.object(GpuTensor, "tolist", side_effect=AssertionError),
                mock.patch.object(GpuTensor, "item", side_effect=AssertionError),
            ):
                table(ids).square().sum().backward()
            assert step < 8 or fake_gpu().waits == before  # at first, memory for index arrays is made
