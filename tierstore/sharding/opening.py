"""A sharded collection's part of the tables on this rank, opened by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tierstore.cache.engine import Engine, Table
from tierstore.cache.machine import check_machine
from tierstore.config import TierConfig
from tierstore.errors import ConfigError
from tierstore.initializers import as_init, constant, of_kind
from tierstore.modules.configs import PoolingType, from_torchrec
from tierstore.modules.features import Features, PooledFeatures
from tierstore.modules.tables import with_optimizers
from tierstore.optim import NOT_GIVEN, SGD, OptimizerSpec
from tierstore.optim.tables import Optimizers, by_table
from tierstore.placement import ShardingPlan
from tierstore.sharding.commits import Commits, Place
from tierstore.sharding.comms import CommsConfig
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.gpu_ranks import join_gpus, on_own_gpu
from tierstore.sharding.planning import tiers_of_rank
from tierstore.sharding.routing import Routing

_NO_SHARD = "(no shard)"


@dataclass(frozen=True)
class ShardingOptions:
    """Options of a sharded collection, beside its tables, their plan and the ranks.

    Args:
        config: budgets of one rank, where the plan states no bytes; each ``path`` gets a folder for every
            rank.
        optimizer, seed: as for the unsharded collection.
        comms: how the ranks exchange rows; the default is exact.
        commits: the commits that it takes part in; None: commits of its own, if ``config`` has a path.
        name: its path in the model, by which ``commits`` knows it.
    """

    config: TierConfig = field(default_factory=TierConfig)
    optimizer: Optimizers = NOT_GIVEN
    seed: int = 0
    comms: CommsConfig = field(default_factory=CommsConfig)
    commits: Commits | None = None
    name: str = ""


@dataclass(frozen=True)
class OpenShards:
    """The result of :func:`open_shards`; ``options`` have the commits, if there are any."""

    features: Features
    plan: ShardingPlan
    env: ShardingEnv
    options: ShardingOptions
    routing: Routing
    engine: Engine


def open_shards(
    kind: tuple[Any, ...],
    tables: Sequence[Any],
    features_of: Callable[[Sequence[Any]], Features],
    plan: ShardingPlan,
    env: ShardingEnv,
    options: ShardingOptions,
) -> OpenShards:
    """Open this rank's shards of ``tables``. All ranks call it.

    ``kind``: further settings that all ranks must give alike. ``plan``: may have tables of other collections.
    Raises ConfigError on all ranks for arguments that differ, and for a plan that does not fit. Raises
    GpuError on all ranks if a rank cannot use its GPU, and RankError if that has no room.
    """
    configs = [from_torchrec(table) for table in tables]
    env.check_same(_given(kind, configs, plan, options))
    features, config = features_of(configs), options.config
    plan = _only(plan, [table.name for table in configs])
    with env.shared_errors():
        config = on_own_gpu(config)
        check_machine(config)
    join_gpus(env, config)
    options = replace(options, config=config)
    plan.check(configs, env.world_size, "cuda" if config.on_gpu else "cpu")
    features.check_bounds(_bounds_checks(plan, config))
    routing = Routing(features.all, plan, env.rank)
    _check_max_pooling(features, routing, options.comms)
    _check_optimizers(plan, configs, options.optimizer)
    commits = options.commits
    if commits is None and config.path is not None:
        commits = Commits(config.path, env, [options.name])
    options = replace(options, commits=commits)
    try:
        place = None if commits is None else commits.place(options.name, plan, config.engine)
        engine = _open(env, routing, configs, options, place)
    except BaseException:
        if commits is not None:
            commits.leave()
        raise
    return OpenShards(features, plan, env, options, routing, engine)


def _given(
    kind: tuple[Any, ...], configs: Sequence[Any], plan: ShardingPlan, options: ShardingOptions
) -> dict[str, Any]:
    """Return the settings that all ranks must give alike."""
    config = options.config
    return {
        "tables": (*kind, [_described(table) for table in configs]),
        "plan": plan,
        "optimizer": options.optimizer,
        "seed": options.seed,
        "comms": options.comms,
        "initial values": [_initial(table, config) for table in configs],
        "path or engine": "no path" if config.path is None else config.engine,
        "check_gradients": config.check_gradients,
        "bounds_check": [config.bounds_check_of(table.name) for table in configs],
    }


def _described(table: Any) -> Any:
    pooling = getattr(table, "pooling", None)
    size = table.num_embeddings, table.embedding_dim, table.data_type
    return table.name, table.feature_names, *size, pooling


def _initial(table: Any, config: TierConfig) -> Any:
    """Return the initial values, the seed of a table's own, if it has one, and how its rows are rounded."""
    override = config.table(table.name)
    rounding = override.stochastic_rounding, config.stochastic_rounding
    return as_init(override.init, of_kind(*table.init_rule())), override.seed, rounding


def _only(plan: ShardingPlan, names: Sequence[str]) -> ShardingPlan:
    """Return the part of a model's plan that is about one collection."""
    return replace(plan, tables=tuple(table for table in plan.tables if table.name in names))


def _bounds_checks(plan: ShardingPlan, config: TierConfig) -> dict[str, str]:
    """Return what ids that are out of range do, by table; the plan's word comes first."""
    return {table.name: table.bounds_check or config.bounds_check_of(table.name) for table in plan.tables}


def _check_max_pooling(features: Features, routing: Routing, comms: CommsConfig) -> None:
    """Raise ConfigError for max pooling of tables cut by rows, whose owners have only parts of a bag."""
    if not isinstance(features, PooledFeatures) or comms.dedup:
        return
    for number, pooling in enumerate(features.poolings):
        if pooling is PoolingType.MAX and routing.cut_by_rows[number]:
            raise ConfigError(
                f"table {features.all[number].config.name!r}: max pooling cannot be cut by rows; use "
                "another cut, or CommsConfig(dedup=True)"
            )


def _check_optimizers(plan: ShardingPlan, configs: Sequence[Any], optimizer: Optimizers) -> None:
    """Raise ConfigError for tables cut by columns whose updates need whole rows, and if only some tables are
    frozen."""
    each = by_table(optimizer, [config.name for config in configs])
    if isinstance(optimizer, Mapping) and None in each.values():
        raise ConfigError(
            f"optimizer freezes tables {[name for name, one in each.items() if one is None]}, and a sharded "
            "collection is trained or frozen as a whole: put them into a collection of their own"
        )
    for table in plan.tables:
        spec = each[table.name]
        cut = any(shard.columns < table.embedding_dim for shard in table.shards if shard.rows)
        if cut and spec is not None and (spec.needs_whole_rows or spec.clip_grad_norm is not None):
            needs = spec.name if spec.needs_whole_rows else "clip_grad_norm"
            raise ConfigError(
                f"table {table.name!r}: {needs} needs the norms of whole rows, and the plan cuts the "
                "table by columns; use another cut"
            )


def _open(
    env: ShardingEnv,
    routing: Routing,
    configs: Sequence[Any],
    options: ShardingOptions,
    place: Place | None,
) -> Engine:
    """Return the engine of this rank's shards. Raises ConfigError on every rank if one rank fails."""
    engine: Engine | None = None
    try:
        with env.shared_errors():
            optimizer = options.optimizer if isinstance(options.optimizer, OptimizerSpec) else SGD()
            tables, config = tables_of_rank(routing, configs, options, place)
            if place is not None:
                place.check_there()
            at = 0 if place is None else place.at
            engine = Engine(tables, config, optimizer, options.seed, keep=2, at=at)
            if place is not None:
                place.check(engine)
    except BaseException:  # also of another rank: the folder can be opened again then
        if engine is not None:
            engine.close(commit=False)
        raise
    assert engine is not None
    return engine


def tables_of_rank(
    routing: Routing,
    configs: Sequence[Any],
    options: ShardingOptions,
    place: Place | None = None,
) -> tuple[list[Table], TierConfig]:
    """Return this rank's tables and tiers. A rank without shards has one row that no rank asks for."""
    config, optimizer = options.config, options.optimizer
    tables = with_optimizers(routing.local_tables(configs), optimizer, [c.name for c in configs])
    if not tables:
        nothing = TierConfig(hbm="all", check_gradients=config.check_gradients, device=config.device)
        return [Table(_NO_SHARD, 1, 1, constant(0.0))], nothing
    names = {table.origin for table in tables}
    changes: dict[str, Any] = {"tables": {name: o for name, o in config.tables.items() if name in names}}
    changes["path"] = None if place is None else place.folders
    config = replace(config, **changes)
    one = optimizer if isinstance(optimizer, OptimizerSpec) else SGD()
    budgets = tiers_of_rank(routing.plan.tables, routing.rank, tables, config, one)
    return tables, replace(config, **budgets)
