"""Plans made by hand, in torchrec's words. The planner makes the same kind of plan by cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from tierstore.errors import ConfigError
from tierstore.placement import ShardingPlan, ShardingType, ShardPlacement, TablePlacement

Rectangle = tuple[int, int, int, int, int]
"""rank, row_start, rows, column_start, columns"""


class TableSharding:
    """The sharding of one table: its type, and a function of (rows, columns, ranks, ranks per host)."""

    def __init__(
        self, sharding_type: ShardingType, rectangles: Callable[[int, int, int, int], list[Rectangle]]
    ) -> None:
        self.sharding_type = sharding_type
        self.rectangles = rectangles

    def place(self, table: Any, module: str, world_size: int, ranks_per_host: int) -> TablePlacement:
        """Return the placement of a table (a configuration), without bytes: TierConfig has the budgets."""
        rows, columns = table.num_embeddings, table.embedding_dim
        shards = tuple(
            ShardPlacement(*rectangle, hbm_bytes=0, uvm_bytes=0, ssd_bytes=0)
            for rectangle in self.rectangles(rows, columns, world_size, ranks_per_host)
            if rectangle[2] and rectangle[4]
        )
        return TablePlacement(
            table.name, self.sharding_type, shards, module=module, num_embeddings=rows, embedding_dim=columns
        )


def data_parallel() -> TableSharding:
    """Place the whole table on every rank."""
    return TableSharding(
        ShardingType.DATA_PARALLEL,
        lambda rows, columns, world, _: [(r, 0, rows, 0, columns) for r in range(world)],
    )


def table_wise(rank: int) -> TableSharding:
    """Place the whole table on one rank."""
    _check_integers("ranks", [rank])
    return TableSharding(ShardingType.TABLE_WISE, lambda rows, columns, *_: [(rank, 0, rows, 0, columns)])


def row_wise(sizes: Sequence[int] | None = None) -> TableSharding:
    """Place consecutive rows on every rank: ``sizes`` rows, or equal shares (the last shares may be
    shorter)."""

    _check_integers("sizes", sizes)

    def cut(rows: int, columns: int, world: int, _: int) -> list[Rectangle]:
        parts = _parts(rows, world, sizes, "rows")
        return [(rank, at, size, 0, columns) for rank, (at, size) in enumerate(parts)]

    return TableSharding(ShardingType.ROW_WISE, cut)


def column_wise(ranks: Sequence[int], sizes: Sequence[int] | None = None) -> TableSharding:
    """Place consecutive columns on ``ranks``, where a rank may occur several times: ``sizes`` columns, or
    equal shares."""

    _check_integers("ranks", ranks)
    _check_integers("sizes", sizes)

    def cut(rows: int, columns: int, *_: int) -> list[Rectangle]:
        parts = _parts(columns, len(ranks), sizes, "columns")
        return [(rank, 0, rows, at, size) for rank, (at, size) in zip(ranks, parts, strict=True)]

    return TableSharding(ShardingType.COLUMN_WISE, cut)


def table_row_wise(host: int, sizes: Sequence[int] | None = None) -> TableSharding:
    """Place consecutive rows on the ranks of one host."""

    _check_integers("hosts", [host])
    _check_integers("sizes", sizes)

    def cut(rows: int, columns: int, _: int, local: int) -> list[Rectangle]:
        parts = _parts(rows, local, sizes, "rows")
        return [(host * local + i, at, size, 0, columns) for i, (at, size) in enumerate(parts)]

    return TableSharding(ShardingType.TABLE_ROW_WISE, cut)


def table_column_wise(host: int, sizes: Sequence[int] | None = None) -> TableSharding:
    """Place consecutive columns on the ranks of one host."""

    _check_integers("hosts", [host])
    _check_integers("sizes", sizes)

    def cut(rows: int, columns: int, _: int, local: int) -> list[Rectangle]:
        parts = _parts(columns, local, sizes, "columns")
        return [(host * local + i, 0, rows, at, size) for i, (at, size) in enumerate(parts)]

    return TableSharding(ShardingType.TABLE_COLUMN_WISE, cut)


def grid_shard(hosts: Sequence[int], sizes: Sequence[int] | None = None) -> TableSharding:
    """Place consecutive columns on ``hosts``, each cut by rows over the host's ranks."""

    _check_integers("hosts", hosts)
    _check_integers("sizes", sizes)

    def cut(rows: int, columns: int, _: int, local: int) -> list[Rectangle]:
        return [
            (host * local + i, row, size, column, width)
            for host, (column, width) in zip(
                hosts, _parts(columns, len(hosts), sizes, "columns"), strict=True
            )
            for i, (row, size) in enumerate(_parts(rows, local, None, "rows"))
        ]

    return TableSharding(ShardingType.GRID_SHARD, cut)


def construct_plan(
    module: Any,
    cuts: Mapping[str, TableSharding],
    world_size: int,
    ranks_per_host: int | None = None,
    name: str = "",
) -> ShardingPlan:
    """Return the plan that cuts every table of ``module`` (a collection, or its configurations) by ``cuts``.

    ``name``: the module's path in the model. Raises ConfigError for a table without a cut or a cut without a
    table, for an object that is no cut, for shares that do not add up, and for hosts with different numbers
    of ranks.
    """
    tables = configs_of(module)
    names = [table.name for table in tables]
    wrong = [n for n in names if n not in cuts] or [n for n in cuts if n not in names]
    if wrong:
        raise ConfigError(f"cuts are given for {sorted(cuts)}, but the tables are {sorted(names)}")
    for table_name, cut in cuts.items():
        if not isinstance(cut, TableSharding):
            raise ConfigError(f"the cut of table {table_name!r} is {cut!r}; use row_wise() or another")
    local = world_size if ranks_per_host is None else ranks_per_host
    if not all(isinstance(n, Integral) and n > 0 for n in (world_size, local)) or world_size % local:
        raise ConfigError(
            f"{world_size!r} ranks, {local!r} per host: give integers of which one divides the other"
        )
    placed = tuple(cuts[table.name].place(table, name, world_size, local) for table in tables)
    return ShardingPlan(placed, world_size, local)


def configs_of(module: Any) -> list[Any]:
    """Return the table configurations of a collection (ours or torchrec's), or a list of configurations as it
    is."""
    for method in ("embedding_bag_configs", "embedding_configs"):
        if hasattr(module, method):
            return list(getattr(module, method)())
    return list(module)


def _check_integers(what: str, values: Any) -> None:
    """Raise ConfigError unless ``values`` is None or a sequence of integers, not empty."""
    if values is None:
        return
    if not isinstance(values, Sequence) or not values or not all(isinstance(v, Integral) for v in values):
        raise ConfigError(f"{what} must be a list of integers, got {values!r}")


def _parts(total: int, count: int, sizes: Sequence[int] | None, what: str) -> list[tuple[int, int]]:
    """Return (start, size) of ``count`` consecutive parts."""
    if sizes is None:
        share = -(-total // count)
        sizes = [max(0, min(share, total - i * share)) for i in range(count)]
    if len(sizes) != count or sum(sizes) != total or min(sizes) < 0:
        raise ConfigError(f"{list(sizes)} {what} do not divide {total} among {count} parts")
    starts = [sum(sizes[:i]) for i in range(count)]
    return list(zip(starts, sizes, strict=True))
