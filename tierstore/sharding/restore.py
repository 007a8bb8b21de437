"""Reads the rows of a commit of another plan, number of ranks or engine into the present shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import StoreMismatchError
from tierstore.keys import split
from tierstore.placement import ShardingPlan, ShardingType, ShardPlacement
from tierstore.sharding.shards import RankShards, shard_name
from tierstore.store.directory import open_store
from tierstore.store.identity import read_identity
from tierstore.store.protocol import RowStore, StoredTable

_NO_CAP = 1 << 60


def restore(shards: RankShards, folder: Path, plan: ShardingPlan, commits: list[int]) -> None:
    """Read the rows of this rank's shards from the stores of all ranks of ``plan``, which all ranks must see.

    ``commits``: the commit of each store. All ranks call it, and take turns, since only one can open a store.
    """
    _check_tables(shards, folder, plan)
    env = shards.env
    turns = max(env.world_size, plan.world_size)
    for turn in range(turns):
        old = (env.rank + turn) % turns
        error: Exception | None = None
        try:
            if old < plan.world_size and commits[old]:
                _read_rank(shards, folder / f"rank{old:05d}", plan, old, commits[old])
        except Exception as raised:  # the other ranks must not wait
            error = raised
        env.share_error(error, StoreMismatchError)
    env.barrier()


def _check_tables(shards: RankShards, folder: Path, plan: ShardingPlan) -> None:
    """Raise StoreMismatchError unless every committed table is there unchanged; tables may be added."""
    wanted = {config.name: (config.num_embeddings, config.embedding_dim) for config in shards.configs}
    for table in plan.tables:
        committed = (table.num_embeddings, table.embedding_dim)
        if table.name not in wanted:
            raise StoreMismatchError(
                f"the commit in {folder} has rows of table {table.name!r}, which is not among "
                f"{list(wanted)}; give another path, or a collection with all of its tables"
            )
        if wanted[table.name] != committed:
            raise StoreMismatchError(
                f"table {table.name!r} is {wanted[table.name]}, but {committed} in the commit in {folder}; "
                "give another path, or the table as committed"
            )


def _read_rank(shards: RankShards, folder: Path, plan: ShardingPlan, rank: int, commit: int) -> None:
    identity = read_identity(folder)
    specs = {spec.name: spec for spec in identity.tables}
    with open_store(folder, identity.engine, identity.tables, _NO_CAP, keep=2, at=commit) as store:
        for table in plan.tables:
            if table.sharding_type is ShardingType.DATA_PARALLEL and rank:
                continue  # its replicas are equal
            parts = {
                shard_name(table.name, table.embedding_dim, shard): shard
                for shard in table.shards
                if shard.rank == rank
            }
            for name, shard in parts.items():
                _read_table(shards, store, table.name, specs[name], shard)


def _read_table(
    shards: RankShards, store: RowStore, table: str, spec: StoredTable, shard: ShardPlacement
) -> None:
    optimizer = shards.fused_optimizer.spec
    if dict(spec.optimizer) != optimizer.identity:
        raise StoreMismatchError(
            f"table {table!r} was committed with optimizer {dict(spec.optimizer)}, not {optimizer.identity}"
        )
    for own, whole in zip(shards.engine.specs, shards.engine.tables, strict=True):
        if whole.origin == table and (own.seed, own.init) != (spec.seed, spec.init):
            raise StoreMismatchError(
                f"the initial rows of table {table!r} were committed with seed {spec.seed}, "
                f"{dict(spec.init)}, not {own.seed}, {dict(own.init)}; give the same"
            )
    width = spec.embedding_dim
    for keys in store.keys(spec.index):
        rows = np.empty((len(keys), spec.row_bytes), np.uint8)
        assert store.read(keys, rows).all()
        values = rows.view(np.float32)
        ids = split(keys)[1]
        state = values[:, width : width + optimizer.state_floats(width)]
        _put(shards, table, ids, values[:, :width], state, shard.column_start)


def _put(
    shards: RankShards,
    table: str,
    ids: NDArray[np.int64],
    weight: NDArray[np.float32],
    state: NDArray[np.float32],
    column: int,
) -> None:
    """Write into this rank's shards the columns of ``weight`` and ``state``, which begin at ``column``."""
    per_row = shards.fused_optimizer.spec.state_per_row
    for shard in shards.of(table):
        begin = max(column, shard.columns.start)
        end = min(column + weight.shape[1], shard.columns.stop)
        at = np.flatnonzero(shard.holds(ids))
        if begin >= end or not len(at):
            continue
        new_weight, new_state = (np.array(part) for part in shards.engine.read_rows(shard.local, ids[at]))
        to, source = _shift(begin, end, shard.columns.start), _shift(begin, end, column)
        new_weight[:, to] = weight[at, source]
        if not per_row:
            new = new_state.reshape(len(at), -1, new_weight.shape[1])
            new[:, :, to] = state[at].reshape(len(at), -1, weight.shape[1])[:, :, source]
        elif begin == shard.columns.start:
            new_state[:] = state[at]
        shards.engine.write_rows(shard.local, ids[at], new_weight, new_state)


def _shift(begin: int, end: int, origin: int) -> slice:
    return slice(begin - origin, end - origin)
