"""Ranks on CPUs: exchanges are waited for, and cost more than bytes; threads take turns on few processors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.research.bound import optimum
from tierstore.errors import ConfigError
from tierstore.placement import ShardingType
from tierstore.planner import EmbeddingShardingPlanner, ParameterConstraints, TableSpec, Topology
from tierstore.planner.costs import EXCHANGES
from tierstore.planner.solver import Solution

TABLES = [TableSpec(f"t{i}", 20_000, 64, pooling_factor=4.0) for i in range(4)]
EXCHANGE = {"step": 3e-3, "collective": 4e-4, "piece": 5e-5}
WAITS = EXCHANGES * EXCHANGE["collective"]
ROW_WISE = {table.name: ParameterConstraints(["row_wise"]) for table in TABLES}


def machine(processors: float) -> Topology:
    return Topology(
        *(1, 2, "1GiB", "1GiB"),
        device="cpu",
        processors_per_rank=processors,
        intra_host_bw=1e9,
        exchange_seconds=EXCHANGE,
    )


def solved(processors: float, constraints: dict[str, ParameterConstraints] | None = None) -> Solution:
    planner = EmbeddingShardingPlanner(machine(processors), constraints, batch_size=1024, search_seconds=5)
    return planner.solve(TABLES)


def test_even_tables_are_not_cut_where_that_only_makes_the_exchange_longer():
    solution, cut = solved(1.0), solved(1.0, ROW_WISE)
    assert {item.option.kind for item in solution.placed} == {ShardingType.TABLE_WISE}
    assert solution.prediction.step < cut.prediction.step


@pytest.mark.parametrize(("processors", "share"), [(0.5, 1.0), (1.0, 1.0), (1.5, 1 / 3), (8.0, 0.0)])
def test_threads_take_turns(processors: float, share: float):
    prediction = solved(processors, ROW_WISE).prediction
    compute, index, intra, _, link, fetch = prediction.ranks.T
    assert np.allclose(fetch, index + link + share * (compute - WAITS))
    assert (compute > intra).all()  # which is part of it


@pytest.mark.parametrize("processors", [1.0, 1.5])
def test_plans_are_optimal(processors: float):
    solution = solved(processors)
    best = optimum(solution.problem)
    assert solution.prediction.step == pytest.approx(best, rel=2e-3)


@pytest.mark.parametrize("processors", [0, -1.0, float("nan"), "two", True])
def test_wrong_processors_are_refused(processors):
    with pytest.raises(ConfigError, match="processors_per_rank"):
        machine(processors)


def test_exchanges_cost_per_collection_and_per_piece():
    def compute(costs: dict[str, float], tables: list[TableSpec]) -> np.ndarray:
        machines = replace(machine(2.0), exchange_seconds=costs)
        planner = EmbeddingShardingPlanner(machines, ROW_WISE, batch_size=1024, search_seconds=1)
        return planner.solve(tables).prediction.ranks[:, 0]

    free = dict.fromkeys(EXCHANGE, 0.0)
    two = [*TABLES[:2], *(replace(table, module="other", feature_names=("a", "b")) for table in TABLES[2:])]
    step = EXCHANGE["step"] + WAITS
    # of every table and feature a rank asks two shards, and is asked by two ranks
    assert np.allclose(compute(EXCHANGE, TABLES) - compute(free, TABLES), step + 4 * 2 * EXCHANGE["piece"])
    assert np.allclose(compute(EXCHANGE, two) - compute(free, two), 2 * step + 6 * 2 * EXCHANGE["piece"])


def test_rows_of_a_policy_and_of_the_store_cost_the_fetching_thread():
    def solved(size: str, **seconds: float) -> Solution:
        machines = Topology(1, 1, size, "43MiB", "1GiB", device="cpu", row_seconds=seconds)
        return EmbeddingShardingPlanner(machines, batch_size=256, search_seconds=1).solve(TABLES[:1])

    def more(size: str, **seconds: float) -> float:
        return float((solved(size, **seconds).prediction.ranks - solved(size).prediction.ranks)[0, 5])

    assert more("1GiB", policy=1e-6, store=1e-6) == 0  # the device holds all rows
    small = solved("3MiB")
    unique = small.caches.field("unique")
    assert more("3MiB", policy=1e-6) == pytest.approx(1e-6 * unique.sum())
    reads = float((unique * small.missed[1]).sum())
    assert reads > 0
    assert more("3MiB", store=1e-6) == pytest.approx(1e-6 * reads)


def test_a_rank_alone_exchanges_nothing_and_what_is_not_measured_is_assumed():
    assert Topology(1, 1, "1GiB", "1GiB", device="cpu").exchange("step") == 0
    assert "exchange_seconds" not in Topology(1, 1, "1GiB", "1GiB", device="cpu").assumed
    two = Topology(1, 2, "1GiB", "1GiB", device="cpu")
    assert "exchange_seconds" in two.assumed
    assert two.exchange("collective") > 0
    assert "exchange_seconds" not in machine(1.0).assumed
    of_gpus = Topology(1, 2, "1GiB", "1GiB")
    assert of_gpus.exchange("step") == 0
    assert "exchange_seconds" in of_gpus.assumed
    assert "exchange_seconds" not in replace(of_gpus, exchange_seconds={"step": 1e-3}).assumed
    assert Topology(1, 2, "1GiB", "1GiB", exchange_seconds={"step": 1e-3}).exchange("piece") == 0
    with pytest.raises(ConfigError, match="exchange_seconds must map some of"):
        Topology(1, 2, "1GiB", "1GiB", exchange_seconds={"steps": 1e-3})
