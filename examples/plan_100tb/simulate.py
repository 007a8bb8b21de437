"""Plans the 100 TB model, then simulates the cluster's steps event by event and compares.

    python examples/plan_100tb/simulate.py topology_8.yaml      (or topology_128.yaml)

The simulation is that of ``bench/research/cluster.py``, which says what it knows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tierstore.cli.plan import read_yaml
from tierstore.planner import EmbeddingShardingPlanner, Topology, Workload
from tierstore.planner.files import specs_of_yaml
from tierstore_bench.research.cluster import Simulation

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("topology", help="a file beside this one, or any path")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=4, help="batches fetched ahead (default: 4)")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--jitter", type=float, default=0.05)
    args = parser.parse_args()
    path = HERE / args.topology if (HERE / args.topology).exists() else Path(args.topology)
    topology = Topology.from_dict(read_yaml(path))
    planner = EmbeddingShardingPlanner(topology, workload=Workload(args.batch_size, depth=args.depth))
    solution = planner.solve(specs_of_yaml(read_yaml(HERE / "tables.yaml")))
    assert not solution.caches.missing, solution.caches.missing
    predicted = solution.as_divided().step
    print(f"planned in {solution.seconds:.2f} s; set by {' of '.join(solution.prediction.slowest())}")
    for depth in sorted({0, 1, args.depth}):
        simulated = Simulation(solution, depth, args.jitter).run(args.batches)
        print(
            f"depth {depth}: predicted {predicted * 1e3:.2f} ms, simulated {simulated * 1e3:.2f} ms "
            f"({simulated / predicted - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
