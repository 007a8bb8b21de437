"""``tierstore bench plan-step``: trains a model under plans of many budgets; predicted against measured.

Each budget is planned with a topology that ``tierstore bench device`` measured on other tables, and the rows
that each plan gives to every tier are trained with. Miss curves come from a recorded part of the data that
training does not see.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tierstore
from tierstore import EmbeddingBagConfig, KeyedJaggedTensor, TierConfig
from tierstore.cache.engine import set_num_threads
from tierstore.errors import ConfigError
from tierstore.optim import RowWiseAdagrad
from tierstore.planner import EmbeddingShardingPlanner, Topology, Workload
from tierstore.planner.costs import INDEX_BYTES_PER_ROW, POLICY_FIXED_BYTES, POLICY_FIXED_SLOTS, RANK_BUFFERS
from tierstore.planner.tables import prepared, spec_of_config

from . import device
from ._runtime_costs import Clock

SUMMARY = "predicted against measured steps of real training, under plans of many budgets"
_DEPTH, _WINDOW, _BAG = 2, 8, 8
_READY = (
    _DEPTH + _WINDOW + 2
)  # steps of a turn that may find their rows fetched while other plans had their turn

# Shares of the tables' bytes in (hbm, uvm), and whether there is an SSD below.
BUDGETS = {
    "all in hbm": (1.5, 0.0, False),
    "half": (0.5, 0.7, False),
    "quarter": (0.25, 1.0, False),
    "eighth": (0.125, 1.1, False),
    "0.65 + ssd": (0.65, 0.02, True),
    "0.5 + ssd": (0.5, 0.1, True),
    "0.25 + ssd": (0.25, 0.02, True),
    "0.125 + 0.5 + ssd": (0.125, 0.5, True),
    "0.125 + 0.2 + ssd": (0.125, 0.2, True),
    "0.125 + ssd": (0.125, 0.02, True),
}
# Rows, dimension and exponent of the popularity of each table.
TABLES = [(300_000, 32, 1.0), (120_000, 32, 0.8), (240_000, 64, 1.05), (100_000, 64, 0.7)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology", type=Path, help="JSON of tierstore bench device --json (default: measured first)"
    )
    parser.add_argument("--batch-size", type=int, default=1024, help="examples per step (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="turns that every plan gets (default: 5)")
    parser.add_argument("--steps", type=int, default=16, help="steps of a turn (default: 16)")
    parser.add_argument("--rest", type=float, default=0.6, help="seconds between turns (default: 0.6)")
    parser.add_argument("--warm", type=int, default=40, help="steps before the first turn (default: 40)")
    parser.add_argument("--budgets", type=int, default=len(BUDGETS), help="only so many of the plans")
    parser.add_argument("--json", type=Path, help="write the figures there")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    set_num_threads(1)
    runs = trained(args)
    print(
        f"{'plan':<20} {'predicted':>10} {'measured':>10} {'ratio':>6} {'compute':>13} {'fetch':>13} "
        f"{'ssd':>6}  {'misses':>8} {'ratio':>6}  set by"
    )
    for run in runs:
        print(
            f"{run.name:<20} {run.predicted * 1e3:>7.2f} ms {run.measured * 1e3:>7.2f} ms "
            f"{run.predicted / run.measured:>6.2f} "
            f"{run.predicted_compute * 1e3:>6.2f}/{run.compute * 1e3:>6.2f} "
            f"{run.predicted_fetch * 1e3:>6.2f}/{run.fetch * 1e3:>6.2f} {run.predicted_ssd * 1e3:>6.2f}  "
            f"{run.misses:>8,.0f} {run.miss_ratio:>6.3f}  {run.binding}"
        )
    print("compute and fetch: predicted/measured, ms; ssd: predicted, ms")
    figures = summary(runs)
    for key, value in figures.items():
        print(f"{key:<32} {value:>8.3f}")
    if args.json:
        args.json.write_text(json.dumps({**figures, "runs": [vars(run) for run in runs]}, indent=1))
    return 0


@dataclass
class Run:
    """One plan: seconds per step; seconds that the training thread computes (processor time), that the other
    one fetches (waits left out), and that the drives are predicted to take. ``misses``: rows per step that
    were not in hbm, ``reads``: of them read from the store."""

    name: str
    binding: str
    predicted: float
    measured: float
    misses: float
    predicted_misses: float
    reads: float
    predicted_reads: float
    compute: float
    fetch: float
    predicted_compute: float
    predicted_fetch: float
    predicted_ssd: float

    @property
    def miss_ratio(self) -> float:
        return self.predicted_misses / self.misses if self.misses else 1.0


def summary(runs: Sequence[Run]) -> dict[str, float]:
    from scipy.stats import kendalltau

    predicted, measured = [run.predicted for run in runs], [run.measured for run in runs]
    errors = np.abs(np.array(predicted) / measured - 1)
    wrong = [abs(run.miss_ratio - 1) for run in runs if run.misses > 10]
    wrong_reads = [abs(run.predicted_reads / run.reads - 1) for run in runs if run.reads > 10]
    return {
        "plans": len(runs),
        "step_error.median": float(np.median(errors)),
        "step_error.worst": float(errors.max()),
        "kendall_tau": float(kendalltau(predicted, measured).statistic),
        "miss_error.worst": max(wrong, default=0.0),
        "read_error.worst": max(wrong_reads, default=0.0),
    }


def trained(args: argparse.Namespace) -> list[Run]:
    data = Data(args.batch_size, args.warm + args.rounds * (args.steps + _READY) + _READY)
    topology = _topology(args)
    dense = dense_seconds(data) + topology.get("measured", {}).get("step_s", 0.0)
    stats = data.stats()
    jobs = [
        Job(name, data, topology, stats, dense, *budget)
        for name, budget in list(BUDGETS.items())[: args.budgets]
    ]
    try:
        for job in jobs:
            job.steps(args.warm)
        for job in jobs:
            job.reset()
        for _ in range(args.rounds):  # in turns, so that a busy minute does not hit one plan only
            for job in jobs:
                time.sleep(args.rest)  # until the one before has fetched what it knows of
                job.turn(args.steps)
        return [job.result() for job in jobs]
    finally:
        for job in jobs:
            job.close()


def _topology(args: argparse.Namespace) -> dict[str, Any]:
    if args.topology is None:
        parser = argparse.ArgumentParser()
        device.add_arguments(parser)
        return device.measure(parser.parse_args([]))
    topology: dict[str, Any] = json.loads(args.topology.read_text())
    if topology.get("device") != "cpu":
        raise ConfigError(f"{args.topology} is of a machine with GPUs; this benchmark trains on the CPU")
    return topology


class Data:
    """Batches with the popularity of :data:`TABLES`, a recorded part first."""

    recorded = 120

    def __init__(self, batch_size: int, batches: int) -> None:
        self.batch_size = batch_size
        self.configs = [
            EmbeddingBagConfig(rows, dim, f"t{i}", feature_names=[f"t{i}"])
            for i, (rows, dim, _) in enumerate(TABLES)
        ]
        self._draws = []
        for i, (rows, _, s) in enumerate(TABLES):
            weights = (np.arange(rows) + 20.0) ** -s
            self._draws.append(
                (np.cumsum(weights) / weights.sum(), np.random.default_rng(i).permutation(rows))
            )
        self.record = [self.ids(step) for step in range(self.recorded)]
        self.batches = [self._batch(self.recorded + step) for step in range(batches)]

    def ids(self, step: int) -> list[NDArray[np.int64]]:
        random = np.random.default_rng(1000 + step)
        count = self.batch_size * _BAG
        return [names[np.searchsorted(edges, random.random(count))] for edges, names in self._draws]

    def _batch(self, step: int) -> KeyedJaggedTensor:
        ids = torch.from_numpy(np.concatenate(self.ids(step)))
        lengths = torch.full((len(TABLES) * self.batch_size,), _BAG)
        return KeyedJaggedTensor([config.name for config in self.configs], ids, None, lengths)

    def stats(self) -> dict[str, dict[str, Any]]:
        """What ``tierstore plan --stats`` takes, of the recorded part under the policy that will run."""
        from cache_policies import prepare
        from cache_policies.simulator import simulate

        result = {}
        for i, config in enumerate(self.configs):
            trace = prepare([ids[i] for ids in self.record])
            half = prepare([ids[i] for ids in self.record[: self.recorded // 2]])
            floor = (_DEPTH + 1) * trace.largest_batch
            sizes = np.unique(np.geomspace(min(floor, trace.footprint // 2), trace.footprint, 12).astype(int))
            misses = []
            for size in sizes.tolist():
                runs = [simulate(t, "lookahead", size, depth=_DEPTH, window=_WINDOW) for t in (half, trace)]
                late = runs[1].misses - runs[0].misses, runs[1].uniques - runs[0].uniques
                misses.append(late[0] / late[1])
            result[config.name] = {
                "sizes_rows": sizes.tolist(),
                "unique_miss_ratio": misses,
                "unique_rows": trace.uniques / trace.batches,
                "accesses": trace.accesses / trace.batches,
            }
        return result


class Model(torch.nn.Module):
    """Bags and a small perceptron; ``bags`` may be a stand-in with the outputs' shape."""

    def __init__(self, bags: Any, width: int) -> None:
        super().__init__()
        self.bags = bags
        self.over = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, features: Any) -> torch.Tensor:
        return self.over(self.bags(features).values())


def train_step(model: Model, optimizer: torch.optim.Optimizer, features: Any) -> None:
    optimizer.zero_grad()
    model(features).square().mean().backward()
    optimizer.step()


def dense_seconds(data: Data) -> float:
    """A step of the model with constant bags: what the planner is told of the dense part."""
    width = sum(config.embedding_dim for config in data.configs)
    values = torch.randn(data.batch_size, width, requires_grad=True)
    model = Model(lambda _: SimpleNamespace(values=lambda: values * 1.0), width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times = []
    for _ in range(40):
        start = time.thread_time()
        train_step(model, optimizer, None)
        times.append(time.thread_time() - start)
    return float(np.median(times))


class Job:
    """One plan and its training."""

    def __init__(
        self,
        name: str,
        data: Data,
        topology: dict[str, Any],
        stats: dict[str, Any],
        dense: float,
        hbm: float,
        uvm: float,
        ssd: bool,
    ) -> None:
        self.name, self.data = name, data
        optimizer = RowWiseAdagrad(lr=0.01)
        rows = sum(config.num_embeddings for config in data.configs)
        total = sum((optimizer.row_bytes(c.embedding_dim) + 88) * c.num_embeddings for c in data.configs)
        layouts = len({config.embedding_dim for config in data.configs})
        beside = min(layouts * POLICY_FIXED_SLOTS, rows) * POLICY_FIXED_BYTES
        beside += rows * INDEX_BYTES_PER_ROW + RANK_BUFFERS if ssd else 0
        specs = [replace(spec_of_config(c), pooling_factor=_BAG) for c in data.configs]
        specs = prepared(specs, {}, stats, 1)
        fixed = data.batch_size * sum(20 * _BAG + 12 * c.embedding_dim for c in data.configs)
        sizes = {
            "hbm_per_rank": int(hbm * total) + fixed,
            "host_memory_per_host": int(uvm * total) + beside + fixed,
            "ssd_per_host": 20 * total if ssd else 0,
        }
        machine = replace(Topology.from_dict({**topology, **sizes}), ranks_per_host=1)
        work = Workload(data.batch_size, dense_seconds=dense, depth=_DEPTH, window=_WINDOW)
        planner = EmbeddingShardingPlanner(machine, workload=work, search_seconds=2)
        self.solution = planner.solve(specs)
        if self.solution.caches.missing:
            raise ConfigError(f"{name}: {self.solution.caches.missing}")
        self.bags = self._collection(optimizer, ssd)
        self.model = Model(self.bags, sum(config.embedding_dim for config in data.configs))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.at, self.times, self.computes, self.clock = 0, [], [], Clock()
        self.batches = tierstore.prefetch(self._loader(), self.model, depth=_DEPTH, window=_WINDOW)

    def _collection(self, optimizer: RowWiseAdagrad, ssd: bool) -> Any:
        from tierstore.cache.engine import Table
        from tierstore.initializers import constant
        from tierstore.planner.planner import placements
        from tierstore.sharding.planning import tiers_of_rank

        tables = [Table(c.name, c.num_embeddings, c.embedding_dim, constant(0.0)) for c in self.data.configs]
        config = TierConfig(ssd="10GiB" if ssd else 0)
        budgets = tiers_of_rank(placements(self.solution), 0, tables, config, optimizer)
        bags = tierstore.EmbeddingBagCollection(
            self.data.configs, config=replace(config, **budgets), optimizer=optimizer
        )
        for table in self.data.configs:
            for first in range(0, table.num_embeddings, 1 << 13):
                ids = torch.arange(first, min(first + (1 << 13), table.num_embeddings))
                bags.load_rows(ids, torch.zeros(len(ids), table.embedding_dim), None, table.name)
        return bags

    def _loader(self) -> Iterator[KeyedJaggedTensor]:
        while True:
            yield self.data.batches[self.at % len(self.data.batches)]
            self.at += 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            train_step(self.model, self.optimizer, next(self.batches))

    def reset(self) -> None:
        self.bags.engine.reset_stats()

    def turn(self, count: int) -> None:
        """Seconds per step of ``count`` steps; those before them of a turn find batches that waited ready."""
        with self.clock.watching(self.bags):
            self.steps(_READY)
            start, busy = time.perf_counter(), time.thread_time()
            self.steps(count)
        self.times.append((time.perf_counter() - start) / count)
        self.computes.append((time.thread_time() - busy) / count)

    def result(self) -> Run:
        caches, prediction = self.solution.caches, self.solution.prediction
        tiers = self.bags.engine.stats()["tiers"]
        lookups = max(chain.counters.lookups for chain in self.bags.engine.chains)
        unique = caches.field("unique")
        on_ssd = float((unique * caches.misses(caches.memory_rows)).sum())
        return Run(
            self.name,
            prediction.slowest()[0],
            prediction.step,
            float(np.median(self.times)),
            (tiers["hbm"]["rows"] - tiers["hbm"]["row_hits"]) / lookups,
            float((unique * caches.misses(caches.hbm_rows)).sum()),
            tiers["ssd"]["row_hits"] / lookups if "ssd" in tiers else 0.0,
            on_ssd,
            float(np.median(self.computes)),
            float(np.median(self.clock.fetch)),
            float(prediction.ranks[0, 0]),
            float(prediction.ranks[0, 5]),
            float(prediction.hosts[0, 0]),
        )

    def close(self) -> None:
        self.batches.close()
        self.bags.close(commit=False)
