"""Which rows of the tables a plan counts: all, or those that training is said or known to use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tierstore.config import is_integer
from tierstore.errors import ConfigError, InfeasiblePlanError
from tierstore.modules.collection import Collection
from tierstore.placement import ShardingPlan, ShardingType
from tierstore.sharding.commits import Commits
from tierstore.sharding.env import ShardingEnv
from tierstore.sharding.record import Saved
from tierstore.sharding.shards import shard_name
from tierstore.sharding.table_sharding import configs_of
from tierstore.store.devices import StorePath
from tierstore.store.directory import open_store

_GROWTH = 2
"""A training that goes on for as long as it has trained so far uses at most so many times the rows."""

TouchedRows = Mapping[str, int]
"""The rows that training will ever use, by table; of a table that is not there all of them."""


def check_touched(touched: object, collections: Mapping[str, Collection]) -> None:
    """Raise ConfigError unless ``touched`` maps tables of the collections to numbers of their rows."""
    if touched is None:
        return
    if not isinstance(touched, Mapping):
        raise ConfigError(f"touched_rows is {touched!r}; give a mapping of table names to rows, or None")
    rows = {t.name: t.num_embeddings for child in collections.values() for t in configs_of(child)}
    for name, count in touched.items():
        if name not in rows:
            raise ConfigError(f"touched_rows names {name!r}, and the tables are {list(rows)}")
        if not is_integer(count, 1, rows[name]):
            raise ConfigError(
                f"touched_rows of {name!r} is {count!r}; it must be an integer from 1 to num_embeddings, "
                f"{rows[name]}"
            )


def planned(
    make: Callable[[TouchedRows], ShardingPlan], given: TouchedRows | None, held: Callable[[], TouchedRows]
) -> ShardingPlan:
    """Return the plan that ``make`` makes for the rows of ``given``.

    If the tables do not fit, ``held`` says how many rows of the other tables there are, and the plan is for
    twice as many. All ranks call it. Raises InfeasiblePlanError if that does not fit, too.
    """
    given = given or {}
    try:
        return make(given)
    except InfeasiblePlanError:
        more = {name: rows for name, rows in held().items() if name not in given}
        if not more:
            raise
    return make({**more, **given})


def twice_held(
    collections: Mapping[str, Collection], env: ShardingEnv, path: StorePath | None
) -> dict[str, int]:
    """Return twice the rows that each table has in the last commit below ``path``, or in its collection if
    that is open; at most all. Tables without rows are left out. All ranks call it."""
    rows: Counter[str] = Counter()
    for child in collections.values():
        for name in [] if child.engine.waits else child.table_names():
            rows[name] = sum(map(len, child.touched_ids(name)))
    if path is not None:
        commits = Commits(path, env, list(collections))
        commits.release()
        for saved in commits.saved.values():
            rows |= _of_commit(saved, commits.path, env)
    most = {t.name: t.num_embeddings for child in collections.values() for t in configs_of(child)}
    return {name: min(most[name], _GROWTH * count) for name, count in rows.items() if count and name in most}


def _of_commit(saved: Saved, path: Path, env: ShardingEnv) -> Counter[str]:
    """Return the rows of each table in the commit of a collection, of the stores of all ranks."""
    own: Counter[str] = Counter()
    with env.shared_errors():
        for rank in range(env.rank, saved.plan.world_size, env.world_size):
            if saved.ranks[rank]:
                own += _of_rank(saved, path / saved.folder / f"rank{rank:05d}", rank)
    return sum(env.gather_objects(own), Counter())


def _of_rank(saved: Saved, folder: Path, rank: int) -> Counter[str]:
    """Return the rows that one rank's store has of each table; other shards have the other columns of rows,
    or replicas."""
    rows: Counter[str] = Counter()
    with open_store(folder, at=saved.ranks[rank], read_only=True) as store:
        index = {spec.name: spec.index for spec in store.tables}
        for table, shard in saved.plan.on_rank(rank):
            if shard.column_start or (table.sharding_type is ShardingType.DATA_PARALLEL and rank):
                continue
            rows[table.name] += store.count(index[shard_name(table.name, table.embedding_dim, shard)])
    return rows
