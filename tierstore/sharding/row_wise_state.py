"""Row-wise Adagrad, and partially row-wise Adam, of tables that are cut by columns: their state of a row
needs the whole row's gradient.

Each shard sums the squares of its own columns' gradients. Shards of the same rows exchange these sums and add
them up in the order of the columns, so that every shard keeps the state of an uncut row (up to rounding,
since the sum over columns has another order). With ``check_gradients`` tables of all optimizers take part: a
sum that is NaN lets every shard leave the row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tierstore.keys import make_keys
from tierstore.modules.parts import Part
from tierstore.placement import ShardPlacement
from tierstore.sharding.shards import RankShards, shard_name

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class _Pair:
    """Two shards of a table with common rows and different columns, as numbers of the table's shards."""

    table: int
    first: int
    second: int
    rows: tuple[int, int]


class _Used:
    """The rows of one shard of this rank that a batch uses. ``at``: where they are among the part's unique
    rows, by ascending id; ``squares``: by column range, of the whole table's, their sums."""

    def __init__(self, part: int, at: NDArray[np.intp], ids: NDArray[np.uint64]) -> None:
        self.part, self.at, self.ids = part, at, ids
        self.squares: dict[int, FloatArray] = {}

    def between(self, rows: tuple[int, int]) -> slice:
        first, end = np.searchsorted(self.ids, np.array(rows, np.uint64))
        return slice(int(first), int(end))


class RowWiseStateExchange:
    """The exchange of the squares of gradients between a collection's ranks."""

    def __init__(self, shards: RankShards) -> None:
        self._env, plan, spec_of = shards.env, shards.plan, shards.fused_optimizer.spec_of
        self._tables = [
            table
            for table in plan.tables
            if any(s.columns < table.embedding_dim for s in table.shards)
            and (shards.config.check_gradients or spec_of(table.name).needs_mean_square)
        ]
        self._local = {
            (number, position): shards.engine.table_index(shard_name(table.name, table.embedding_dim, shard))
            for number, table in enumerate(self._tables)
            for position, shard in enumerate(table.shards)
            if shard.rank == self._env.rank and shard.rows
        }
        self._pairs = [
            _Pair(number, i, j, rows)
            for number, table in enumerate(self._tables)
            for i, first in enumerate(table.shards)
            for j, second in enumerate(table.shards)
            if first.column_start != second.column_start and (rows := _common_rows(first, second))
        ]

    @classmethod
    def of(cls, shards: RankShards) -> RowWiseStateExchange | None:
        """Return the exchange of a collection; None if no row's update depends on columns of other shards."""
        found = cls(shards)
        return found if found._tables else None

    def mean_squares(
        self, parts: Sequence[Part], squares_of: Callable[[int], FloatArray]
    ) -> list[FloatArray | None]:
        """Return by part the mean square of the whole gradient of each unique row; None for parts without cut
        tables.

        ``squares_of(part)``: sums over the columns that are here, float32 (unique rows,). The ranks that have
        shards of a cut table all call it, at the same point of the step.
        """
        used = self._used(parts)
        own = {part: squares_of(part) for part in {use.part for use in used.values()}}
        for (table, shard), use in used.items():
            use.squares[self._shard(table, shard).column_start] = own[use.part][use.at]
        self._exchange(used)
        means: list[FloatArray | None] = [None] * len(parts)
        for part, squares in own.items():
            means[part] = squares / np.float32(parts[part].group.layout.dim)
        for (table, _), use in used.items():
            columns = [use.squares[column] for column in sorted(use.squares)]
            total = columns[0].copy()
            for squares in columns[1:]:
                total += squares
            mean = means[use.part]
            assert mean is not None
            mean[use.at] = total / np.float32(self._tables[table].embedding_dim)
        return means

    def _shard(self, table: int, position: int) -> ShardPlacement:
        return self._tables[table].shards[position]

    def _used(self, parts: Sequence[Part]) -> dict[tuple[int, int], _Used]:
        """Return the rows that a batch uses, by (table, shard) of this rank."""
        used = {}
        for (table, position), local in self._local.items():
            shard = self._shard(table, position)
            low, high = make_keys(local, [shard.row_start, shard.row_start + shard.rows - 1])
            for number, part in enumerate(parts):
                keys = part.batch.unique
                at = np.flatnonzero((keys >= low) & (keys <= high))
                if len(at):
                    at = at[np.argsort(keys[at])]
                    used[table, position] = _Used(number, at, keys[at] - low + np.uint64(shard.row_start))
        return used

    def _exchange(self, used: dict[tuple[int, int], _Used]) -> None:
        """Send this rank's sums to the owners of other columns, and put the owners' sums into ``used``."""
        leaving: dict[int, list[FloatArray]] = {}
        awaited: dict[int, list[tuple[_Pair, _Used, slice]]] = {}
        for pair in self._pairs:
            sender, receiver = used.get((pair.table, pair.first)), used.get((pair.table, pair.second))
            source, target = self._shard(pair.table, pair.first), self._shard(pair.table, pair.second)
            if sender is not None and target.rank != self._env.rank:
                rows = sender.between(pair.rows)
                leaving.setdefault(target.rank, []).append(sender.squares[source.column_start][rows])
            if receiver is not None:
                awaited.setdefault(source.rank, []).append((pair, receiver, receiver.between(pair.rows)))
        for pair, receiver, rows in awaited.pop(self._env.rank, []):
            sender = used[pair.table, pair.first]
            column = self._shard(pair.table, pair.first).column_start
            own = sender.squares[column][sender.between(pair.rows)]
            self._put(receiver, column, rows, own)
        sizes = {rank: sum(rows.stop - rows.start for *_, rows in wanted) for rank, wanted in awaited.items()}
        given = {rank: torch.from_numpy(np.concatenate(pieces)) for rank, pieces in leaving.items()}
        for rank, arrived in self._env.send_and_receive(given, sizes).items():
            at = 0
            for pair, receiver, rows in awaited[rank]:
                end = at + rows.stop - rows.start
                self._put(
                    receiver, self._shard(pair.table, pair.first).column_start, rows, arrived[at:end].numpy()
                )
                at = end

    @staticmethod
    def _put(receiver: _Used, column: int, rows: slice, squares: FloatArray) -> None:
        if column not in receiver.squares:
            receiver.squares[column] = np.zeros(len(receiver.ids), np.float32)
        receiver.squares[column][rows] = squares


def _common_rows(first: ShardPlacement, second: ShardPlacement) -> tuple[int, int] | None:
    begin = max(first.row_start, second.row_start)
    end = min(first.row_start + first.rows, second.row_start + second.rows)
    return (begin, end) if begin < end else None
