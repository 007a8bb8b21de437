"""Small tables and topologies for the planner's tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierstore.planner import Popularity, TableSpec, Topology


def topology(hosts: int = 1, ranks_per_host: int = 2, **changes: Any) -> Topology:
    values: dict[str, Any] = {"hbm_per_rank": "1GiB", "host_memory_per_host": "8GiB", "ssd_per_host": "1TB"}
    return Topology(hosts, ranks_per_host, **{**values, **changes})


def table(name: str = "t", rows: int = 1_000_000, dim: int = 64, **changes: Any) -> TableSpec:
    return TableSpec(name, rows, dim, **changes)


def random_tables(count: int, seed: int, smallest: float = 3, largest: float = 7) -> list[TableSpec]:
    random = np.random.default_rng(seed)
    return [
        TableSpec(
            f"t{i}",
            int(10 ** random.uniform(smallest, largest)),
            int(random.choice([16, 64, 128])),
            pooling_factor=float(10 ** random.uniform(0, 1.5)),
            popularity=Popularity(random.uniform(0.7, 1.2), random.uniform(0, 100)),
            optimizer=str(random.choice(["sgd", "rowwise_adagrad", "adam"])),
        )
        for i in range(count)
    ]
