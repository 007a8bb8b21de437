"""Sharded tables of float16 and bfloat16 against the single process: the same bits in every plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.sharding import cases
from tests.sharding.ranks import run
from tierstore import TierConfig, optim
from tierstore.errors import ConfigError, StoreMismatchError
from tierstore.modules.configs import DataType
from tierstore.sharding import (
    ShardingEnv,
    column_wise,
    construct_plan,
    data_parallel,
    row_wise,
    shard,
    sharded_state_dict,
    table_wise,
)
from tierstore.sharding.planning import tiers_of_rank

KINDS = [DataType.BF16, DataType.FP16, DataType.FP32, DataType.BF16]
CUTS: dict[str, dict[str, Any]] = {
    "table_wise": {"t0": table_wise(1), "t1": table_wise(0), "t2": table_wise(1), "t3": table_wise(0)},
    "row_wise": dict.fromkeys(["t0", "t1", "t2", "t3"], row_wise()),
    "column_wise": {
        "t0": column_wise([1, 0], [5, 1]),
        "t1": column_wise([0, 1, 0]),
        "t2": column_wise([1, 0]),
        "t3": column_wise([0]),
    },
    "mixed": {"t0": data_parallel(), "t1": column_wise([0, 1]), "t2": row_wise(), "t3": data_parallel()},
}


def tables() -> list[Any]:
    return [replace(one, data_type=kind) for one, kind in zip(cases.tables(), KINDS, strict=True)]


def every_cut() -> None:
    env = ShardingEnv.from_process_group()
    single, several = cases.batches(2, 3, longest=1), cases.batches(2, 3, empty=1)
    for name, cuts in CUTS.items():
        spec = optim.Adam(lr=0.05) if name in ("column_wise", "mixed") else optim.RowWiseAdagrad(lr=0.1)
        for rounding in (None, True):
            tiers = replace(cases.TIGHT, stochastic_rounding=rounding)
            cases.check(env, cuts, tables(), single, spec, tiers=tiers)
        if name in ("table_wise", "column_wise"):
            cases.check(env, cuts, tables(), several, optim.SGD(lr=0.1), weighted=True)


def test_every_cut_is_the_single_process() -> None:
    run(2, every_cut)


def made(env: ShardingEnv, configs: list[Any], name: str, path: str | None = None) -> Any:
    whole = tierstore.EmbeddingBagCollection(
        configs, config=cases.MEMORY, optimizer=optim.Adam(lr=0.1), seed=3
    )
    plan = construct_plan(whole, CUTS[name], env.world_size)
    tiers = TierConfig(hbm="24KiB", ssd="64MiB", path=path) if path else cases.MEMORY
    return shard(whole, plan, env, config=tiers)


def files(path: str) -> None:
    """State dicts, sharded state dicts and commits that another plan takes over."""
    env = ShardingEnv.from_process_group()
    parts = made(env, tables(), "column_wise", path)
    for batch in cases.batches(2, 3):
        parts(batch.of([env.rank])).values().square().sum().backward()
    weights = parts.state_dict()
    kinds = [torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
    assert [value.dtype for value in weights.values()] == kinds
    views = sharded_state_dict(parts)
    assert [value.dtype for value in views.values()] == kinds
    for view, kind in zip(views.values(), kinds, strict=True):
        assert {piece.tensor.dtype for piece in view.local_shards()} <= {kind}
    parts.load_state_dict(views)
    torch.testing.assert_close(parts.state_dict(), weights, rtol=0, atol=0)
    ids = torch.arange(50)
    assert parts.rows(ids, "t0").dtype is torch.bfloat16
    parts.commit()
    parts.close()
    again = made(env, tables(), "row_wise", path)
    torch.testing.assert_close(again.state_dict(), weights, rtol=0, atol=0)
    again.commit()
    again.close()
    for kind, name in ((DataType.FP16, "mixed"), (DataType.FP16, "row_wise"), (DataType.FP32, "row_wise")):
        with pytest.raises((ConfigError, StoreMismatchError), match=r"'bf16' there|committed with bf16"):
            made(env, [replace(one, data_type=kind) for one in tables()], name, path)


def test_files_have_the_dtypes(tmp_path: Path) -> None:
    run(2, files, str(tmp_path))


@pytest.mark.parametrize("chosen", [True, False])
def test_a_plan_says_how_a_table_is_rounded(chosen: bool) -> None:
    configs = tables()
    plan = construct_plan(configs, dict.fromkeys(["t0", "t1", "t2", "t3"], table_wise(0)), 1)
    placed = tuple(
        replace(one, stochastic_rounding=chosen if one.name == "t1" else None) for one in plan.tables
    )
    plan = type(plan).from_dict(replace(plan, tables=placed).to_dict())
    assert [one.stochastic_rounding for one in plan.tables] == [None, chosen, None, None]
    own = [tierstore.modules.features.table_of(config) for config in configs]
    fields = tiers_of_rank(plan.tables, 0, own, cases.MEMORY, optim.SGD())
    config = replace(cases.MEMORY, **fields)
    assert [config.rounds_stochastically(one.name, one.dtype) for one in own] == [False, chosen, True, False]
