"""``tierstore bench hit-rate --hbm``: hits and misses are those of a training, exactly."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import tierstore
from bench import hit_rate
from cache_policies import PolicyError
from tests.sharding.ranks import run as run_ranks
from tierstore import EmbeddingBagConfig, TableOverride, TierConfig, optim
from tierstore.cache.tiers.sizes import bytes_for
from tierstore.cli.main import main
from tierstore.errors import InputError, RankError, TierStoreError
from tierstore.placement import ShardingPlan
from tierstore.sharding import (
    ShardedEmbeddingBagCollection,
    ShardingEnv,
    ShardingOptions,
    column_wise,
    construct_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tierstore.simulation import Stats, Training, batches_of, share_of, simulate_tiers, table_rows
from tierstore.trace import Trace, open_trace

ROWS = 4000
COUNTERS = (
    *("lookups", "initialised_rows", "evicted_rows", "written_rows"),
    *("overflow_rows", "refused_rows", "shrunk_plans"),
)


def source(batches: int = 120, tables: int = 3, batch_size: int = 64) -> Trace:
    return open_trace("synthetic:zipf:1.05", batch_size=batch_size, batches=batches, tables=tables, rows=ROWS)


def configs(dims: tuple[int, ...], rows: int = ROWS) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(rows, dim, f"t{t}", feature_names=[f"t{t}"]) for t, dim in enumerate(dims)]


def trained(trace: Trace, training: Training) -> Stats:
    """``stats()`` of a training on the trace's examples."""
    module = tierstore.EmbeddingBagCollection(
        tables=training.configs, config=training.config, optimizer=training.optimizer
    )
    assert trace.training is not None
    for batch in tierstore.prefetch(trace.training(), module):
        module(batch.sparse).values().sum().backward()
    stats = module.stats()
    module.close(commit=False)
    return stats


def counted(stats: Stats) -> dict[str, Any]:
    """What must be equal: the counters of every table and tier, and what is known ahead."""
    return {
        "tables": {name: table["tiers"] for name, table in stats["tables"].items()},
        "tiers": stats["tiers"],
        "layouts": {
            name: {key: group[key] for key in ("slots", "depth", "window", "read_ahead_limit", *COUNTERS)}
            for name, group in stats["groups"].items()
        },
    }


def assert_equal(trace: Trace, training: Training) -> Stats:
    (simulated,) = simulate_tiers(trace, training, lambda *_: None)
    live = trained(trace, training)
    assert counted(simulated) == counted(live)
    return simulated


@pytest.mark.parametrize(
    ("policy", "known"),
    [("lookahead", {}), ("lookahead", {"depth": 2, "window": 5}), ("arc", {"depth": 0, "window": 0})],
)
@pytest.mark.parametrize("uvm", ["0", "64KiB"])
@pytest.mark.parametrize("dims", [(8, 8, 8), (8, 16, 8)], ids=["one layout", "two layouts"])
def test_hits_are_those_of_a_training(policy, uvm, dims, known):
    config = TierConfig(hbm="64KiB", uvm=uvm, policy=policy, engine="memory", **known)
    stats = assert_equal(source(), Training(configs(dims), config, optim.RowWiseAdagrad(lr=0.01)))
    rates = [tier["hit_rate"]["per_unique"] for tier in stats["tiers"].values()]
    assert len(rates) == 2 + (uvm != "0")
    assert all(0.02 < rate < 0.98 for rate in rates)
    assert len(stats["groups"]) == len(set(dims))


@pytest.mark.parametrize("uvm", ["0", "64KiB"])
@pytest.mark.parametrize("admission", ["counter(2)", "bloom(500)"])
def test_refused_rows(uvm, admission):
    config = TierConfig(hbm="64KiB", uvm=uvm, admission=admission, engine="memory", depth=0, window=3)
    stats = assert_equal(source(), Training(configs((8, 8, 8)), config, optim.SGD(lr=0.01)))
    assert stats["refused_rows"] > 1000


def test_lanes(monkeypatch):
    monkeypatch.setattr("cache_policies.lanes.LEAST_SLOTS", 16)
    config = TierConfig(hbm="64KiB", uvm="64KiB", engine="memory")
    assert_equal(source(), Training(configs((8, 8, 8)), config, optim.SGD(lr=0.01)))


@pytest.mark.parametrize(
    "fields",
    [
        {"hbm": "all"},
        {"hbm": "2MiB", "ssd": 0},
        {"hbm": "64KiB", "uvm": "2MiB", "ssd": 0},
        {"hbm": "64KiB", "read_ahead": 0},
        {"hbm": "64KiB", "read_ahead": "20KiB"},
        {"hbm": "64KiB", "uvm": "64KiB", "ssd_dtype": "int8", "uvm_dtype": "int8", "state_dtype": "bf16"},
        {"hbm": "64KiB", "uvm": "64KiB", "ssd_dtype": "fp16"},
    ],
    ids=lambda fields: ",".join(f"{name}={value}" for name, value in fields.items()),
)
def test_other_tiers(fields):
    config = TierConfig(engine="memory", **fields)
    assert_equal(source(), Training(configs((8, 16, 8)), config, optim.Adam(lr=0.01)))


def test_bytes_of_tables_of_their_own():
    optimizer = optim.RowWiseAdagrad(lr=0.01)
    row = optimizer.row_bytes(8)
    own = {
        "t0": TableOverride(hbm=bytes_for(300, row, "lookahead")),
        "t1": TableOverride(hbm=bytes_for(ROWS, row, None)),
        "t2": TableOverride(uvm=bytes_for(500, row, "lookahead")),
    }
    config = TierConfig(hbm="1MiB", uvm="256KiB", tables=own, engine="memory")
    stats = assert_equal(source(tables=4), Training(configs((8, 8, 16, 16)), config, optimizer))
    assert stats["tables"]["t0"]["tiers"]["hbm"]["slots"] == 300
    assert stats["tables"]["t1"]["tiers"]["hbm"]["holds_all"]


def test_small_tables_that_stay():
    small = [replace(configs((8,), rows=50)[0], name="small", feature_names=["small"]), *configs((8, 8))[:1]]
    rng = np.random.default_rng(1)
    ids = {"small": rng.integers(0, 50, 6000), "t0": (ROWS * rng.random(6000) ** 3).astype(np.int64)}
    trace = open_trace_of(ids, 60)
    config = TierConfig(hbm="256KiB", engine="memory", depth=1, window=4)
    training = Training(small, config, optim.Adam(lr=0.01))
    (simulated,) = simulate_tiers(trace, training, lambda *_: None)
    assert simulated["tables"]["small"]["tiers"]["hbm"]["holds_all"]
    assert counted(simulated) == counted(trained_on_ids(trace, training))


def open_trace_of(ids: dict[str, np.ndarray], batch_size: int) -> Trace:
    def batches():
        for first in range(0, len(next(iter(ids.values()))), batch_size):
            yield [(t, column[first : first + batch_size]) for t, column in enumerate(ids.values())]

    return Trace("ids", tuple(ids), batches)


def trained_on_ids(trace: Trace, training: Training) -> Stats:
    return trained(replace(trace, training=lambda: (Sparse(batch) for batch in batches_of(trace))), training)


class Sparse:
    def __init__(self, sparse: Any) -> None:
        self.sparse = sparse


def test_budgets_divided_by_use():
    """A layout gives slots to another one while training, and the simulation does so, too."""
    config = TierConfig(hbm="128KiB", uvm="64KiB", engine="memory", depth=1, window=4)
    rows = (20_000, 1_000)
    rng = np.random.default_rng(2)
    ids = {
        "t0": (rows[0] * rng.random(6_000) ** 12).astype(np.int64),
        "t1": rng.integers(0, rows[1], 6_000),
    }
    trace, tables = open_trace_of(ids, 16), configs((32, 16))
    tables = [replace(table, num_embeddings=count) for table, count in zip(tables, rows, strict=True)]
    training = Training(tables, config, optim.SGD(lr=0.01))
    (simulated,) = simulate_tiers(trace, training, lambda *_: None)
    assert counted(simulated) == counted(trained_on_ids(trace, training))
    begun = [
        group["slots"]
        for stats in simulate_tiers(first_batches(trace, 10), training, lambda *_: None)
        for group in stats["groups"].values()
    ]
    assert begun != [group["slots"] for group in simulated["groups"].values()]


def first_batches(trace: Trace, count: int) -> Trace:
    return replace(trace, batches=lambda: islice(trace.batches(), count))


# -- ranks ----------------------------------------------------------------------------------------

RANK_CONFIG = TierConfig(hbm="48KiB", uvm="48KiB", engine="memory")
KINDS = [table_wise(1), row_wise(), column_wise(ranks=[0, 1]), data_parallel()]


def rank_trains(plan_file: Path, fields: dict[str, Any], folder: Path) -> None:
    """Train this rank's batches, and write its counters to ``folder``."""
    plan, env = ShardingPlan.load(plan_file), ShardingEnv.from_process_group()
    config = replace(RANK_CONFIG, **fields)
    tables = configs(tuple(table.embedding_dim for table in plan.tables))
    options = ShardingOptions(config=config, optimizer=optim.RowWiseAdagrad(lr=0.01))
    module = ShardedEmbeddingBagCollection(tables, plan, env, options=options)
    trace = source(tables=len(tables))
    assert trace.training is not None
    batches = [share_of(batch, env.rank, env.world_size) for batch in trace.training()]
    for batch in tierstore.prefetch(batches, module):
        module(batch.sparse).values().sum().backward()
    Path(folder, f"{env.rank}.json").write_text(json.dumps(counted(module.stats())))
    dist.barrier()
    module.close(commit=False)


def assert_ranks_equal(plan: ShardingPlan, folder: Path, **fields: Any) -> list[Stats]:
    plan.save(folder / "plan.json")
    run_ranks(plan.world_size, rank_trains, folder / "plan.json", fields, folder)
    live = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(plan.world_size)]
    tables = configs(tuple(table.embedding_dim for table in plan.tables))
    training = Training(tables, replace(RANK_CONFIG, **fields), optim.RowWiseAdagrad(lr=0.01), plan)
    simulated = simulate_tiers(source(tables=len(tables)), training, lambda *_: None)
    assert [json.loads(json.dumps(counted(stats))) for stats in simulated] == live
    return simulated


@pytest.mark.parametrize("known", [{}, {"depth": 1, "window": 4}], ids=["automatic", "stated"])
@pytest.mark.parametrize("uvm", ["0", "48KiB"])
def test_ranks_hit_what_ranks_of_a_training_hit(tmp_path, uvm, known):
    tables = configs((8, 8, 16, 8))
    plan = construct_plan(tables, {t.name: kind for t, kind in zip(tables, KINDS, strict=True)}, 2)
    stats = assert_ranks_equal(plan, tmp_path, uvm=uvm, **known)
    assert set(stats[0]["tables"]) == {"t1", "t2[0:8]", "t3"}
    assert set(stats[1]["tables"]) == {"t0", "t1", "t2[8:16]", "t3"}


def test_bytes_of_a_plan(tmp_path):
    """A planner's bytes become budgets of the ranks, with tables that keep slots of their own."""
    tables = configs((8, 8, 16))
    plan = construct_plan(tables, {t.name: table_wise(n % 2) for n, t in enumerate(tables)}, 2)
    row = {dim: optim.RowWiseAdagrad(lr=0.01).row_bytes(dim) for dim in (8, 16)}
    slots = {"t0": (300, 400, 0), "t1": (ROWS, 0, 1), "t2": (200, 300, 1)}
    placed = []
    for table in plan.tables:
        hbm, uvm, own = slots[table.name]
        (shard,) = table.shards
        each = row[table.embedding_dim]
        shard = replace(
            shard,
            hbm_bytes=bytes_for(hbm, each, "lookahead"),
            uvm_bytes=bytes_for(uvm, each, "lookahead"),
            ssd_bytes=1 << 20,
            hbm_rows=hbm,
            uvm_rows=uvm,
            own=own,
        )
        placed.append(replace(table, shards=(shard,)))
    stats = assert_ranks_equal(replace(plan, tables=tuple(placed)), tmp_path)
    assert stats[1]["tables"]["t1"]["tiers"]["hbm"]["holds_all"]
    assert stats[0]["tables"]["t2"]["tiers"]["hbm"]["slots"] in range(190, 210)


def test_a_rank_that_fails_ends_all_ranks():
    tables = configs((8, 8))
    plan = construct_plan(tables, {t.name: table_wise(n) for n, t in enumerate(tables)}, 2)
    ids = np.zeros(400, np.int64)
    ids[350] = ROWS
    trace = open_trace_of({"t0": ids, "t1": ids}, 50)
    with pytest.raises(InputError, match="id 4000 at position 0 is out of range") as raised:
        simulate_tiers(trace, Training(tables, RANK_CONFIG, optim.SGD(lr=0.1), plan), lambda *_: None)
    assert not isinstance(raised.value, RankError)


# -- the command ----------------------------------------------------------------------------------

SMALL = ["--batch-size", "64", "--tables", "3", "--rows", str(ROWS)]


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    hit_rate.add_arguments(parser)
    return hit_rate.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.mark.parametrize(
    "sizes", [("64KiB", "64KiB"), ("1/9", "12.5%")], ids=["bytes", "shares of the tables' bytes"]
)
def test_the_command_says_what_the_training_says(tmp_path, capsys, monkeypatch, sizes):
    monkeypatch.setattr("tierstore.data.synthetic.TEST_EXAMPLES", 64)
    tiers = ["--hbm", sizes[0], "--uvm", sizes[1], "--dim", "8"]
    data = ["--data", "synthetic:zipf:1.05", "--threads", "1", "--steps", "100"]
    assert main(["train", *data, *SMALL, *tiers, "--json", str(tmp_path / "t.json")]) == 0
    capsys.readouterr()
    own = ["--batches", 100, "--json", tmp_path / "s.json"]
    assert run("synthetic:zipf:1.05", *SMALL, *tiers, *own) == 0
    (training,) = json.loads((tmp_path / "s.json").read_text())["trainings"]
    (rank,) = training["ranks"]
    live = json.loads((tmp_path / "t.json").read_text())
    assert {name: tier["hit_rate"] for name, tier in rank["tiers"].items()} == live["hit_rate"]
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert f"{rank['tables']['t1']['hbm']['row_hits']:,}" in text
    shown = "hbm 64 KiB, uvm 64 KiB" if sizes[0] == "64KiB" else "hbm 62.5 KiB, uvm 70.31 KiB"
    assert f"{shown}, policy lookahead" in text


def test_several_policies_and_curves_beside(tmp_path, capsys):
    tiers = ["--hbm", "64KiB", "--dim", "8,16,8", "--policy", "lookahead,arc", "--depth", 1, "--window", 2]
    curves = ["--sizes", "10%", "--iops", "1e5", "--json", tmp_path / "s.json"]
    assert run("synthetic:zipf:1.05", *SMALL, "--batches", 20, *tiers, *curves) == 0
    document = json.loads((tmp_path / "s.json").read_text())
    assert [one["policy"] for one in document["trainings"]] == ["lookahead", "arc"]
    assert {one["policy"] for one in document["results"]} == {"lookahead", "arc"}
    assert list(document["trainings"][0]["ranks"][0]["layouts"]) == ["dim8", "dim16"]
    assert "policy arc, depth 1, window 2" in capsys.readouterr().out


def test_ranks_of_a_plan_by_the_command(tmp_path, capsys):
    tables = configs((8, 16, 8))
    each = (row_wise(), table_wise(0), row_wise())
    kinds = {t.name: kind for t, kind in zip(tables, each, strict=True)}
    construct_plan(tables, kinds, 2).save(tmp_path / "plan.json")
    own = ["--plan", tmp_path / "plan.json", "--hbm", "64KiB", "--json", tmp_path / "s.json"]
    assert run("synthetic:zipf:1.05", *SMALL, "--batches", 21, *own) == 0
    (training,) = json.loads((tmp_path / "s.json").read_text())["trainings"]
    assert [rank["lookups"] for rank in training["ranks"]] == [42, 21]  # row layouts of a rank × 21 steps
    assert "2 ranks with the plan's bytes" in capsys.readouterr().out


def test_rows_of_tables_that_a_trace_does_not_tell(tmp_path):
    np.savez(tmp_path / "a.npz", user=np.array([3, 9, 3]), item=np.array([0, 0, 0]))
    assert table_rows(open_trace(tmp_path / "a.npz")) == [10, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--uvm", "1MiB"], "--uvm is about the tiers of a training; give --hbm"),
        (["--dim", "8"], "--dim is about the tiers"),
        (["--hbm", "1/0"], "--hbm 1/0: cannot divide by 0"),
        (["--hbm", "5/4"], "--hbm 5/4: a fraction of the tables' bytes must be above 0 and at most 1"),
        (["--hbm", "1/37", "--uvm", "120%"], "--uvm 120%: a fraction"),
        (["--hbm", "nan"], "hbm is 'nan'; write bytes"),
        (["--hbm", "0"], "hbm is 0"),
        (["--hbm", "64KiB", "--uvm", "many"], "uvm is 'many'; write bytes"),
        (["--hbm", "all", "--uvm", "1MiB"], 'hbm="all" keeps every row'),
        (["--hbm", "1KiB"], "raise it to at least"),
        (["--hbm", "64KiB", "--policy", "mru"], "unknown policy 'mru'; known: lookahead"),
        (["--hbm", "64KiB", "--policy", "belady"], "needs the whole future"),
        (["--hbm", "64KiB", "--dim", "8,9"], "--dim has 2 numbers; synthetic:zipf:1.05 has 3 tables"),
        (["--hbm", "64KiB", "--dim", "0"], "--dim is a whole number"),
        (["--hbm", "64KiB", "--depth", "-1"], "--depth is a number of batches or auto"),
        (["--hbm", "64KiB", "--depth", "65"], "depth is 65"),
        (["--hbm", "64KiB", "--window", "x"], "--window is a number of batches or auto"),
        (["--hbm", "64KiB", "--optimizer", "newton"], "newton"),
        (["--hbm", "64KiB", "--ssd-dtype", "fp4"], "ssd_dtype is 'fp4'"),
        (["--hbm", "64KiB", "--admission", "never"], "unknown admission filter"),
        (["--plan", "gone.json"], "--plan gone.json: No such file"),
        (["--plan", __file__], "is not JSON"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((TierStoreError, PolicyError), match=message):
        run("synthetic:zipf:1.05", *SMALL, "--batches", 5, *options)


def test_plans_of_other_tables(tmp_path):
    tables = configs((8, 8))
    plan = construct_plan(tables, {t.name: row_wise() for t in tables}, 2)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(TierStoreError, match=r"--plan is for tables t0, t1, and .* has t0, t1, t2"):
        run("synthetic:zipf:1.05", *SMALL, "--batches", 5, "--plan", tmp_path / "plan.json")
    with pytest.raises(TierStoreError, match="--dim: the plan has"):
        run("synthetic:zipf:1.05", *SMALL, "--plan", tmp_path / "plan.json", "--dim", 8, "--batches", 5)


def test_samples_are_no_whole_trace(tmp_path):
    trace = ["--tables", "2", "--rows", "100000", "--batches", "4", "--rate", "0.1"]
    assert main(["trace", "record", "synthetic:zipf:1.0", *trace, "--out", str(tmp_path / "t.npz")]) == 0
    with pytest.raises(TierStoreError, match=r"has 10.* of the rows; tiers are simulated on all of them"):
        run(tmp_path / "t.npz", "--hbm", "1MiB")
