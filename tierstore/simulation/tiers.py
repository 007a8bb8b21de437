"""Simulates the hierarchy of a training on a trace: hits and misses of every table, tier and rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tierstore.cache.engine import Engine
from tierstore.cache.keys_only import KeysEngine
from tierstore.cache.tiers.sizes import as_policy
from tierstore.config import TierConfig
from tierstore.data.parts import part_of
from tierstore.errors import ConfigError
from tierstore.modules.configs import EmbeddingBagConfig
from tierstore.modules.features import PooledFeatures
from tierstore.modules.local_lookups import LocalPooling
from tierstore.modules.tables import OpenTables
from tierstore.optim import OptimizerSpec
from tierstore.pipeline.prefetch import prefetch
from tierstore.placement import ShardingPlan
from tierstore.sharding.opening import ShardingOptions, tables_of_rank
from tierstore.sharding.routing import Routing
from tierstore.simulation.tables import RankLookups, Ranks, SimulatedRank, SimulatedTables, run_ranks
from tierstore.sparse import KeyedJaggedTensor
from tierstore.trace.trace import Trace

Stats = dict[str, Any]
AfterStep = Callable[[int, int, Engine], object]
"""Is called with (rank, batches so far, engine of the rank) after every step, by a thread of each rank."""


def of_rank_0(step: Callable[[int], object]) -> AfterStep:
    """Return what calls ``step`` with the batches of rank 0."""
    return lambda rank, done, _: step(done) if rank == 0 else None


@dataclass(frozen=True)
class Training:
    """What is simulated: ``configs`` of all tables, in the order of the trace, and how they are trained.

    ``config``: the tiers, of one rank if there is a ``plan``.
    """

    configs: Sequence[EmbeddingBagConfig]
    config: TierConfig
    optimizer: OptimizerSpec
    plan: ShardingPlan | None = None

    @property
    def policy(self) -> str:
        """The name of the eviction policy."""
        return as_policy(self.config.policy).name

    def budgets(self) -> list[tuple[str, int]]:
        """Return name and bytes of the memory tiers: none of a plan, whose ranks have their own, and none if
        all rows are kept."""
        if self.plan is not None or self.config.keeps_all:
            return []
        hbm, uvm = int(self.config.hbm), int(self.config.uvm)
        return [("hbm now", hbm), *([("hbm and uvm now", hbm + uvm)] if uvm else [])]


def simulate_tiers(source: Trace, tables: Training, after_step: AfterStep) -> list[Stats]:
    """Return, for every rank, what ``stats()`` of a training on the batches of ``source`` returns.

    With a plan the ranks share the examples of each batch. Raises ``ConfigError`` for budgets that are too
    small, and for a plan of other tables.
    """
    if source.rate < 1:
        raise ConfigError(
            f"{source.name} has {source.rate:.2%} of the rows; tiers are simulated on all of them: record "
            "without a rate, or use --sizes, which takes samples"
        )
    features = PooledFeatures(tables.configs, is_weighted=False)
    if tables.plan is None:
        engine = KeysEngine(features.tables(), tables.config, tables.optimizer)
        lookups = LocalPooling(features, OpenTables(engine, range(len(engine.tables))))
        with ExitStack() as closing:
            closing.callback(engine.close, commit=False)
            module = SimulatedTables(engine, tables.optimizer, lookups, features.names)
            return [_train(module, batches_of(source), 0, after_step)]
    return _simulate_ranks(source, tables, features, after_step)


def _simulate_ranks(
    source: Trace, tables: Training, features: PooledFeatures, after_step: AfterStep
) -> list[Stats]:
    plan = tables.plan
    assert plan is not None
    plan.check(tables.configs, plan.world_size)
    options = ShardingOptions(config=tables.config, optimizer=tables.optimizer)
    ranks, stats = Ranks(plan.world_size), [Stats() for _ in range(plan.world_size)]
    with ExitStack() as closing:
        modules = []
        for rank in range(plan.world_size):
            routing = Routing(features.all, plan, rank)
            own, config = tables_of_rank(routing, tables.configs, options)
            engine = KeysEngine(own, config, tables.optimizer)
            closing.callback(engine.close, commit=False)
            lookups = RankLookups(features, routing, engine, ranks)
            module = SimulatedRank(engine, tables.optimizer, lookups, features.names)
            module.join(ranks, rank)
            modules.append(module)

        def work(rank: int) -> None:
            batches = (share_of(batch, rank, plan.world_size) for batch in batches_of(source))
            stats[rank] = _train(modules[rank], batches, rank, after_step)

        run_ranks(plan.world_size, work, ranks)
    return stats


def _train(module: SimulatedTables, batches: Iterator[Any], rank: int, after_step: AfterStep) -> Stats:
    """Run all lookups of ``batches`` under a prefetch, and return the counters."""
    for number, batch in enumerate(prefetch(batches, module), start=1):
        module(getattr(batch, "sparse", batch))
        after_step(rank, number, module.engine)
    return module.engine.stats()


def batches_of(source: Trace) -> Iterator[Any]:
    """Yield the batches as a training gets them; of ids alone where the trace has nothing else."""
    if source.training is not None:
        yield from source.training()
        return
    for ids in source.id_batches():
        lengths = torch.tensor([len(one) for one in ids], device="cpu")
        yield KeyedJaggedTensor(list(source.tables), torch.from_numpy(np.concatenate(ids)), lengths=lengths)


def share_of(batch: Any, rank: int, world_size: int) -> Any:
    """Return a rank's share of a batch: neighbouring examples, or of ids alone neighbouring ids."""
    if not isinstance(batch, KeyedJaggedTensor):
        return part_of(batch, rank, world_size)
    parts = [batch[key].values().tensor_split(world_size)[rank] for key in batch.keys()]  # noqa: SIM118
    lengths = torch.tensor([len(part) for part in parts], device="cpu")
    return KeyedJaggedTensor(batch.keys(), torch.cat(parts), lengths=lengths)


def table_rows(source: Trace) -> list[int]:
    """Return the rows of every table; where the trace does not say, enough for its largest id."""
    known = list(source.num_embeddings) or [0] * len(source.tables)
    if all(known):
        return known
    largest = [0] * len(known)
    for ids in source.id_batches():
        largest = [max(most, int(one.max(initial=-1)) + 1) for most, one in zip(largest, ids, strict=True)]
    return [rows or max(1, most) for rows, most in zip(known, largest, strict=True)]
