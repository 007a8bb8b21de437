"""The ways in which a table can be sharded, and what a shard needs and takes (docs/planner.md derives it)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tierstore.placement import MOST_STORE_BYTES, ShardingType
from tierstore.planner.checks import require
from tierstore.planner.constraints import ParameterConstraints
from tierstore.planner.costs import DISK_SLACK, FLOAT, WRITE_AMPLIFICATION, Problem, index_bytes, slot_bytes
from tierstore.planner.curves import MissCurve
from tierstore.planner.tables import WHOLE_ROWS, TableSpec
from tierstore.planner.topology import Topology
from tierstore.rounds import FloatArray, read_bytes, record_bytes

MIN_COLUMNS = 32
"""Fewest columns of a shard, unless ``min_partition`` says otherwise: torchrec's default is as small."""
_SYNONYMS = ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE
_CUTS = ShardingType.COLUMN_WISE, ShardingType.ROW_WISE, *_SYNONYMS, ShardingType.GRID_SHARD
"""Sharding types that divide rows or columns, where there are several ranks."""
_INT32_ROWS = 1 << 31


@dataclass(frozen=True, eq=False)
class ShardCost:
    """What one shard needs and takes.

    - ``load``: seconds per step that do not depend on caches, float64 (4,): compute, index, intra, inter.
    - ``curve``: misses per unique row, by rows held. Device memory has ``hbm_floor`` of them at least;
      ``memory_floor`` is the least that device and host hold together.
    - ``link_s``, ``ssd_s``: seconds of the rank's link, of the host's drives, per missing row. ``policy_s``:
      seconds of the link per step, unless all rows are in device memory.
    - ``slot_bytes``, ``host_slot_bytes``, ``stored_bytes``: of a row in device and host memory, in the store.
    - ``index_bytes`` (host memory) and ``ssd_bytes`` are due unless all rows stay in memory; ``read_ahead``
      is the part of ``index_bytes`` for rows read ahead. ``fixed_hbm`` and ``fixed_host`` are buffers.
      ``max_ssd_bytes``: bytes that a store has a use for, if training uses all rows of the table after all.

    Of a replica no unique rows are counted: its rows are all in device memory.
    """

    rows: int
    load: FloatArray
    curve: MissCurve
    hbm_floor: float
    memory_floor: float
    fixed_hbm: int
    fixed_host: int = 0
    slot_bytes: float = 0.0
    host_slot_bytes: float = 0.0
    stored_bytes: int = 0
    unique: float = 0.0
    index_bytes: int = 0
    read_ahead: int = 0
    ssd_bytes: int = 0
    max_ssd_bytes: int = 0
    link_s: float = 0.0
    policy_s: float = 0.0
    ssd_s: float = 0.0


@dataclass(frozen=True, eq=False)
class ShardingOption:
    """``row_cuts`` x ``column_cuts`` equal shards, and where they may go.

    ``spread``: "any" rank (each shard another), "all" allowed ranks, or whole hosts: "host" for shards on
    different ranks of one host, "hosts" for one host per column cut, which holds its row cuts.
    ``everywhere``: seconds that every rank spends, whether or not it holds a shard, as ``ShardCost.load``.
    """

    kind: ShardingType
    row_cuts: int
    column_cuts: int
    spread: str
    cost: ShardCost
    everywhere: FloatArray

    @property
    def shape(self) -> Shape:
        return self.kind, self.row_cuts, self.column_cuts, self.spread

    @property
    def shards(self) -> int:
        return self.row_cuts * self.column_cuts


Shape = tuple[ShardingType, int, int, str]
Ranks = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Placed:
    """A table's option on its ranks."""

    table: int
    option: ShardingOption
    ranks: Sequence[int]


def options_of(problem: Problem, number: int) -> list[ShardingOption]:
    """Return every option that the demands on a table allow, table-wise first.

    Raises ConfigError if there is none.
    """
    table, demand, topology = problem.tables[number], problem.demands[number], problem.topology
    # On one host the synonyms are other names for row-wise and column-wise.
    every = [kind for kind in ShardingType if topology.hosts > 1 or kind not in _SYNONYMS]
    kinds = set(every if demand.sharding_types is None else map(ShardingType, demand.sharding_types))
    in_tiers = (demand.tiers is not None or demand.promises_memory) and not demand.stays_in_hbm
    if demand.device_group is not None or in_tiers:
        kinds -= {ShardingType.DATA_PARALLEL}
    shapes = [one for one in _shapes(table, demand, topology) if one[0] in kinds and one[1] <= table.rows]
    whole_rows = f"; {table.optimizer} needs whole rows" if table.optimizer in WHOLE_ROWS else ""
    require(
        shapes,
        f"table {table.name!r}: its constraints allow no sharding type on {topology.hosts} x "
        f"{topology.ranks_per_host} ranks (asked for {list(demand.sharding_types or ['any'])}, "
        f"{table.num_embeddings} rows, {table.embedding_dim} columns of which a shard has "
        f"{demand.min_partition or MIN_COLUMNS}{whole_rows})",
    )
    options = [option_of(problem, number, shape) for shape in shapes]
    # An option that no device can hold does not help, even where the model does not fit.
    least = [one.cost.hbm_floor * one.cost.slot_bytes + one.cost.fixed_hbm for one in options]
    fitting = [one for one, size in zip(options, least, strict=True) if size <= topology.hbm_per_rank]
    return fitting or options


def option_of(problem: Problem, number: int, shape: Shape) -> ShardingOption:
    """Return the option of a table that has this shape."""
    table, (kind, rows, columns, _) = problem.tables[number], shape
    if kind is ShardingType.DATA_PARALLEL:
        return ShardingOption(*shape, _replica_cost(problem, number), np.zeros(4))
    load, everywhere = _exchange(problem, table, rows, columns)
    return ShardingOption(*shape, _shard_cost(problem, number, (rows, columns), load), everywhere)


def _shapes(table: TableSpec, demand: ParameterConstraints, topology: Topology) -> Iterable[Shape]:
    world, per_host = range(topology.world_size), topology.ranks_per_host
    group = set(world if demand.device_group is None else demand.device_group)
    hosts = sum(group.issuperset(world[first : first + per_host]) for first in world[::per_host])
    ranks, columns = len(group), table.embedding_dim // (demand.min_partition or MIN_COLUMNS)
    if table.optimizer in WHOLE_ROWS:
        columns = 1
    yield ShardingType.TABLE_WISE, 1, 1, "any"
    yield from ((ShardingType.COLUMN_WISE, 1, k, "any") for k in _powers(min(columns, ranks)))
    if ranks > 1:
        yield ShardingType.ROW_WISE, ranks, 1, "all"
    if hosts and per_host > 1:
        yield ShardingType.TABLE_ROW_WISE, per_host, 1, "hosts"
        yield from ((ShardingType.TABLE_COLUMN_WISE, 1, k, "host") for k in _powers(min(columns, per_host)))
        yield from ((ShardingType.GRID_SHARD, per_host, k, "hosts") for k in _powers(min(columns, hosts)))
    if topology.world_size == 1 and demand.sharding_types is not None:  # scripts keep their cuts there
        yield from ((kind, 1, 1, "any") for kind in _CUTS)
    yield ShardingType.DATA_PARALLEL, 1, 1, "all"


def _powers(most: int) -> Sequence[int]:
    """Return 2, 4, 8 .. and ``most`` itself."""
    return sorted({1 << k for k in range(1, most.bit_length())} | {most}) if most > 1 else []


def _shard_cost(problem: Problem, number: int, cuts: tuple[int, int], exchange: FloatArray) -> ShardCost:
    """Return the cost of one of ``cuts`` (rows, columns) equal shards; ``exchange`` is part of its load."""
    table, demand = problem.tables[number], problem.demands[number]
    topology, work, (row_cuts, column_cuts) = problem.topology, problem.work, cuts
    rows, columns = -(-table.rows // row_cuts), -(-table.embedding_dim // column_cuts)
    size, host, stored = (table.row_bytes(tier, columns) for tier in ("hbm", "uvm", "ssd"))
    record, slot, pieces = record_bytes(stored), slot_bytes(size), row_cuts * column_cuts
    unique, curve = table.demand(problem.global_batch)
    unique, accesses = unique / row_cuts, table.accesses(problem.global_batch) / row_cuts
    curve = MissCurve(curve.rows * (rows / float(curve.rows[-1])), curve.misses)
    pinned, ahead = (work.depth + 1) * unique, int(rows * size * problem.read_ahead_share)
    floor = min(rows, pinned)
    outputs = _vectors(problem, table) / (1 if table.pooled else row_cuts)
    own_hbm, own_uvm = demand.min_hbm_bytes / slot, demand.min_uvm_bytes / slot_bytes(host)
    own_rows = max(own_hbm / pieces, demand.hbm_load_factor * rows)
    hbm_floor = rows if demand.stays_in_hbm else max(floor, min(rows, own_rows))
    in_memory = demand.stays_in_memory or topology.ssd_per_host == 0
    moved = 2 * accesses * columns * FLOAT + 2 * unique * size
    read = topology.read_seconds(read_bytes(record)) / (work.rows_per_read or 1.0)
    return ShardCost(
        rows=rows,
        load=exchange + _work_seconds(topology, accesses, unique, moved),
        curve=curve,
        hbm_floor=hbm_floor,
        memory_floor=rows if in_memory else max(floor, hbm_floor, min(rows, (own_hbm + own_uvm) / pieces)),
        fixed_hbm=int((work.depth + 1) * _id_bytes(problem, table, accesses) + 2 * outputs * columns * FLOAT),
        fixed_host=int(pinned * curve.at(floor) * stored),
        slot_bytes=slot,
        host_slot_bytes=slot_bytes(host),
        stored_bytes=stored,
        unique=unique,
        index_bytes=index_bytes(rows) + ahead,
        read_ahead=ahead,
        ssd_bytes=int(rows * record * DISK_SLACK),
        max_ssd_bytes=int(table.num_embeddings / row_cuts * record * MOST_STORE_BYTES),
        link_s=2 * host / topology.host_link_bw + topology.row_seconds["link"],
        policy_s=unique * topology.row_seconds["policy"],
        ssd_s=read + WRITE_AMPLIFICATION * record / topology.ssd_write_bw,
    )


def _replica_cost(problem: Problem, number: int) -> ShardCost:
    """Return the cost of one replica of a data-parallel table, whose rows are all in device memory.

    Every rank gets the ids and gradients of all ranks and makes the same update.
    """
    topology, table = problem.topology, problem.tables[number]
    accesses, (unique, _) = table.accesses(problem.global_batch), table.demand(problem.global_batch)
    ids, width = _id_bytes(problem, table, accesses), table.embedding_dim * FLOAT
    gradients = _vectors(problem, table) * width
    moved = (accesses + accesses / topology.world_size) * width + 2 * unique * table.row_bytes()
    load = _work_seconds(topology, accesses, unique, moved) + _received(topology, ids + gradients)
    load[0] += len(table.feature_names) * topology.world_size * topology.exchange("piece")
    return replace(
        _shard_cost(problem, number, (1, 1), load),
        load=load,
        hbm_floor=table.rows,
        memory_floor=table.rows,
        fixed_hbm=int((problem.work.depth + 1) * ids + gradients),
        fixed_host=0,
        unique=0.0,
        read_ahead=0,
        policy_s=0.0,
    )


def _work_seconds(topology: Topology, accesses: float, unique: float, moved: float) -> FloatArray:
    """Return the load of looking up and updating rows, of which ``moved`` bytes are touched."""
    each = topology.row_seconds
    compute = moved / topology.hbm_bw + accesses * each["lookup"] + unique * each["update"]
    return np.array([compute, accesses / topology.index_rows_per_s + unique * each["plan"], 0.0, 0.0])


def _exchange(problem: Problem, table: TableSpec, rows: int, columns: int) -> tuple[FloatArray, FloatArray]:
    """Return the loads of (a shard on its rank, every rank) for bytes received, and for asking and answering.

    Ids and gradients come to the shard, outputs to everyone. Partial sums of row cuts come one per row cut to
    the rank that asked.
    """
    topology = problem.topology
    out = _vectors(problem, table) * table.embedding_dim * FLOAT
    ids = _id_bytes(problem, table, table.accesses(problem.global_batch) / rows)
    gradients = out / columns / (1 if table.pooled else rows)
    received = out * (rows if table.pooled else 1) / topology.world_size
    shard, everywhere = _received(topology, gradients + ids), _received(topology, received)
    half = len(table.feature_names) * topology.exchange("piece") / 2
    shard[0] += half * topology.world_size
    everywhere[0] += half * rows * columns
    return shard, everywhere


def _received(topology: Topology, size: float) -> FloatArray:
    """Return the load of ``size`` bytes from all ranks; the CPU's training thread waits for them."""
    world, near = topology.world_size, topology.ranks_per_host
    intra = size * ((near - 1) / world) / topology.intra_host_bw
    inter = size * ((world - near) / world) / topology.inter_host_bw
    return np.array([intra + inter if topology.one_fetcher else 0.0, 0.0, intra, inter])


def _vectors(problem: Problem, table: TableSpec) -> float:
    """Return the output rows of a step: one per bag, or one per id."""
    if not table.pooled:
        return table.accesses(problem.global_batch)
    return float(problem.global_batch * len(table.feature_names))


def _id_bytes(problem: Problem, table: TableSpec, accesses: float) -> float:
    """Return the bytes of ``accesses`` ids of a global batch, of the lengths of all its bags, of weights."""
    size = 4 if table.num_embeddings <= _INT32_ROWS else 8
    weights = FLOAT if table.weighted else 0
    return accesses * (size + weights) + problem.global_batch * len(table.feature_names) * size
