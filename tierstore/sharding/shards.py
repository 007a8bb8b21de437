"""One collection's shards on this rank: stores, restores and shows their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore.cache.engine import Engine
from tierstore.config import TierConfig
from tierstore.modules.features import table_of
from tierstore.optim.fused import FusedOptimizer
from tierstore.placement import ShardingPlan, ShardingType, ShardPlacement
from tierstore.sharding.env import ShardingEnv


@dataclass(frozen=True)
class LocalShard:
    """A shard on this rank; ``local``: number of its table in the engine."""

    local: int
    columns: slice
    rows: tuple[int, int]
    replica: bool

    def holds(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of ``ids`` (n,) are rows of the shard."""
        return (ids >= self.rows[0]) & (ids < self.rows[1])


def shard_name(table: str, embedding_dim: int, shard: ShardPlacement) -> str:
    """Return the name of a shard's table in its rank's engine: the table's own if it has all columns."""
    if shard.columns == embedding_dim:
        return table
    return f"{table}[{shard.column_start}:{shard.column_start + shard.columns}]"


@dataclass(frozen=True)
class RankShards:
    """The shards of one collection that this rank has.

    ``configs``: of the whole tables. ``config``: as the user gave it, for one rank. ``engine``: of this
    rank's shards; a rank without any has one row that no rank asks for.
    """

    env: ShardingEnv
    plan: ShardingPlan
    configs: Sequence[Any]
    config: TierConfig
    engine: Engine
    fused_optimizer: FusedOptimizer

    def dtype_of(self, table: str) -> str:
        """Return the dtype of a table's weights."""
        return next(table_of(config).dtype for config in self.configs if config.name == table)

    def cuts_columns(self, table: str) -> bool:
        """Return whether a shard of the table has only some of its columns."""
        placement = self.plan.table(table)
        return any(shard.columns < placement.embedding_dim for shard in placement.shards if shard.rows)

    def of(self, table: str) -> Iterator[LocalShard]:
        """Yield the shards of a table."""
        placement = self.plan.table(table)
        for shard in placement.shards:
            if shard.rank == self.env.rank:
                yield LocalShard(
                    self.engine.table_index(shard_name(table, placement.embedding_dim, shard)),
                    slice(shard.column_start, shard.column_start + shard.columns),
                    (shard.row_start, shard.row_start + shard.rows),
                    placement.sharding_type is ShardingType.DATA_PARALLEL,
                )

    def rows_version(self, table: str) -> list[str]:
        """Return the versions of the table's shards."""
        return [self.engine.versions.of(shard.local) for shard in self.of(table)]

    def read(self, config: Any, ids: NDArray[np.int64], states: Sequence[str] | None) -> list[Tensor]:
        """Return rows of a whole table, (ids, columns) float32 each, by one exchange. All ranks call it.

        ``config``: of the table. ``states``: names of parts of the optimizer's state, of which parts that are
        one float per row have it in their first column; None for the weights.
        """
        spec = self.fused_optimizer.spec_of(config.name)
        dim, names = config.embedding_dim, [""] if states is None else states
        widths = [dim if states is None else spec.width(name, dim) for name in names]
        shape = len(names), len(ids), max(widths, default=0)
        found = torch.zeros(shape, dtype=torch.float32, device="cpu")
        for shard in self.of(config.name):
            if shard.replica and self.env.rank:
                continue
            at = np.flatnonzero(shard.holds(ids))
            weight, state = self.engine.read_rows(shard.local, ids[at])
            floats = np.hstack([weight, state])
            places = {"": slice(weight.shape[1]), **spec.state_columns(weight.shape[1])}
            for name, into in zip(names, found, strict=True):
                if name not in spec.per_row:
                    into[at, shard.columns] = torch.from_numpy(floats[:, places[name]])
                elif not shard.columns.start:
                    into[at, 0] = torch.from_numpy(floats[:, places[name].start])
        return list(self.env.sum_bits(found))

    def write(
        self,
        config: Any,
        ids: NDArray[np.int64],
        weight: NDArray[np.float32],
        state: NDArray[np.float32] | None,
    ) -> None:
        """Overwrite the rows of a table that are on this rank.

        ``weight`` (ids, dim) and ``state`` (ids, floats of state) are of whole rows; None keeps the state.
        """
        spec = self.fused_optimizer.spec_of(config.name)
        for shard in self.of(config.name):
            at = np.flatnonzero(shard.holds(ids))
            if not len(at):
                continue
            part = None
            if state is not None:
                part = spec.cut_state(state[at], config.embedding_dim, shard.columns)
            else:
                part = self.state_as_of_now(config.name, shard, ids[at])
            self.engine.write_rows(shard.local, ids[at], weight[at, shard.columns], part)

    def state_as_of_now(
        self, table: str, shard: LocalShard, ids: NDArray[np.int64]
    ) -> NDArray[np.float32] | None:
        """Return the state of rows of a shard whose weights are overwritten now, so that no earlier update
        decays them; None where the state stays."""
        if not self.fused_optimizer.spec_of(table).decays_all:
            return None
        return self.engine.state_as_of(shard.local, ids, self.fused_optimizer.num_updates)

    def touched_ids(self, table: str) -> Iterator[NDArray[np.int64]]:
        """Yield ids of a table that some tier of this rank holds a row of, (n,) each."""
        local = {shard.local for shard in self.of(table)}
        for number in sorted(local)[:1]:  # ranges of columns are touched together
            yield from self.engine.touched_ids(number)
