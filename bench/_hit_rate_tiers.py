"""The hierarchy of ``tierstore bench hit-rate --hbm``: hits and misses of every table, tier and rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import tierstore
from tierstore.cache.keys_only import KeysEngine
from tierstore.config import TierConfig
from tierstore.errors import ConfigError
from tierstore.modules.features import PooledFeatures
from tierstore.modules.local_lookups import LocalPooling
from tierstore.modules.tables import OpenTables
from tierstore.optim import OptimizerSpec
from tierstore.placement import ShardingPlan
from tierstore.sharding.opening import ShardingOptions, tables_of_rank
from tierstore.sharding.routing import Routing
from tierstore.sparse import KeyedJaggedTensor

from ._simulated_tables import RankLookups, Ranks, SimulatedRank, SimulatedTables, run_ranks

if TYPE_CHECKING:
    from tierstore.trace import Trace

Stats = dict[str, Any]


@dataclass(frozen=True)
class Tables:
    """What is simulated: ``configs`` of all tables, in the order of the trace, and how they are trained.

    ``config``: the tiers, of one rank if there is a ``plan``.
    """

    configs: Sequence[tierstore.EmbeddingBagConfig]
    config: TierConfig
    optimizer: OptimizerSpec
    plan: ShardingPlan | None = None


def simulate_tiers(source: Trace, tables: Tables, step: Callable[[int], object]) -> list[Stats]:
    """Return, for every rank, what ``stats()`` of a training on the batches of ``source`` returns.

    With a plan of n ranks, rank r gets batches r, r + n, r + 2n and so on; batches that are left over at the
    end are left out. ``step`` is called with the number of batches so far. Raises ``ConfigError`` for budgets
    that are too small, and for a plan of other tables.
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
            return [_train(module, _batches(source), step)]
    return _simulate_ranks(source, tables, features, step)


def _simulate_ranks(
    source: Trace, tables: Tables, features: PooledFeatures, step: Callable[[int], object]
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
            batches = _of_rank(_batches(source), rank, plan.world_size)
            every = plan.world_size
            told = (lambda done: step(done * every)) if rank == 0 else (lambda done: None)
            stats[rank] = _train(modules[rank], batches, told)

        run_ranks(plan.world_size, work, ranks)
    return stats


def _train(module: SimulatedTables, batches: Iterator[Any], step: Callable[[int], object]) -> Stats:
    """Run all lookups of ``batches`` under a prefetch, and return the counters."""
    for number, batch in enumerate(tierstore.prefetch(batches, module), start=1):
        module(getattr(batch, "sparse", batch))
        step(number)
    return module.engine.stats()


def _batches(source: Trace) -> Iterator[Any]:
    """Yield the batches as a training gets them; of ids alone where the trace has nothing else."""
    if source.training is not None:
        yield from source.training()
        return
    for ids in source.id_batches():
        lengths = torch.tensor([len(one) for one in ids])
        yield KeyedJaggedTensor(list(source.tables), torch.from_numpy(np.concatenate(ids)), lengths=lengths)


def _of_rank(batches: Iterator[Any], rank: int, world_size: int) -> Iterator[Any]:
    while len(step := list(islice(batches, world_size))) == world_size:
        yield step[rank]


def table_rows(source: Trace) -> list[int]:
    """Return the rows of every table; where the trace does not say, enough for its largest id."""
    known = list(source.num_embeddings) or [0] * len(source.tables)
    if all(known):
        return known
    largest = [0] * len(known)
    for ids in source.id_batches():
        largest = [max(most, int(one.max(initial=-1)) + 1) for most, one in zip(largest, ids, strict=True)]
    return [rows or max(1, most) for rows, most in zip(known, largest, strict=True)]
