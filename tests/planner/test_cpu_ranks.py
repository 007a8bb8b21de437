"""Ranks on CPUs: exchanges are waited for, and threads take turns where processors are few."""

from __future__ import annotations

import numpy as np
import pytest

from tierstore.errors import ConfigError
from tierstore.placement import ShardingType
from tierstore.planner import EmbeddingShardingPlanner, ParameterConstraints, TableSpec, Topology, Workload
from tierstore.planner.bound import optimum
from tierstore.planner.cuts import cuts_of
from tierstore.planner.planner import Solution

TABLES = [TableSpec(f"t{i}", 20_000, 64, pooling_factor=4.0) for i in range(4)]
ROW_WISE = {table.name: ParameterConstraints(["row_wise"]) for table in TABLES}


def machine(processors: float) -> Topology:
    return Topology(1, 2, "1GiB", "1GiB", device="cpu", processors_per_rank=processors, intra_host_bw=1e9)


def solved(processors: float, constraints: dict[str, ParameterConstraints] | None = None) -> Solution:
    planner = EmbeddingShardingPlanner(machine(processors), constraints, batch_size=1024, search_seconds=5)
    return planner.solve(TABLES)


def test_even_tables_are_not_cut_where_that_only_makes_the_exchange_longer():
    solution, cut = solved(1.0), solved(1.0, ROW_WISE)
    assert {item.cut.kind for item in solution.placed} == {ShardingType.TABLE_WISE}
    assert solution.prediction.step < cut.prediction.step


@pytest.mark.parametrize(("processors", "share"), [(0.5, 1.0), (1.0, 1.0), (1.5, 1 / 3), (8.0, 0.0)])
def test_threads_take_turns(processors: float, share: float):
    prediction = solved(processors, ROW_WISE).prediction
    compute, index, intra, _, link, fetch = prediction.ranks.T
    assert np.allclose(fetch, index + link + share * compute)
    assert (compute > intra).all()  # which is part of it


@pytest.mark.parametrize("processors", [1.0, 1.5])
def test_plans_are_optimal(processors: float):
    work = Workload(1024)
    cuts = [cuts_of(table, machine(processors), work, ParameterConstraints()) for table in TABLES]
    best = optimum(machine(processors), work, cuts, [np.arange(2)] * len(TABLES))
    assert solved(processors).prediction.step == pytest.approx(best.seconds, rel=2e-3)


@pytest.mark.parametrize("processors", [0, -1.0, float("nan"), "two", True])
def test_wrong_processors_are_refused(processors):
    with pytest.raises(ConfigError, match="processors_per_rank"):
        machine(processors)
