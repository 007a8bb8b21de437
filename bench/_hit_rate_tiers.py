"""The hierarchy of ``tierstore bench hit-rate --hbm``: hits and misses of every table, tier and rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import cache_policies
import tierstore
from tierstore import optim
from tierstore.cache.keys_only import KeysEngine
from tierstore.cache.shares import budget
from tierstore.cache.tiers.sizes import as_policy
from tierstore.config import TierConfig
from tierstore.data.parts import part_of
from tierstore.errors import ConfigError
from tierstore.modules.features import PooledFeatures
from tierstore.modules.local_lookups import LocalPooling
from tierstore.modules.tables import OpenTables
from tierstore.optim import OptimizerSpec
from tierstore.placement import ShardingPlan
from tierstore.result_file import option_errors
from tierstore.sharding.opening import ShardingOptions, tables_of_rank
from tierstore.sharding.routing import Routing
from tierstore.sparse import KeyedJaggedTensor

from ._simulated_tables import RankLookups, Ranks, SimulatedRank, SimulatedTables, run_ranks

if TYPE_CHECKING:
    from tierstore.trace import Trace

Stats = dict[str, Any]
_TIERS = ("hbm", "uvm", "ssd", "read_ahead", "ssd_dtype", "uvm_dtype", "state_dtype")
_SHARES = ("hbm", "uvm", "read_ahead")
"""Options that take a share of the tables' bytes, too."""
_MANY_BYTES = 1 << 60
_POLICY, _DIM, _OPTIMIZER = "lookahead", "32", "rowwise-adagrad"
"""What ``tierstore train`` has where nothing else is said."""


@dataclass(frozen=True)
class Training:
    """What is simulated: ``configs`` of all tables, in the order of the trace, and how they are trained.

    ``config``: the tiers, of one rank if there is a ``plan``.
    """

    configs: Sequence[tierstore.EmbeddingBagConfig]
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


@dataclass(frozen=True)
class TierOptions:
    """The options of the command that say which tiers are simulated."""

    policies: list[str]
    tiers: dict[str, Any]
    """Fields of the TierConfig; sizes may be shares of the tables' bytes."""
    dims: list[int]
    optimizer: OptimizerSpec
    plan: ShardingPlan | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> TierOptions | None:
        """Return the options; None where no tiers are asked for. Raises ConfigError for options that are
        wrong, and for options of tiers without ``--hbm`` or ``--plan``."""
        given = {name: getattr(args, name) for name in _TIERS if getattr(args, name) is not None}
        if args.hbm is None and args.plan is None:
            others = [name for name in (*given, "dim", "optimizer") if getattr(args, name) is not None]
            if others:
                option = others[0].replace("_", "-")
                raise ConfigError(f"--{option} is about the tiers of a training; give --hbm SIZE, too")
            return None
        fields = {"depth": "auto" if args.depth is None else _whole(args.depth, "--depth"), **given}
        fields |= {"window": _whole(args.window, "--window"), "admission": args.admission}
        plan = None if args.plan is None else read_plan(args.plan)
        if plan is not None and args.dim is not None:
            raise ConfigError("--dim: the plan has the dimensions of the tables; leave it out")
        optimizer = optim.make((args.optimizer or _OPTIMIZER).replace("-", "_"), lr=0.01)
        names = (args.policies or _POLICY).replace(" ", "").split(",")
        dims = [_dimension(text) for text in (args.dim or _DIM).split(",")]
        options = cls(cache_policies.names() if names == ["all"] else names, fields, dims, optimizer, plan)
        for policy in options.online():
            options.config(policy, _MANY_BYTES)
        return options

    def config(self, policy: Any, table_bytes: int) -> TierConfig:
        """Return the tiers with an eviction policy, for tables of ``table_bytes``, on ranks a rank's part."""
        sizes = {
            name: budget(size, table_bytes, f"--{name.replace('_', '-')}")
            for name, size in self.tiers.items()
            if name in _SHARES
        }
        return TierConfig(policy=policy, **(self.tiers | sizes))

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of the tables, on average."""
        dims = self.dims if self.plan is None else [table.embedding_dim for table in self.plan.tables]
        return round(sum(map(self.optimizer.row_bytes, dims)) / len(dims))

    def online(self) -> list[Any]:
        """Return the policies that a training can have."""
        every = [cache_policies.get(name) for name in self.policies]
        return every if len(every) == 1 else [policy for policy in every if not policy.offline]

    def trainings(self, source: Trace) -> list[Training]:
        """Return what is simulated on ``source``: a training with each policy. Raises ConfigError for a plan
        of other tables, and for a wrong number of dimensions."""
        if self.plan is None:
            if len(self.dims) not in (1, len(source.tables)):
                raise ConfigError(
                    f"--dim has {len(self.dims)} numbers; {source.name} has {len(source.tables)} tables: "
                    f"{', '.join(source.tables)}"
                )
            dims = self.dims * len(source.tables) if len(self.dims) == 1 else self.dims
            sizes = list(zip(table_rows(source), dims, strict=True))
        else:
            sizes = _sizes_of(self.plan, source)
        configs = [
            tierstore.EmbeddingBagConfig(rows, dim, name, feature_names=[name])
            for name, (rows, dim) in zip(source.tables, sizes, strict=True)
        ]
        table_bytes = sum(rows * self.optimizer.row_bytes(dim) for rows, dim in sizes)
        of_rank = table_bytes // (1 if self.plan is None else self.plan.world_size)
        return [
            Training(configs, self.config(policy, of_rank), self.optimizer, self.plan)
            for policy in self.online()
        ]


def _whole(text: str, option: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise ConfigError(f"{option} is a number of batches or auto, not {text!r}")
    return text if text == "auto" else int(text)


def _dimension(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise ConfigError(f"--dim is a whole number of at least 1, or one of each table, not {text!r}")
    return int(text)


def read_plan(path: Path) -> ShardingPlan:
    """Return the sharding plan of a file. Raises ConfigError for a file that has none."""
    with option_errors("--plan", path):
        return ShardingPlan.load(path)


def _sizes_of(plan: ShardingPlan, source: Trace) -> list[tuple[int, int]]:
    """Return rows and dimension of the tables of ``source``, which are those of the plan."""
    planned = {table.name: table for table in plan.tables}
    if set(planned) != set(source.tables):
        raise ConfigError(
            f"--plan is for tables {', '.join(planned)}, and {source.name} has {', '.join(source.tables)}; "
            "plan these tables, or choose columns (--columns)"
        )
    tables = [planned[name] for name in source.tables]
    if len({table.module for table in tables}) > 1:
        raise ConfigError("--plan has tables of several collections; one at a time is simulated")
    return [(table.num_embeddings, table.embedding_dim) for table in tables]


def simulate_tiers(source: Trace, tables: Training, step: Callable[[int], object]) -> list[Stats]:
    """Return, for every rank, what ``stats()`` of a training on the batches of ``source`` returns.

    With a plan the ranks share the examples of each batch. ``step`` is called with the number of batches so
    far. Raises ``ConfigError`` for budgets that are too small, and for a plan of other tables.
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
            return [_train(module, batches_of(source), step)]
    return _simulate_ranks(source, tables, features, step)


def _simulate_ranks(
    source: Trace, tables: Training, features: PooledFeatures, step: Callable[[int], object]
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
            told = step if rank == 0 else (lambda done: None)
            stats[rank] = _train(modules[rank], batches, told)

        run_ranks(plan.world_size, work, ranks)
    return stats


def _train(module: SimulatedTables, batches: Iterator[Any], step: Callable[[int], object]) -> Stats:
    """Run all lookups of ``batches`` under a prefetch, and return the counters."""
    for number, batch in enumerate(tierstore.prefetch(batches, module), start=1):
        module(getattr(batch, "sparse", batch))
        step(number)
    return module.engine.stats()


def batches_of(source: Trace) -> Iterator[Any]:
    """Yield the batches as a training gets them; of ids alone where the trace has nothing else."""
    if source.training is not None:
        yield from source.training()
        return
    for ids in source.id_batches():
        lengths = torch.tensor([len(one) for one in ids])
        yield KeyedJaggedTensor(list(source.tables), torch.from_numpy(np.concatenate(ids)), lengths=lengths)


def share_of(batch: Any, rank: int, world_size: int) -> Any:
    """Return a rank's share of a batch: neighbouring examples, or of ids alone neighbouring ids."""
    if not isinstance(batch, KeyedJaggedTensor):
        return part_of(batch, rank, world_size)
    parts = [batch[key].values().tensor_split(world_size)[rank] for key in batch.keys()]  # noqa: SIM118
    lengths = torch.tensor([len(part) for part in parts])
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
