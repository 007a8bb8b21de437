"""Sharded tables train and are saved alike whatever torch's default dtype and device are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.modules.test_defaults_of_torch import DEFAULTS, assert_same, defaults, on_cpu
from tests.sharding.ranks import run
from tierstore import EmbeddingBagConfig, KeyedJaggedTensor, TierConfig
from tierstore.optim import Adam
from tierstore.sharding import column_wise, construct_plan, row_wise, shard, table_wise

NAMES, DIMS, ROWS = ("a", "b", "c"), (8, 4, 8), 100


def life(path: Path, rank: int) -> list[object]:
    tables = [EmbeddingBagConfig(ROWS, d, n, feature_names=[n]) for d, n in zip(DIMS, NAMES, strict=True)]
    whole = tierstore.EmbeddingBagCollection(tables, True, device="meta", optimizer=Adam(lr=0.1))
    plan = construct_plan(whole, {"a": row_wise(), "b": table_wise(1), "c": column_wise([0, 1])}, 2)
    module: Any = shard(whole, plan, config=TierConfig(hbm="64KiB", ssd="64MiB", path=str(path)))
    seen: list[object] = []
    for step in range(3):
        ids = on_cpu([step, 2, 3, 40 + step, 5, 6 + rank])
        weights = ids.to(torch.float32).div(7).requires_grad_()
        batch = KeyedJaggedTensor(list(NAMES), ids, weights, torch.ones_like(ids))
        out = module(batch).values()
        seen.append(out.detach().clone())
        factors = torch.arange(1, out.numel() + 1, device="cpu", dtype=torch.float32)
        (out * factors.view(out.shape)).sum().backward()
        seen.append(weights.grad)
    ids = on_cpu([1, 2, 3])
    seen += [module.rows(ids, "a"), module.optimizer_rows(ids, "a")]
    tables_of, states = dict(module.state_dict()), module.fused_optimizer.state_dict()
    seen += [tables_of, states]
    module.load_state_dict(tables_of)
    module.fused_optimizer.load_state_dict(states)
    seen.append(module.rows(ids, "c"))
    module.close()
    return seen


def compare(folder: Path, dtype: torch.dtype, device: str | None) -> None:
    rank = dist.get_rank()
    wanted = life(folder / "wanted", rank)
    with defaults(dtype, device):
        found = life(folder / "found", rank)
    assert_same(found, wanted)


@pytest.mark.parametrize(("dtype", "device"), DEFAULTS, ids=lambda value: str(value))
def test_nothing_depends_on_them(dtype: torch.dtype, device: str | None, tmp_path: Path) -> None:
    run(2, compare, tmp_path, dtype, device)
