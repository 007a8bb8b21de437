"""The example's event-by-event simulation of a planned cluster agrees with the plan's prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.research.cluster import Simulation
from tests.planner.machines import random_tables, topology
from tierstore.cli.plan import read_yaml
from tierstore.planner import EmbeddingShardingPlanner, Topology, Workload
from tierstore.planner.files import specs_of_yaml

EXAMPLE = Path(__file__).parents[2] / "examples/plan_100tb"


@pytest.mark.parametrize("seed", range(3))
def test_with_batches_enough_in_flight_the_longest_stage_sets_the_step(seed):
    machines = topology(2, 2, hbm_per_rank="300MiB", ssd_read_iops=1e5 * 4**seed)
    planner = EmbeddingShardingPlanner(machines, workload=Workload(512, depth=4), search_seconds=0.2)
    solution = planner.solve(random_tables(8, seed, 5, 7.5))
    assert not solution.caches.missing
    simulated = Simulation(solution, 4, 0.02).run(40)
    assert simulated == pytest.approx(solution.as_divided().step, rel=0.1)
    serial = Simulation(solution, 0, 0.0).run(10)
    assert serial > solution.as_divided().step


def test_the_example_is_100_terabytes_and_fits():
    tables = specs_of_yaml(read_yaml(EXAMPLE / "tables.yaml"))
    assert sum(t.num_embeddings * t.row_bytes() for t in tables) == pytest.approx(100e12)
    machines = Topology.from_dict(read_yaml(EXAMPLE / "topology_8.yaml"))
    planner = EmbeddingShardingPlanner(machines, workload=Workload(512, depth=4), search_seconds=0.5)
    solution = planner.solve(tables)
    assert not solution.caches.missing
    simulated = Simulation(solution, 4, 0.05).run(30)
    assert simulated == pytest.approx(solution.as_divided().step, rel=0.15)
