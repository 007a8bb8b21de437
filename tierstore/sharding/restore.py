"""Reads the rows of a commit of another plan, number of ranks or engine into the present shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.cache.tiers.codec import decoded
from tierstore.errors import StoreMismatchError
from tierstore.keys import rows_by_table
from tierstore.optim import OptimizerSpec
from tierstore.placement import ShardingPlan, ShardingType, ShardPlacement
from tierstore.row_format import WIDE
from tierstore.sharding.shards import RankShards, shard_name
from tierstore.store.directory import open_store
from tierstore.store.identity import read_identity
from tierstore.store.protocol import StoredTable

_NO_CAP = 1 << 60
Rows = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Weights (n, columns) and optimizer state (n, floats)."""


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
    parts: dict[int, tuple[str, StoredTable, ShardPlacement]] = {}
    for table in plan.tables:
        if table.sharding_type is ShardingType.DATA_PARALLEL and rank:
            continue  # its replicas are equal
        for shard in table.shards:
            if shard.rank == rank:
                spec = specs[shard_name(table.name, table.embedding_dim, shard)]
                _check_spec(shards, table.name, spec)
                parts[spec.index] = table.name, spec, shard
    with open_store(folder, ssd_bytes=_NO_CAP, keep=2, at=commit) as store:
        for keys, rows in store.scan([*parts]):
            for index, ids, of_table in rows_by_table(keys, rows):
                name, spec, shard = parts[index]
                width = spec.embedding_dim
                floats = shards.fused_optimizer.spec_of(name).state_floats(width)
                values = decoded(spec.format, width, floats, of_table).view(np.float32)
                state = values[:, width : width + floats]
                _put(shards, name, ids, values[:, :width], state, shard.column_start)


def _check_spec(shards: RankShards, table: str, spec: StoredTable) -> None:
    """Raise StoreMismatchError unless ``spec`` has this optimizer and these initial rows."""
    optimizer = shards.fused_optimizer.spec_of(table)
    if dict(spec.optimizer) != optimizer.identity:
        raise StoreMismatchError(
            f"table {table!r} was committed with optimizer {dict(spec.optimizer)}, not {optimizer.identity}"
        )
    dtype = shards.dtype_of(table)
    if dtype != WIDE.weights and spec.weight_dtype != dtype:
        raise StoreMismatchError(
            f"table {table!r} was committed with {spec.weight_dtype} weights, and is {dtype} now; give "
            "another path, or the table as committed"
        )
    for own, whole in zip(shards.engine.specs, shards.engine.tables, strict=True):
        if whole.origin == table and (own.seed, own.init) != (spec.seed, spec.init):
            raise StoreMismatchError(
                f"the initial rows of table {table!r} were committed with seed {spec.seed}, "
                f"{dict(spec.init)}, not {own.seed}, {dict(own.init)}; give the same"
            )


def _put(
    shards: RankShards,
    table: str,
    ids: NDArray[np.int64],
    weight: NDArray[np.float32],
    state: NDArray[np.float32],
    column: int,
) -> None:
    """Write into this rank's shards the columns of ``weight`` and ``state``, which begin at ``column``."""
    spec = shards.fused_optimizer.spec_of(table)
    for shard in shards.of(table):
        begin = max(column, shard.columns.start)
        end = min(column + weight.shape[1], shard.columns.stop)
        at = np.flatnonzero(shard.holds(ids))
        if begin >= end or not len(at):
            continue
        to, source = _shift(begin, end, shard.columns.start), _shift(begin, end, column)
        new_weight, new_state = weight[at, source], spec.cut_state(state[at], weight.shape[1], source)
        if (begin, end) != (shard.columns.start, shard.columns.stop):
            old = shards.engine.read_rows(shard.local, ids[at])
            new_weight, new_state = _beside(spec, old, to, (new_weight, new_state))
        shards.engine.write_rows(shard.local, ids[at], new_weight, new_state)


def _beside(spec: OptimizerSpec, old: Rows, to: slice, new: Rows) -> Rows:
    """Return the rows ``old`` with the weights and states ``new`` in the columns ``to``."""
    weight, state = (np.array(part) for part in old)
    weight[:, to] = new[0]
    width, cut = weight.shape[1], new[0].shape[1]
    given = spec.state_columns(cut)
    for name, place in spec.state_columns(width).items():
        part = new[1][:, given[name].start - cut : given[name].stop - cut]
        begin = place.start - width
        if name not in spec.per_row:
            state[:, begin + to.start : begin + to.stop] = part
        elif to.start == 0:
            state[:, begin : begin + 1] = part
    return weight, state


def _shift(begin: int, end: int, origin: int) -> slice:
    return slice(begin - origin, end - origin)
