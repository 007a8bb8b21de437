"""The ways in which a table can be cut, and what each makes ranks exchange."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.placement import ShardingType
from tierstore.planner.constraints import ParameterConstraints
from tierstore.planner.costs import (
    FLOAT,
    Load,
    ShardCost,
    Workload,
    exchanged_ids,
    features_of,
    replica_cost,
    shard_cost,
    vectors,
    waited,
)
from tierstore.planner.tables import TableSpec
from tierstore.planner.topology import Topology

MIN_COLUMNS = 32
"""Fewest columns of a shard, unless ``min_partition`` says otherwise: torchrec's default is as small."""


@dataclass(frozen=True, eq=False)
class Cut:
    """``row_cuts`` x ``column_cuts`` equal shards, and where they may go.

    ``spread``: "any" rank (each shard another), "all" allowed ranks, or whole hosts: "host" for shards on
    different ranks of one host, "hosts" for one host per column cut, which holds its row cuts.
    ``everywhere``: seconds that every rank spends, whether or not it holds a shard.
    """

    kind: ShardingType
    row_cuts: int
    column_cuts: int
    spread: str
    cost: ShardCost
    everywhere: Load

    @property
    def shape(self) -> tuple[ShardingType, int, int]:
        return self.kind, self.row_cuts, self.column_cuts

    @property
    def shards(self) -> int:
        return self.row_cuts * self.column_cuts


def cuts_of(table: TableSpec, topology: Topology, work: Workload, demand: ParameterConstraints) -> list[Cut]:
    """Every cut that the demands allow, table-wise first. Raises ConfigError if there is none."""
    group = demand.device_group
    ranks = topology.world_size if group is None else len(set(group))
    hosts = _whole_hosts(topology, group)
    columns = table.embedding_dim // (demand.min_partition or MIN_COLUMNS)
    allowed = demand.sharding_types
    shapes = [
        (kind, rows, cols, spread)
        for kind, rows, cols, spread in _shapes(ranks, len(hosts), topology.ranks_per_host, columns)
        if (allowed is None or kind.value in allowed) and rows <= table.rows
    ]
    if allowed is None:
        shapes = _without_synonyms(shapes, topology)
    if group is not None:
        shapes = [shape for shape in shapes if shape[0] is not ShardingType.DATA_PARALLEL]
    if demand.tiers is not None or demand.min_hbm_bytes or demand.min_uvm_bytes:
        shapes = [s for s in shapes if s[0] is not ShardingType.DATA_PARALLEL or demand.stays_in_hbm]
    if not shapes:
        raise ConfigError(
            f"table {table.name!r}: its constraints allow no sharding type on {topology.hosts} x "
            f"{topology.ranks_per_host} ranks (asked for {list(allowed or ['any'])}, {table.num_embeddings} "
            f"rows, {table.embedding_dim} columns of which a shard has {demand.min_partition or MIN_COLUMNS})"
        )
    cuts = [_cut(table, topology, work, demand, ranks, *shape) for shape in shapes]
    # A replica that no device can hold is no way out, not even of a model that does not fit.
    fitting = [cut for cut in cuts if cut.cost.unique or cut.cost.fixed_hbm <= topology.hbm_per_rank]
    return fitting or cuts


Shape = tuple[ShardingType, int, int, str]


def _shapes(ranks: int, hosts: int, per_host: int, columns: int) -> list[Shape]:
    """All (kind, row cuts, column cuts, spread); ``columns`` is the largest number of column cuts."""
    result: list[Shape] = [(ShardingType.TABLE_WISE, 1, 1, "any")]
    result += [(ShardingType.COLUMN_WISE, 1, k, "any") for k in _powers(min(columns, ranks))]
    if ranks > 1:
        result.append((ShardingType.ROW_WISE, ranks, 1, "all"))
    if hosts and per_host > 1:
        result.append((ShardingType.TABLE_ROW_WISE, per_host, 1, "hosts"))
        result += [(ShardingType.TABLE_COLUMN_WISE, 1, k, "host") for k in _powers(min(columns, per_host))]
        result += [(ShardingType.GRID_SHARD, per_host, k, "hosts") for k in _powers(min(columns, hosts))]
    result.append((ShardingType.DATA_PARALLEL, 1, 1, "all"))
    return result


def _without_synonyms(shapes: list[Shape], topology: Topology) -> list[Shape]:
    """On one host the host-bound kinds are row-wise and column-wise under another name."""
    if topology.hosts > 1:
        return shapes
    bound = (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE)
    return [shape for shape in shapes if shape[0] not in bound]


def _powers(most: int) -> list[int]:
    """2, 4, 8 .. and ``most`` itself."""
    result = []
    k = 2
    while k <= most:
        result.append(k)
        k *= 2
    return result if not result or result[-1] == most else [*result, most]


def _whole_hosts(topology: Topology, group: object) -> list[int]:
    """Hosts all of whose ranks may hold the table."""
    if group is None:
        return list(range(topology.hosts))
    ranks = set(group)  # type: ignore[call-overload]
    per_host = topology.ranks_per_host
    return [h for h in range(topology.hosts) if ranks.issuperset(range(h * per_host, (h + 1) * per_host))]


def _cut(
    table: TableSpec,
    topology: Topology,
    work: Workload,
    demand: ParameterConstraints,
    ranks: int,
    kind: ShardingType,
    rows: int,
    columns: int,
    spread: str,
) -> Cut:
    if kind is ShardingType.DATA_PARALLEL:
        return Cut(kind, 1, 1, spread, replica_cost(table, topology, work), Load())
    shard, everywhere = _exchange(table, topology, work, rows, columns)
    cost = shard_cost(table, topology, work, demand, rows, columns, shard)
    return Cut(kind, rows, columns, spread, cost, everywhere)


def _exchange(
    table: TableSpec, topology: Topology, work: Workload, rows: int, columns: int
) -> tuple[Load, Load]:
    """Seconds of (a shard on its rank, every rank) for bytes received: ids and gradients come to the shard,
    outputs to everyone. Partial sums of row cuts come one per row cut to the rank that asked. And what it
    takes to ask, and to answer every rank, whatever the bytes."""
    near, far = topology.others()
    size = work.batch_size * topology.world_size
    out = vectors(table, size) * table.embedding_dim * FLOAT
    ids = exchanged_ids(table, size, table.accesses(size) / rows)
    grad = out / columns / (1 if table.pooled else rows)
    received = out * (rows if table.pooled else 1) / topology.world_size
    half = features_of(table) * topology.exchange("piece") / 2
    shard = _load(topology, (grad + ids) * near, (grad + ids) * far) + Load(half * topology.world_size)
    return shard, _load(topology, received * near, received * far) + Load(half * rows * columns)


def _load(topology: Topology, near: float, far: float) -> Load:
    intra, inter = near / topology.intra_host_bw, far / topology.inter_host_bw
    return Load(waited(topology, intra + inter), intra=intra, inter=inter)
