"""What a plan says that each table misses is what it misses in training, also where tables share slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bench._runtime_costs import train_step
from bench.research import training
from bench.research.trained import job_of
from bench.research.training import Case, Data
from tierstore.planner import EmbeddingShardingPlanner, MissCurve, Workload
from tierstore.planner.allocate import Allocation
from tierstore.planner.options import ShardCost
from tierstore.planner.planner import plan_of
from tierstore.planner.sharing import shared_misses
from tierstore.planner.solver import Solution
from tierstore.planner.tables import prepared

TABLES = [(40_000, 32, 1.0), (16_000, 32, 0.8), (30_000, 32, 1.2), (12_000, 32, 0.5), (24_000, 64, 1.05)]
BAGS = (8, 4, 16, 2, 8)
BATCH, WARM, STEPS = 160, 70, 70
FEW = 20  # rows per step, of which a share means little
Counts = dict[str, tuple[float, float]]


def solved(case: Case) -> Solution:
    work = Workload(BATCH, 2e-3, depth=training.DEPTH, window=training.WINDOW, read_ahead=training.READ_AHEAD)
    planner = EmbeddingShardingPlanner(case.machine({}), workload=work, search_seconds=0.5)
    solution = planner.solve(prepared(case.specs(), {}, Data(case).stats(), 1))
    assert not solution.caches.missing
    return solution


def trained(case: Case, solution: Solution) -> Counts:
    """Rows per step that each table has missed in hbm, and read from the store."""
    with job_of(case, plan_of(solution).to_dict()) as job:
        optimizer = torch.optim.SGD(job.model.parameters(), lr=0.01)

        def counted() -> dict[str, np.ndarray]:
            tables = job.model.bags.engine.stats()["tables"]
            every = {name: table["tiers"] for name, table in tables.items()}
            return {
                name: np.array([tiers["hbm"]["row_misses"], tiers.get("ssd", {"row_hits": 0})["row_hits"]])
                for name, tiers in every.items()
            }

        for _ in range(WARM):
            train_step(job.model, optimizer, next(job.batches))
        before = counted()
        for _ in range(STEPS):
            train_step(job.model, optimizer, next(job.batches))
        return {name: tuple((after - before[name]) / STEPS) for name, after in counted().items()}


def worst(
    solution: Solution, live: Counts, rows_of: Callable[[Solution], tuple[np.ndarray, ...]], kind: int
) -> float:
    """The largest error of a table."""
    rows = solution.caches.field("unique") * rows_of(solution)[kind]
    names = [solution.problem.tables[item.table].name for item in solution.placed]
    pairs = [(n, live[name][kind]) for name, n in zip(names, rows.tolist(), strict=True)]
    assert all(abs(a - b) < FEW for a, b in pairs if min(a, b) < FEW)
    return max((abs(a / b - 1) for a, b in pairs if b >= FEW), default=0.0)


def alone(solution: Solution) -> tuple[np.ndarray, ...]:
    caches = solution.caches
    return caches.misses(caches.hbm_rows), caches.misses(caches.memory_rows)


@pytest.mark.parametrize(
    "budget", [(0.25, 1.1, False), (0.3, 0.02, True), (0.15, 0.12, True)], ids=["uvm", "ssd", "uvm and ssd"]
)
def test_each_table_misses_what_was_predicted(budget: training.Budget) -> None:
    case = Case(TABLES, BAGS, budget, BATCH, 1, "rowwise_adagrad")
    solution = solved(case)
    live = trained(case, solution)
    assert worst(solution, live, lambda one: one.missed, 0) < 0.12
    assert worst(solution, live, lambda one: one.missed, 1) < 0.15
    if budget[1] > 0.1 and budget[2]:
        assert worst(solution, live, alone, 1) > 0.2, "slots are shared, so this says less"


def allocation(tables: list[tuple[MissCurve, float, float, float]]) -> Allocation:
    costs = [
        ShardCost(int(curve.rows[-1]), np.zeros(4), curve, 0, 0, 0, slot_bytes=64, unique=unique)
        for curve, unique, _, _ in tables
    ]
    hbm, memory = (np.array([table[i] for table in tables]) for i in (2, 3))
    return Allocation(costs, np.zeros(len(costs), np.int64), hbm, memory, np.zeros(len(costs), bool))


STRAIGHT = MissCurve.through([0], [1], 1000)


def test_equal_tables_share_equally_whatever_the_plan_gives_them() -> None:
    caches = allocation([(STRAIGHT, 100.0, 700.0, 800.0), (STRAIGHT, 100.0, 100.0, 800.0)])
    together = shared_misses(caches, np.array([0, 0]))
    np.testing.assert_allclose(together[0], [0.6, 0.6])
    assert together[1][0] == pytest.approx(together[1][1])
    apart = shared_misses(caches, np.array([0, 1]))
    np.testing.assert_allclose(apart[0], [0.3, 0.9])


@pytest.mark.parametrize("more", [0.0, 1.0, 400.0, 799.0, 800.0])
def test_rows_of_one_rate_in_host_memory(more: float) -> None:
    """1,000 rows used alike: as many are found as there are places, wherever they are."""
    (hbm,), (both,) = shared_misses(allocation([(STRAIGHT, 100.0, 200.0, 200.0 + more)]), np.array([0]))
    assert hbm == pytest.approx(0.8)
    assert both == pytest.approx((800 - more) / 1000, abs=1e-9)


def test_replicas_miss_nothing() -> None:
    replica: Any = STRAIGHT, 0.0, 1000.0, 1000.0
    hbm, both = shared_misses(allocation([replica, (STRAIGHT, 10.0, 500.0, 500.0)]), np.array([0, 1]))
    assert hbm[0] == both[0] == 0
    assert hbm[1] == both[1] == pytest.approx(0.5)
