"""torchrec's plan in our words, and both plans trained with (bench/research/trained_pairs.py)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.research import trained_pairs
from bench.research.trained_pairs import (
    OURS,
    PAIRS,
    THEIR_CUTS,
    THEIRS,
    TORCHREC,
    Pair,
    dense_seconds_of,
    job_by_tierstore,
    plans_of,
)
from bench.research.training import Budget, Data
from tests.sharding.ranks import run
from tierstore.placement import ShardingPlan

TABLES = [(20_000, 64, 1.0), (9_000, 32, 0.9), (300, 32, 0.8)]
ONES = (1, 1, 1)
"""Bags of one id are in one shard, so that no cut changes the order of sums."""
IN_MEMORY = Pair(TABLES, ONES, Budget(1.5, 0.0, False), 8)
TIGHT = Pair(TABLES, ONES, Budget(0.3, 1.1, False), 8)
ON_SSD = Pair([(1_000_000, 64, 1.0), *TABLES[1:]], ONES, Budget(0.3, 0.1, True), 8)


def covers(plan: ShardingPlan, pair: Pair) -> bool:
    plan.check(pair.data().configs, 2, "cpu")
    return all(
        sum(shard.rows * shard.columns for shard in table.shards)
        == table.num_embeddings * table.embedding_dim
        * (len(table.shards) if table.sharding_type.value == "data_parallel" else 1)
        for table in plan.tables
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pair", "ways"),
    [
        (IN_MEMORY, {OURS, THEIRS, TORCHREC}),
        (TIGHT, {OURS, THEIRS, THEIR_CUTS}),
        (ON_SSD, {OURS, THEIR_CUTS}),
    ],
    ids=["in memory", "tight", "on ssd"],
)
def test_torchrecs_plan_is_converted_whole(pair: Pair, ways: set[str]) -> None:
    plans = plans_of(pair, {}, 0.2)
    assert plans.keys() == ways
    for way in ways - {TORCHREC}:
        assert covers(ShardingPlan.from_dict(plans[way]["plan"]), pair)
    if TORCHREC in ways:
        assert plans[TORCHREC]["placed"].keys() == {"t0", "t1", "t2"}
    if pair is TIGHT:
        theirs = ShardingPlan.from_dict(plans[THEIRS]["plan"])
        cached = [shard for table in theirs.tables for shard in table.shards if shard.uvm_rows]
        assert cached, "some table is cached"
        assert all(shard.hbm_rows + shard.uvm_rows == shard.rows for shard in cached)
    if pair is ON_SSD:
        assert plans[THEIR_CUTS]["notes"] == ["torchrec has no plan"]


def train_alike(data: Data, plans: list[ShardingPlan]) -> None:
    found: list[dict[str, Any]] = []
    for plan in plans:
        job = job_by_tierstore(data, plan)
        for _ in range(4):
            loss = (job.model(next(job.batches)) + 1).square().mean()
            loss.backward()
        state = {name: value.clone() for name, value in job.model.state_dict().items() if "bags" in name}
        found.append({**state, "loss": loss.detach()})
        dist.barrier()
        job.close()
    first, *others = found
    assert any(value.any() for name, value in first.items() if name.endswith("weight"))
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("pair", [IN_MEMORY, TIGHT], ids=["in memory", "tight"])
def test_both_plans_train_the_same_bits(pair: Pair) -> None:
    plans = plans_of(pair, {}, 0.2)
    run(
        2,
        train_alike,
        pair.data(),
        [ShardingPlan.from_dict(p["plan"]) for p in plans.values() if "plan" in p],
    )


def test_rounds_are_measured_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(ranks: int, work: Any, *arguments: Any) -> Any:
        assert ranks == 2
        if work is dense_seconds_of:
            return 1e-3
        return {"step": 0.01, "cpu": 0.02, "others": 0.0, "bytes_sent": 10, "loopback": 12.0}

    monkeypatch.setattr(trained_pairs, "on_ranks", measured)
    monkeypatch.setattr(trained_pairs, "PAIRS", {"small": IN_MEMORY, "no": PAIRS["one giant"]})
    parser = argparse.ArgumentParser()
    trained_pairs.add_arguments(parser)
    out = tmp_path / "out.json"
    arguments = ["--pairs", "0", "--search-seconds", "0.2", "--json", str(out)]
    for rounds in (1, 2):
        assert trained_pairs.run(parser.parse_args(arguments)) == 0
        result = json.loads(out.read_text())
        assert len(result["records"]) == 3 * rounds
        assert result["pairs"]["small"][THEIRS]["ratio"] == 1.0
        assert result["pairs"]["small"][THEIRS]["rounds"] == rounds
    assert "ours over it" in capsys.readouterr().out
