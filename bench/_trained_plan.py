"""One plan trained with, in a process of its own: what ``tierstore bench plan-step`` measures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from tierstore.planner.planner import Solution, placements
from tierstore.planner.tables import prepared, spec_of_config

from ._neighbours import LOUD, Neighbours
from ._runtime_costs import Clock

DEPTH, WINDOW, BAG = 2, 8, 8
LR = 0.01
RECORDED = 160
"""Batches that miss curves are made of, the second half; training sees others."""

Tables = Sequence[tuple[int, int, float]]
"""Rows, dimension and exponent of the popularity of each table."""


@dataclass(frozen=True)
class Budget:
    """Shares of the tables' bytes in (hbm, uvm), and whether there is an SSD below."""

    hbm: float
    uvm: float
    ssd: bool


@dataclass(frozen=True)
class Turns:
    """How long to train: ``warm`` steps first, then ``turns`` of ``steps`` each, and as many again at most
    in place of those that other processes disturbed."""

    warm: int
    turns: int
    steps: int


class Data:
    """Batches with the popularity of ``tables``, of ``batch_size`` examples."""

    def __init__(self, tables: Tables, batch_size: int) -> None:
        self.tables, self.batch_size = tables, batch_size
        self.configs = [
            EmbeddingBagConfig(rows, dim, f"t{i}", feature_names=[f"t{i}"])
            for i, (rows, dim, _) in enumerate(tables)
        ]
        self.width = sum(config.embedding_dim for config in self.configs)
        self._draws = []
        for i, (rows, _, s) in enumerate(tables):
            weights = (np.arange(rows) + 20.0) ** -s
            names = np.random.default_rng(i).permutation(rows)
            self._draws.append((np.cumsum(weights) / weights.sum(), names))

    def ids(self, step: int) -> list[NDArray[np.int64]]:
        """Those of every table."""
        random = np.random.default_rng(1000 + step)
        count = self.batch_size * BAG
        return [names[np.searchsorted(edges, random.random(count))] for edges, names in self._draws]

    def batch(self, step: int) -> KeyedJaggedTensor:
        ids = torch.from_numpy(np.concatenate(self.ids(step)))
        lengths = torch.full((len(self.tables) * self.batch_size,), BAG)
        return KeyedJaggedTensor([config.name for config in self.configs], ids, None, lengths)

    def stats(self) -> dict[str, dict[str, Any]]:
        """What ``tierstore plan --stats`` takes, of the recorded part under the policy that will run."""
        from cache_policies import prepare
        from cache_policies.simulator import simulate

        result = {}
        record = [self.ids(step) for step in range(RECORDED)]
        for i, config in enumerate(self.configs):
            trace = prepare([ids[i] for ids in record])
            half = prepare([ids[i] for ids in record[: RECORDED // 2]])
            floor = (DEPTH + 1) * trace.largest_batch
            sizes = np.unique(np.geomspace(min(floor, trace.footprint // 2), trace.footprint, 12).astype(int))
            misses = []
            for size in sizes.tolist():
                runs = [simulate(t, "lookahead", size, depth=DEPTH, window=WINDOW) for t in (half, trace)]
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


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, features: Any) -> torch.Tensor:
    """The loss."""
    optimizer.zero_grad()
    loss = model(features).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def dense_seconds(
    examples: int,
    width: int,
    wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda over: over,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """A step of the model with constant bags: what the planner is told of the dense part. ``wrap``: around
    what is over the bags; ``clock``: of the processors that count."""
    values = torch.randn(examples, width, requires_grad=True)
    model = Model(lambda _: SimpleNamespace(values=lambda: values * 1.0), width)
    model.over = wrap(model.over)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    times = []
    for _ in range(50):
        start = clock()
        train_step(model, optimizer, None)
        times.append(clock() - start)
    return float(np.median(times))


def planner_for(
    data: Data, budget: Budget, topology: dict[str, Any], dense: float
) -> EmbeddingShardingPlanner:
    """A planner for one rank of that machine with those bytes of memory."""
    optimizer = RowWiseAdagrad(lr=LR)
    rows = sum(config.num_embeddings for config in data.configs)
    total = sum((optimizer.row_bytes(c.embedding_dim) + 88) * c.num_embeddings for c in data.configs)
    layouts = len({config.embedding_dim for config in data.configs})
    beside = min(layouts * POLICY_FIXED_SLOTS, rows) * POLICY_FIXED_BYTES
    beside += rows * INDEX_BYTES_PER_ROW + RANK_BUFFERS if budget.ssd else 0
    fixed = data.batch_size * sum(20 * BAG + 12 * c.embedding_dim for c in data.configs)
    sizes = {
        "hbm_per_rank": int(budget.hbm * total) + fixed,
        "host_memory_per_host": int(budget.uvm * total) + beside + fixed,
        "ssd_per_host": 20 * total if budget.ssd else 0,
    }
    machine = replace(Topology.from_dict({**topology, **sizes}), ranks_per_host=1)
    work = Workload(data.batch_size, dense_seconds=dense, depth=DEPTH, window=WINDOW)
    return EmbeddingShardingPlanner(machine, workload=work, search_seconds=0.5)


def planned(
    data: Data, budget: Budget, topology: dict[str, Any], stats: dict[str, Any], dense: float = 0.0
) -> Solution:
    """The plan; equal arguments give equal plans."""
    specs = [replace(spec_of_config(c), pooling_factor=BAG) for c in data.configs]
    solution = planner_for(data, budget, topology, dense).solve(prepared(specs, {}, stats, 1))
    if solution.caches.missing:
        raise ConfigError(f"a plan with {budget} does not fit: {solution.caches.missing}")
    return solution


def measured_plan(
    tables: Tables,
    batch_size: int,
    budget: Budget,
    topology: dict[str, Any],
    stats: dict[str, Any],
    turns: Turns,
) -> dict[str, Any]:
    """Trains with a plan. Seconds per step: of the clock, of the training thread (processor time), of the
    fetching one (waits left out); rows per step that missed in hbm, and that were read from the store."""
    torch.set_num_threads(1)
    set_num_threads(1)
    data = Data(tables, batch_size)
    dense = dense_seconds(data.batch_size, data.width)
    job = Job(data, planned(data, budget, topology, stats))
    try:
        job.train(turns)
        caches = job.solution.caches
        rows = {"hbm_rows": caches.hbm_rows.tolist(), "memory_rows": caches.memory_rows.tolist()}
        return {"dense": dense, **rows, **job.result()}
    finally:
        job.close()


class Job:
    """The training of one plan."""

    def __init__(self, data: Data, solution: Solution) -> None:
        self.data, self.solution = data, solution
        self.bags = self._collection(RowWiseAdagrad(lr=LR))
        self.model = Model(self.bags, data.width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.clock, self.turns = Clock(), list[dict[str, float]]()
        self.drawn, self.step = deque[KeyedJaggedTensor](), RECORDED
        self.batches = tierstore.prefetch(self._loader(), self.model, depth=DEPTH, window=WINDOW)

    def _collection(self, optimizer: RowWiseAdagrad) -> Any:
        from tierstore.cache.engine import Table
        from tierstore.initializers import constant
        from tierstore.sharding.planning import tiers_of_rank

        configs = self.data.configs
        tables = [Table(c.name, c.num_embeddings, c.embedding_dim, constant(0.0)) for c in configs]
        config = TierConfig(ssd="10GiB" if self.solution.topology.ssd_per_host else 0)
        budgets = tiers_of_rank(placements(self.solution), 0, tables, config, optimizer)
        bags = tierstore.EmbeddingBagCollection(
            configs, config=replace(config, **budgets), optimizer=optimizer
        )
        for table in configs:
            for first in range(0, table.num_embeddings, 1 << 13):
                ids = torch.arange(first, min(first + (1 << 13), table.num_embeddings))
                bags.load_rows(ids, torch.zeros(len(ids), table.embedding_dim), None, table.name)
        return bags

    def _loader(self) -> Iterator[KeyedJaggedTensor]:
        while True:
            if not self.drawn:
                self._draw(1)
            yield self.drawn.popleft()

    def _draw(self, count: int) -> None:
        """Makes ``count`` batches before they are needed: drawing them is no part of a step."""
        self.drawn.extend(self.data.batch(self.step + i) for i in range(count))
        self.step += count

    def train(self, turns: Turns) -> None:
        neighbours = Neighbours()
        self._draw(turns.warm + WINDOW + DEPTH + 2)
        with self.clock.watching(self.bags):
            self._steps(turns.warm)
            self.bags.engine.reset_stats()
            calm = 0
            self._draw(turns.turns * turns.steps)
            while calm < turns.turns and len(self.turns) < 2 * turns.turns:
                if len(self.drawn) < turns.steps:
                    self._draw(turns.steps)
                    self._steps(WINDOW)
                neighbours.share()
                self.turns.append(self._turn(turns.steps))
                self.turns[-1]["others"] = neighbours.share()
                calm += self.turns[-1]["others"] < LOUD

    def _steps(self, count: int) -> None:
        for _ in range(count):
            train_step(self.model, self.optimizer, next(self.batches))

    def _turn(self, count: int) -> dict[str, float]:
        first = len(self.clock.plan)
        start, busy, all_ = time.perf_counter(), time.thread_time(), time.process_time()
        self._steps(count)
        return {
            "step": (time.perf_counter() - start) / count,
            "compute": (time.thread_time() - busy) / count,
            "process": (time.process_time() - all_) / count,
            "fetch": float(np.mean(self.clock.fetch[first:])),
        }

    def result(self) -> dict[str, Any]:
        """Medians of the calm turns (of all where there are none), and how many these are."""
        calm = [turn for turn in self.turns if turn["others"] < LOUD]
        names = ("step", "compute", "process", "fetch", "others")
        figures = {name: float(np.median([turn[name] for turn in calm or self.turns])) for name in names}
        tiers = self.bags.engine.stats()["tiers"]
        lookups = max(group.stats.counters.lookups for group in self.bags.engine.groups)
        return {
            **figures,
            "calm": len(calm),
            "turns": len(self.turns),
            "misses": (tiers["hbm"]["rows"] - tiers["hbm"]["row_hits"]) / lookups,
            "reads": tiers["ssd"]["row_hits"] / lookups if "ssd" in tiers else 0.0,
        }

    def close(self) -> None:
        self.batches.close()
        self.bags.close(commit=False)
