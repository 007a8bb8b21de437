"""torchrec's plan in our words, and both plans trained with (bench/research/trained.py)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import _ranks, _rounds
from bench.research import main, trained
from bench.research.trained import CASES, OURS, THEIR_CUTS, job_of, plans_of
from bench.research.training import Case, dense_seconds
from tests.sharding.ranks import run
from tierstore.errors import ConfigError
from tierstore.placement import ShardingPlan

TABLES = [(20_000, 64, 1.0), (9_000, 32, 0.9), (300, 32, 0.8)]
ONES = (1, 1, 1)
"""Bags of one id are in one shard, so that no cut changes the order of sums."""
IN_MEMORY = Case(TABLES, ONES, (1.8, 0.0, False), 8)
TIGHT = Case(TABLES, ONES, (0.3, 1.1, False), 8)
ON_SSD = Case([(1_000_000, 64, 1.0), *TABLES[1:]], ONES, (0.3, 0.1, True), 8)


def bench(arguments: str) -> int:
    return main(None, trained.add_arguments, trained.run, arguments.split())


def covers(plan: ShardingPlan, case: Case) -> bool:
    plan.check(case.configs, 2, "cpu")
    return all(
        sum(shard.rows * shard.columns for shard in table.shards)
        == table.num_embeddings * table.embedding_dim
        * (len(table.shards) if table.sharding_type.value == "data_parallel" else 1)
        for table in plan.tables
    )  # fmt: skip


@pytest.mark.parametrize("case", [IN_MEMORY, TIGHT, ON_SSD], ids=["in memory", "tight", "on ssd"])
def test_torchrecs_cuts_are_converted_whole(case: Case) -> None:
    plans = plans_of(case, {}, 0.2, 0.0)
    assert plans.keys() == {OURS, THEIR_CUTS}
    theirs = ShardingPlan.from_dict(plans[THEIR_CUTS]["plan"])
    assert covers(theirs, case)
    assert covers(ShardingPlan.from_dict(plans[OURS]["plan"]), case)
    cached = [shard for table in theirs.tables for shard in table.shards if shard.hbm_rows < shard.rows]
    assert bool(cached) == (case is not IN_MEMORY)
    assert plans[THEIR_CUTS]["notes"] == (["torchrec has no plan"] if case is ON_SSD else [])


def train_alike(case: Case, plans: list[dict[str, Any]]) -> None:
    found: list[dict[str, Any]] = []
    for plan in plans:
        with job_of(case, plan["plan"]) as job:
            for _ in range(4):
                loss = (job.model(next(job.batches)) + 1).square().mean()
                loss.backward()
            state = {name: value.clone() for name, value in job.model.state_dict().items() if "bags" in name}
            found.append({**state, "loss": loss.detach()})
            dist.barrier()
    first, *others = found
    assert any(value.any() for name, value in first.items() if name.endswith("weight"))
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("case", [IN_MEMORY, TIGHT], ids=["in memory", "tight"])
def test_both_plans_train_the_same_bits(case: Case) -> None:
    plans = plans_of(case, {}, 0.2, 0.0)
    run(2, train_alike, case, list(plans.values()))


def test_rounds_are_measured_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(ranks: int, work: Any, *arguments: Any) -> Any:
        assert ranks == 2
        if work is dense_seconds:
            return 1e-3
        return {"step": 0.01, "cpu": 0.02, "others": 0.0, "misses": 9, "reads": 0}

    monkeypatch.setattr(trained, "on_ranks", measured)
    monkeypatch.setattr(trained, "CASES", {"small": IN_MEMORY, "no": CASES["one giant"]})
    out = tmp_path / "out.json"
    for rounds in (1, 2):
        assert bench(f"--cases 0 --search-seconds 0.2 --json {out}") == 0
        result = json.loads(out.read_text())
        assert len(result["records"]) == 2 * rounds
        assert result["cases"]["small"][THEIR_CUTS]["ratio"] == 1.0
        assert result["cases"]["small"][THEIR_CUTS]["rounds"] == rounds
    assert "ours over it" in capsys.readouterr().out


def test_plans_are_trained_with_and_later_commands_add_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = {name: case for name, case in CASES.items() if case.ranks == 1}
    small = {"tables": [(6000, 32, 1.0), (4000, 64, 0.8)], "bags": (8, 8), "batch_size": 12}
    monkeypatch.setattr(trained, "CASES", {name: replace(case, **small) for name, case in alone.items()})
    monkeypatch.setattr(trained, "on_ranks", lambda _, work, *arguments: work(*arguments))
    out, rates = tmp_path / "out.json", tmp_path / "topology.json"
    rates.write_text(
        json.dumps({"device": "cpu", "hbm_per_rank": 1, "hbm_bw": 5e9, "measured": {"step_s": 1e-4}})
    )
    common = f"--json {out} --search-seconds 0.5 --topology {rates}"
    few = "--steps 4 --warm 12"
    assert bench(f"{common} {few}") == 0
    figures = json.loads(out.read_text())
    assert figures["plans_trained"] == len(alone) == 10
    found = [ways[OURS] for ways in figures["cases"].values()]
    assert all(one["step"] > 0 for one in found)
    assert any(one["misses"] > 0 for one in found)
    # Four steps miss some tens of rows, and a search of half a second may end early on a busy machine.
    assert figures["miss_error.worst"] < 2
    text = capsys.readouterr().out
    assert all(name in text for name in alone)
    assert bench(f"{common} {few} --cases 2,4-5") == 0
    more = json.loads(out.read_text())
    names = [record["case"] for record in more["records"]]
    twice = {name for name in names if names.count(name) == 2}
    assert twice == {list(alone)[i] for i in (2, 4, 5)}
    assert bench(f"{common} --rounds 0") == 0
    assert json.loads(out.read_text())["cases"] == more["cases"]
    assert CASES["half"].machine(more["rates"]).hbm_bw == 5e9


@pytest.mark.parametrize("cases", ["10", "x", "-3"])
def test_unknown_cases_are_refused(cases: str) -> None:
    with pytest.raises(ConfigError, match="give numbers below 10"):
        _rounds.chosen(cases, 10, "--cases")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="no measurements"):
        bench(f"--json {tmp_path}/other.json")


def test_a_rank_is_another_process() -> None:
    assert _ranks.on_ranks(1, os.getpid) != os.getpid()
