"""The plan of a collection as a list of requests between ranks, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from tierstore.cache.engine import Table
from tierstore.errors import ConfigError
from tierstore.modules.features import Feature, table_of
from tierstore.placement import ShardingPlan, ShardingType, TablePlacement
from tierstore.sharding.shards import shard_name


@dataclass(frozen=True)
class Request:
    """One feature looked up in one shard. ``table``: the shard's name in its rank's engine.

    ``rows``: (first, end) of a shard that has not all rows; ``replica``: every rank has the table.
    """

    feature: int
    rank: int
    table: str
    column: int
    width: int
    rows: tuple[int, int] | None
    replica: bool


class Routing:
    """Requests by rank, in the order in which they are sent: by feature, then by shard."""

    def __init__(self, features: Sequence[Feature], plan: ShardingPlan, rank: int) -> None:
        self.features = list(features)
        self.plan = plan
        self.rank = rank
        self.world_size = plan.world_size
        for name in dict.fromkeys(feature.config.name for feature in features):
            check_placement_of(plan.table(name), plan.world_size, plan.ranks_per_host)
        _check_shard_names(plan)
        self.by_rank: list[list[Request]] = [[] for _ in range(plan.world_size)]
        for number, feature in enumerate(features):
            for request in _requests(number, plan.table(feature.config.name)):
                self.by_rank[request.rank].append(request)
        self.own = self.by_rank[rank]
        self.cut_by_rows = [False] * len(self.features)
        self.has_whole = [False] * len(self.features)
        """By feature, whether any shard has all rows; ``cut_by_rows``: whether any shard has a part of the
        rows."""
        for request in (r for requests in self.by_rank for r in requests):
            self.cut_by_rows[request.feature] |= request.rows is not None
            self.has_whole[request.feature] |= request.rows is None
        self.row_ranges = [self._row_ranges(number) for number in range(len(self.features))]
        self.answers = [r for requests in self.by_rank for r in requests if not r.replica]
        """The answers that this rank gets, in order of arrival; answers of its own replicas follow."""
        self.answers += [r for r in self.own if r.replica]
        self.columns = self._columns()

    def _row_ranges(self, feature: int) -> list[list[tuple[int, int]]]:
        """Return the different ways in which ranges of a feature's columns are cut by rows."""
        cuts: dict[int, list[tuple[int, int]]] = {}
        for request in (r for requests in self.by_rank for r in requests if r.feature == feature):
            if request.rows is not None:
                cuts.setdefault(request.column, []).append(request.rows)
        return [list(cut) for cut in dict.fromkeys(tuple(sorted(cut)) for cut in cuts.values())]

    def _columns(self) -> list[list[list[int]]]:
        """Return for every feature and range of its columns the numbers of the answers, by first row."""
        found: list[dict[int, list[int]]] = [{} for _ in self.features]
        for number, answer in enumerate(self.answers):
            found[answer.feature].setdefault(answer.column, []).append(number)
        first = [answer.rows[0] if answer.rows else 0 for answer in self.answers]
        return [
            [sorted(numbers, key=first.__getitem__) for _, numbers in sorted(columns.items())]
            for columns in found
        ]

    def local_tables(self, configs: Sequence[Any]) -> list[Table]:
        """Return the tables of this rank's engine: one per range of columns, with ids of the whole table."""
        found: dict[str, Table] = {}
        for config in configs:
            whole = table_of(config)
            for shard in self.plan.table(config.name).shards:
                if shard.rank != self.rank:
                    continue
                name = shard_name(config.name, config.embedding_dim, shard)
                rows = shard.rows + (found[name].rows or 0 if name in found else 0)
                part: dict[str, Any] = {
                    "embedding_dim": shard.columns,
                    "column": shard.column_start,
                    "rows": rows,
                }
                found[name] = replace(whole, name=name, origin=whole.name, **part)
        return list(found.values())


def _check_shard_names(plan: ShardingPlan) -> None:
    """Raise ConfigError if a shard would have another table's name, so that lookups would find the wrong
    rows."""
    names = {table.name for table in plan.tables}
    for table in plan.tables:
        for shard in table.shards:
            name = shard_name(table.name, table.embedding_dim, shard)
            if name != table.name and name in names:
                raise ConfigError(
                    f"columns of table {table.name!r} are a table called {name!r} on their rank, and another "
                    "table has this name; rename one of the two, or cut the first by rows"
                )


def _requests(number: int, table: TablePlacement) -> list[Request]:
    replica = table.sharding_type is ShardingType.DATA_PARALLEL
    return [
        Request(
            number,
            shard.rank,
            shard_name(table.name, table.embedding_dim, shard),
            shard.column_start,
            shard.columns,
            None if shard.rows == table.num_embeddings else (shard.row_start, shard.row_start + shard.rows),
            replica,
        )
        for shard in sorted(table.shards, key=lambda s: (s.column_start, s.row_start, s.rank))
    ]


def check_placement_of(table: TablePlacement, world_size: int, ranks_per_host: int) -> None:
    """Raise ConfigError unless the shards cover every row and column of the table once (data parallel: on
    every rank), and fit the sharding type."""

    def wrong(why: str) -> ConfigError:
        return ConfigError(
            f"plan of table {table.name!r} ({table.sharding_type}): {why}; make the plan again"
        )

    for shard in table.shards:
        for name, value in vars(shard).items():
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
                raise wrong(f"{name} of a shard is {value!r} and not a whole number")
        if shard.own > 1:
            raise wrong(f"own of a shard is {shard.own!r} and not 0 or 1")
    if not all(0 <= shard.rank < world_size for shard in table.shards):
        raise wrong(f"it names a rank outside [0, {world_size})")
    if table.sharding_type is ShardingType.DATA_PARALLEL:
        everything = (0, table.num_embeddings, 0, table.embedding_dim)
        whole = [s for s in table.shards if (s.row_start, s.rows, s.column_start, s.columns) == everything]
        if sorted(s.rank for s in whole) != list(range(world_size)) or len(whole) < len(table.shards):
            raise wrong("every rank must have the whole table")
        return
    pieces: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for shard in table.shards:
        piece = (shard.column_start, shard.column_start + shard.columns)
        pieces.setdefault(piece, []).append((shard.row_start, shard.row_start + shard.rows))
    if not _tiles(list(pieces), table.embedding_dim):
        raise wrong(f"its shards do not cover the {table.embedding_dim} columns once each")
    for rows in pieces.values():
        if not _tiles(rows, table.num_embeddings):
            raise wrong(f"its shards do not cover the {table.num_embeddings} rows once each")
    if why := _otherwise_cut(table, ranks_per_host):
        raise wrong(why)


_WHOLE_ROWS = {ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE}
_WHOLE_COLUMNS = {ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE}
_ONE_HOST = {ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE}


def _otherwise_cut(table: TablePlacement, ranks_per_host: int) -> str:
    """Return why the shards do not fit the sharding type; empty if they fit."""
    kind, shards = table.sharding_type, table.shards
    if kind in _WHOLE_ROWS and any(shard.columns < table.embedding_dim for shard in shards):
        return "its shards must have all columns"
    if kind in _WHOLE_COLUMNS and any(shard.rows < table.num_embeddings for shard in shards):
        return "its shards must have all rows"
    if kind in _ONE_HOST and len({shard.rank // ranks_per_host for shard in shards}) > 1:
        return f"its ranks must be of one host, which has {ranks_per_host}"
    return ""


def _tiles(ranges: list[tuple[int, int]], total: int) -> bool:
    at = 0
    for begin, end in sorted(ranges):
        if begin != at or end <= begin:
            return False
        at = end
    return at == total
