"""What the sharded collections share: their part of the tables, and lookups that ask other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypedDict

import numpy as np
import torch
from torch import Tensor

from tierstore.cache.engine import Engine, Table
from tierstore.cache.machine import check_machine
from tierstore.config import TierConfig
from tierstore.errors import ConfigError, GradientError, InputError
from tierstore.initializers import Init, as_init, constant
from tierstore.modules.base import TieredModule
from tierstore.modules.collection import (
    TableView,
    TableViews,
    _check_names,
    _features,
    table_of,
)
from tierstore.modules.configs import from_torchrec
from tierstore.modules.left_out import mark
from tierstore.modules.lookup import Part
from tierstore.optim import NOT_GIVEN, SGD, OptimizerSpec
from tierstore.placement import ShardingPlan, ShardingType
from tierstore.sharding.column_squares import ColumnSquares
from tierstore.sharding.commits import Commits, Place, end
from tierstore.sharding.comms import CommsConfig
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.lookups import ShardedLookups
from tierstore.sharding.peers import in_flight
from tierstore.sharding.planning import tiers_of_rank
from tierstore.sharding.routing import LocalShard, Routing, shard_name
from tierstore.sharding.shard_views import Floats

_NO_SHARD = "(no shard)"


class Options(TypedDict, total=False):
    """ShardedCollection's, beside tables, plan and ranks."""

    config: TierConfig | None
    optimizer: OptimizerSpec | None
    seed: int
    comms: CommsConfig | None
    _commits: Commits | None
    _name: str


class ShardedTableView(TableView):
    """One whole table of a sharded collection; its rows are read and written by all ranks together."""

    _collection: ShardedCollection

    @property
    def table(self) -> Table:
        return table_of(self._collection.configs[self._index])

    def rows_version(self) -> str:
        """As HasWeight.rows_version, of the shards on all ranks, which call it together."""
        shards = self._collection.local_shards(self.name)
        own = [self._collection.engine.versions.of(shard.local) for shard in shards]
        everyone = self._collection.env.gather_objects(own)
        return hashlib.sha256(repr(everyone).encode()).hexdigest()[:32]

    def _save_weight(self, destination: dict[str, Any], key: str) -> None:
        floats = Floats(self._collection, self.name)
        if not floats.are_sharded:
            super()._save_weight(destination, key)
        elif floats.are_small:
            destination[key] = floats.view()
        else:
            destination[key] = mark(self.rows_version(), self.table, key)

    def _load_weight(self, weight: Any, key: str) -> None:
        if hasattr(weight, "local_shards"):
            Floats(self._collection, self.name).load(weight, key)
        else:
            super()._load_weight(weight, key)


class ShardedCollection(ShardedLookups):
    """Base of the sharded collections. All ranks make it, with the same arguments, and call it together.

    Args:
        tables: configurations, as for the unsharded collection.
        plan: which shards are on which rank; it may have other collections' tables too.
        env: the ranks.
        config: budgets of one rank, where the plan states no bytes; ``path`` gets a folder for every rank.
        optimizer, seed: as for the unsharded collection.
        comms: how the ranks talk; None: exactly.
    """

    _views: ClassVar[str]
    """Name of the module that has the tables' views."""

    def __init__(
        self,
        tables: Sequence[Any],
        plan: ShardingPlan,
        env: ShardingEnv,
        *,
        config: TierConfig | None = None,
        optimizer: OptimizerSpec | None = NOT_GIVEN,
        seed: int = 0,
        comms: CommsConfig | None = None,
        is_weighted: bool = False,
        _commits: Commits | None = None,
        _name: str = "",
    ) -> None:
        configs: list[Any] = [from_torchrec(table) for table in tables]
        config = config or TierConfig()
        kind = (type(self).__name__, is_weighted, [_described(table) for table in configs])
        initial = [_initial(table, config) for table in configs]
        stores = "no path" if config.path is None else config.engine
        given = {"tables": kind, "plan": plan, "optimizer": optimizer, "seed": seed, "comms": comms}
        given["initial values"] = initial
        env.check_same({**given, "path or engine": stores, "check_gradients": config.check_gradients})
        _check_names(configs)
        plan = _only(plan, [table.name for table in configs])
        plan.check(configs, env.world_size, "cpu")
        features = _features(configs, {table.name: number for number, table in enumerate(configs)})
        routing = Routing(features, plan, env.rank)
        with env.together():
            check_machine(config)
        if _commits is None and config.path is not None:
            _commits = Commits(config.path, env, [_name])
        try:
            place = None if _commits is None else _commits.place(_name, plan, config.engine)
            engine = _open(env, routing, configs, config, optimizer, seed, place)
        except BaseException:
            if _commits is not None:
                _commits.leave()
            raise
        TieredModule.__init__(self, engine, range(len(engine.tables)), optimizer)
        self.tiers = config
        self.configs, self.plan = configs, plan
        self._configs = configs
        self._commits = _commits
        self._features = features
        self._set_routing(routing, env, comms)
        self._squares = None if self.frozen else self._column_squares()
        view_of = {table.name: ShardedTableView(self, table, at) for at, table in enumerate(configs)}
        self.add_module(self._views, TableViews(view_of))
        env.peers.handled = in_flight()
        if _commits is not None:
            try:
                _commits.join(_name, self)
            except BaseException:
                self.close_here()
                raise

    def _column_squares(self) -> ColumnSquares | None:
        if not self.fused_optimizer.spec.state_per_row:
            return None
        squares = ColumnSquares(self.env, self.plan, self.engine.table_index)
        return squares if squares.needed else None

    def mean_squares(
        self, parts: Sequence[Part], squares_of: Callable[[int], np.ndarray]
    ) -> Sequence[np.ndarray | None]:
        """As the base's; shards of tables cut by columns ask those of the other columns."""
        if self._squares is None:
            return super().mean_squares(parts, squares_of)
        return self._squares.means(parts, squares_of)

    def report_gradients(self, error: GradientError | None) -> None:
        """As the base's, but every rank raises if one has an error.

        That is when the backward pass is over, and after what others have asked autograd to call then: a rank
        that left in the middle would not exchange its dense gradients, and DDP would not work any more.
        """
        if not self.check_gradients:
            return
        later = torch.autograd.Variable._execution_engine.queue_callback
        later(lambda: later(lambda: self.env.agree(error, GradientError)))

    def commit(self, extra: dict[str, Any] | None = None, tag: str | None = None) -> int:
        """Makes the rows of all ranks durable, as one commit: after a crash all ranks are at it, or none.
        With DistributedModelParallel, those of all collections. All ranks call it; returns its number.

        Raises ConfigError on all ranks without a path, or if one of them fails.
        """
        if self._commits is None:
            raise ConfigError("there is no place to commit to; give TierConfig(path=...)")
        return self._commits.commit(extra, tag)

    @property
    def commits(self) -> Commits | None:
        """The commits of all ranks that the collection takes part in; None without a path."""
        return self._commits

    @property
    def is_fresh(self) -> bool:
        """Whether no rows of an earlier commit were found."""
        return self._commits is None or not self._commits.restored(self)

    def committed_extra(self) -> dict[str, Any]:
        """``extra`` of the last commit of all ranks."""
        return {} if self._commits is None else self._commits.extra

    def close(self, *, commit: bool = True) -> None:
        """Commits (if there is a path; all ranks do it) and closes the engine of this rank. After a commit
        with an ``extra`` it commits nothing, since that is wrong of later rows.

        In a ``finally`` or ``except``, because of an error, it commits nothing either, waits for nobody, and
        tells the other ranks that this one has stopped: they raise RankError.
        """
        if self.engine.closed:
            return
        end(self.env.peers, self._commits, commit, self.close_here)

    def close_here(self) -> None:
        """Closes the engine of this rank; the other ranks hear nothing of it."""
        super().close(commit=False)
        if self._commits is not None:
            self._commits.leave()

    @property
    def views_name(self) -> str:
        """Name of the module that has the tables, in state dicts."""
        return self._views

    def table_names(self) -> list[str]:
        return [table.name for table in self.configs]

    # -- rows ----------------------------------------------------------------------------

    def _table(self, name: str | None) -> int:
        names = [table.name for table in self.configs]
        if (name is None and len(names) > 1) or (name is not None and name not in names):
            raise InputError(f"there is no table {name!r}; name one of {names}")
        return 0 if name is None else names.index(name)

    def _asked(self, ids: Any, table: str | None) -> tuple[Any, np.ndarray]:
        """The table's configuration and the ids. Every rank raises if those of one are wrong."""
        error: InputError | None = None
        asked: Any = None
        try:
            config, keys = self.configs[self._table(table)], self._ids(ids)
            asked = (config.name, hashlib.sha256(keys.tobytes()).hexdigest())
        except InputError as raised:
            error, asked = raised, str(raised)
        self.env.check_same({"table or ids": asked})
        if error is not None:
            raise error
        outside = np.flatnonzero((keys < 0) | (keys >= config.num_embeddings))
        if len(outside):
            raise InputError(
                f"table {config.name!r}: id {keys[outside[0]]} at position {outside[0]} is out of range "
                f"[0, {config.num_embeddings})"
            )
        return config, keys

    def rows(self, ids: Any, table: str | None = None) -> Tensor:
        """As TieredModule.rows. All ranks call it with the same ids."""
        return self._read(ids, table, None)[0]

    def optimizer_rows(self, ids: Any, table: str | None = None) -> dict[str, Tensor]:
        """As TieredModule.optimizer_rows. All ranks call it with the same ids. State kept per row is that of
        the first columns, if the table is cut by columns."""
        spec = self.fused_optimizer.spec
        parts = self._read(ids, table, spec.state_names)
        return {
            name: part[:, 0] if spec.state_per_row else part
            for name, part in zip(spec.state_names, parts, strict=True)
        }

    def _read(self, ids: Any, table: str | None, states: Sequence[str] | None) -> list[Tensor]:
        """(ids, columns) of the weights, or of these parts of the optimizer's state; by one exchange."""
        config, keys = self._asked(ids, table)
        spec = self.fused_optimizer.spec
        per_row = states is not None and spec.state_per_row
        width = 1 if per_row else config.embedding_dim
        found = torch.zeros(1 if states is None else len(states), len(keys), width)
        for shard in self.local_shards(config.name):
            if (shard.replica and self.env.rank) or (per_row and shard.columns.start):
                continue
            at = np.flatnonzero(shard.holds(keys))
            weight, state = self.engine.read_rows(shard.local, keys[at])
            columns = slice(0, 1) if per_row else shard.columns
            floats, places = np.hstack([weight, state]), spec.state_columns(weight.shape[1])
            wanted = [slice(weight.shape[1])] if states is None else [places[name] for name in states]
            for into, place in zip(found, wanted, strict=True):
                into[at, columns] = torch.from_numpy(floats[:, place])
        return list(self.env.sum_bits(found))

    def load_rows(
        self, ids: Any, weight: Tensor, optimizer: dict[str, Tensor] | None = None, table: str | None = None
    ) -> None:
        """As TieredModule.load_rows. All ranks call it with the same arguments; each keeps its share."""
        self._asked(ids, table)
        self.load_own_rows(ids, weight, optimizer, table)

    def load_own_rows(
        self, ids: Any, weight: Tensor, optimizer: dict[str, Tensor] | None = None, table: str | None = None
    ) -> None:
        """As :meth:`load_rows`, but ranks need not agree: of ``ids`` the shards on this rank keep theirs."""
        config, keys = self.configs[self._table(table)], self._ids(ids)
        dim = config.embedding_dim
        values = self._matrix("weight", weight, (len(keys), dim))
        state = None if optimizer is None else self._state(optimizer, len(keys), dim)
        per_row = self.fused_optimizer.spec.state_per_row
        for shard in self.local_shards(config.name):
            at = np.flatnonzero(shard.holds(keys))
            if not len(at):
                continue
            part = None
            if state is not None:
                part = state[at]
                if not per_row:
                    columns = shard.columns
                    part = part.reshape(len(at), -1, dim)[:, :, columns].reshape(len(at), -1)
            self.engine.write_rows(shard.local, keys[at], values[at, shard.columns], part)

    def touched_ids(self, table: str | None = None) -> Iterator[Tensor]:
        """As TieredModule.touched_ids, of the shards on this rank."""
        local = {shard.local for shard in self.local_shards(self.configs[self._table(table)].name)}
        for index in sorted(local)[:1]:  # ranges of columns are touched together
            for ids in self.engine.touched_ids(index):
                yield torch.from_numpy(ids)

    def local_shards(self, name: str) -> Iterator[LocalShard]:
        """The shards of a table on this rank."""
        placement = self.plan.table(name)
        for shard in placement.shards:
            if shard.rank == self.env.rank:
                yield LocalShard(
                    self.engine.table_index(shard_name(name, placement.embedding_dim, shard)),
                    slice(shard.column_start, shard.column_start + shard.columns),
                    (shard.row_start, shard.row_start + shard.rows),
                    placement.sharding_type is ShardingType.DATA_PARALLEL,
                )


def _described(table: Any) -> Any:
    """What ranks must give alike of a table's configuration."""
    pooling = getattr(table, "pooling", None)
    return table.name, table.feature_names, table.num_embeddings, table.embedding_dim, pooling


def _initial(table: Any, config: TierConfig) -> Any:
    """What its initial rows are made by, beside the seed of all tables."""
    override = config.table(table.name)
    return as_init(override.init, Init(*table.init_rule())), override.seed


def _only(plan: ShardingPlan, names: Sequence[str]) -> ShardingPlan:
    """The part of a model's plan that is about one collection."""
    return replace(plan, tables=tuple(table for table in plan.tables if table.name in names))


def _open(
    env: ShardingEnv,
    routing: Routing,
    configs: Sequence[Any],
    config: TierConfig,
    optimizer: OptimizerSpec | None,
    seed: int,
    place: Place | None,
) -> Engine:
    """The engine of this rank's shards; ConfigError on every rank if one of them fails."""
    engine: Engine | None = None
    try:
        with env.together():
            tables = routing.local_tables(configs)
            optimizer = optimizer or SGD()
            tables, config = _of_rank(env, routing, tables, config, place, optimizer)
            engine = Engine(tables, config, optimizer, seed, keep=2, at=0 if place is None else place.at)
            if place is not None:
                place.check(engine)
    except BaseException:  # also of another rank: the folder can be opened again then
        if engine is not None:
            engine.close(commit=False)
        raise
    assert engine is not None
    return engine


def _of_rank(
    env: ShardingEnv,
    routing: Routing,
    tables: list[Table],
    config: TierConfig,
    place: Place | None,
    optimizer: OptimizerSpec,
) -> tuple[list[Table], TierConfig]:
    """This rank's tables and tiers. A rank without shards takes part with one row that nobody asks for."""
    if not tables:
        nothing = TierConfig(hbm="all", check_gradients=config.check_gradients)
        return [Table(_NO_SHARD, 1, 1, constant(0.0))], nothing
    names = {table.origin for table in tables}
    changes: dict[str, Any] = {"tables": {name: o for name, o in config.tables.items() if name in names}}
    changes["path"] = None if place is None else place.folder
    config = replace(config, **changes)
    return tables, replace(config, **tiers_of_rank(routing.plan.tables, env.rank, tables, config, optimizer))
