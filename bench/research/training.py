"""A model that plans are trained with, and how its steps are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

import tierstore
from cache_policies import prepare, steady_curve
from tierstore import EmbeddingBagConfig, KeyedJaggedTensor
from tierstore.planner import TableSpec, Topology, costs
from tierstore.planner.tables import spec_of_config

from .._runtime_costs import Draws, features, one_thread, perceptron, train_step

DEPTH, WINDOW, LR = 2, 8, 0.01
READ_AHEAD = 8 << 20  # bytes that a rank has for rows read ahead
_RECORDED = 160
"""Batches that miss curves are made of, the second half; training sees others."""

Budget = tuple[float, float, bool]
"""Shares of the tables' bytes in (hbm, uvm) of all ranks together, and whether there is an SSD below."""


@dataclass(frozen=True)
class Case:
    """A model and a machine.

    ``tables``: rows, dimension and exponent of the popularity of each; ``bags``: ids of a bag, by table;
    ``batch_size``: examples of each of ``ranks``.
    """

    tables: Sequence[tuple[int, int, float]]
    bags: tuple[int, ...]
    budget: Budget
    batch_size: int = 512
    ranks: int = 2
    optimizer: str = "sgd"

    @property
    def configs(self) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(rows, dim, f"t{i}", feature_names=[f"t{i}"])
            for i, (rows, dim, _) in enumerate(self.tables)
        ]

    @property
    def width(self) -> int:
        return sum(dim for _, dim, _ in self.tables)

    def specs(self) -> list[TableSpec]:
        return [
            replace(spec_of_config(config, "bags"), pooling_factor=float(bag), optimizer=self.optimizer)
            for config, bag in zip(self.configs, self.bags, strict=True)
        ]

    def machine(self, rates: Mapping[str, Any]) -> Topology:
        """Return a host of CPUs whose memories have the budget's shares of the tables, and room for the rest.

        ``rates``: other fields of the topology.
        """
        specs, (hbm, uvm, ssd) = self.specs(), self.budget
        sizes = [spec.row_bytes() for spec in specs]
        rows, examples = sum(spec.rows for spec in specs), self.batch_size * self.ranks
        total = sum(int(spec.rows * costs.slot_bytes(size)) for spec, size in zip(specs, sizes, strict=True))
        fixed = int(sum(examples * (20 * spec.pooling_factor + 12 * spec.embedding_dim) for spec in specs))
        beside = fixed + min(len(set(sizes)) * costs.POLICY_FIXED_SLOTS, rows) * costs.POLICY_FIXED_BYTES
        stored = rows * costs.INDEX_BYTES_PER_ROW + (costs.RANK_BUFFERS + READ_AHEAD) * self.ranks
        machine = {
            **{"device": "cpu", "hosts": 1, "ranks_per_host": self.ranks},
            "hbm_per_rank": int(hbm * total / self.ranks) + fixed,
            "host_memory_per_host": int(uvm * total) + beside * self.ranks + stored * ssd,
            "ssd_per_host": 20 * total * ssd,
        }
        return Topology.from_dict({**rates, **machine})


class Data:
    """Batches with the popularity of a case's tables."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._draws = [Draws(rows, s, 20.0, seed=i) for i, (rows, _, s) in enumerate(case.tables)]

    def ids(self, step: int) -> list[NDArray[np.int64]]:
        """Return the ids of every table, of all ranks."""
        random, examples = np.random.default_rng(1000 + step), self.case.batch_size * self.case.ranks
        return [draw(random, examples * bag) for draw, bag in zip(self._draws, self.case.bags, strict=True)]

    def batches(self, rank: int) -> Iterator[KeyedJaggedTensor]:
        """Yield endless batches of one rank's examples, all behind the recorded part."""
        size, bags = self.case.batch_size, self.case.bags
        lengths = torch.tensor(bags).repeat_interleave(size)
        names = [config.name for config in self.case.configs]
        for step in count(_RECORDED):
            pairs = zip(self.ids(step), bags, strict=True)
            ids = [every[rank * size * bag : (rank + 1) * size * bag] for every, bag in pairs]
            yield features(names, ids, lengths)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return what ``tierstore plan --stats`` takes, of the recorded part of the data."""
        record = [self.ids(step) for step in range(_RECORDED)]
        return {
            config.name: self._recorded([ids[i] for ids in record])
            for i, config in enumerate(self.case.configs)
        }

    @staticmethod
    def _recorded(ids: list[NDArray[np.int64]]) -> dict[str, Any]:
        """Return what was recorded of a table. First uses are read, since training begins with all rows."""
        trace = prepare(ids)
        curve = steady_curve(trace, "lookahead", rate=1.0, depth=DEPTH, window=WINDOW)
        del curve["capacity_miss_ratio"]
        means = {"unique_rows": trace.uniques / _RECORDED, "accesses": trace.accesses / _RECORDED}
        return {**curve, **means}


class Model(torch.nn.Module):
    """Bags and a small perceptron; ``bags`` may be a stand-in with the outputs' shape."""

    def __init__(self, bags: Any, width: int) -> None:
        super().__init__()
        self.bags = bags
        self.over = perceptron(width)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.over(self.bags(batch).values())


def dense_seconds(case: Case) -> float:
    """Return what the planner is told of the dense part: a step of the model with constant bags.

    Among several ranks that includes the exchange of gradients, and all threads of this rank.
    """
    one_thread()
    values = torch.randn(case.batch_size, case.width, requires_grad=True)
    model = Model(lambda _: SimpleNamespace(values=lambda: values * 1.0), case.width)
    if case.ranks > 1:
        model.over = DistributedDataParallel(model.over)  # type: ignore[assignment]
    clock = time.thread_time if case.ranks == 1 else time.process_time
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    times = []
    for _ in range(50):
        start = clock()
        train_step(model, optimizer, None)
        times.append(clock() - start)
    return float(np.median(times))


class Job:
    """A model in training, and counters that only grow, which a step's figures are made of."""

    def __init__(self, model: Any, made: Iterator[Any], counters: Callable[[], dict[str, float]]) -> None:
        self.model, self.counters = model, counters
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        self.batches = tierstore.prefetch(made, model, depth=DEPTH, window=WINDOW)

    def train(self, steps: int) -> float:
        """Train ``steps`` batches, and return the loss of the last one."""
        for _ in range(steps):
            loss = train_step(self.model, self.optimizer, next(self.batches))
        return float(loss)
