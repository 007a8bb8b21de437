"""What a shard costs, in bytes of every tier and seconds of every resource: docs/planner.md derives it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tierstore.config import is_integer
from tierstore.errors import ConfigError
from tierstore.placement import MOST_STORE_BYTES as MOST_STORE_BYTES
from tierstore.placement import STORE_SLACK as STORE_SLACK
from tierstore.placement import record_bytes as record_bytes
from tierstore.planner.curves import MissCurve
from tierstore.planner.tables import ParameterConstraints, TableSpec, row_bytes
from tierstore.planner.topology import Topology

# Constants of the runtime; tests compare the first three with it.
TIER_BYTES_PER_SLOT = 30 + 8 * 4 / 3
POLICY_BYTES_PER_SLOT = 16  # lookahead
POLICY_FIXED_SLOTS = 7_800  # the first slots of lookahead take
POLICY_FIXED_BYTES = 40  # more
INDEX_BYTES_PER_ROW = 12  # of the native store: 10.8 to 11.9 at its usual fill
HELD_BYTES_PER_ROW = 12 + 8 * 4 / 3  # of a row that was read ahead, beside its bytes
READ_AHEAD_BYTES = 8 << 20  # of a rank's rows that were read ahead, in two blocks per row size
MOST_FILE_BYTES = (
    2.0  # per live byte: as many superseded rows as live ones are left before they are compacted
)
TWO_TIER_READS = 0.35  # more reads if all memory were host memory: rows forget their use going down (CPU)
MERGED_READ_BYTES = 64 << 10  # the largest read that brings several rows
RANK_BUFFERS = 40 << 20  # per rank that stores: write queue, read buffers, the policies' fixed parts
EXCHANGES = 4  # collectives of a step of one sharded collection: sizes, ids, vectors, gradients
WEIGHT_BYTES, FLOAT = 4, 4
_INT32_ROWS = 1 << 31
MOST_STORED_ROWS = 15 << 28  # of one size in one store: 32-bit locations, a sixteenth of them for compaction


@dataclass(frozen=True)
class Workload:
    """What one step does beside the tables.

    - ``batch_size``: examples per rank and step.
    - ``dense_seconds``: compute of the unsharded part per step, ``dense_bytes``: device memory it takes
      (parameters, gradients, optimizer state, activations); measured or stated by the user.
    - ``tier_bytes``: what the tiers of a rank take beside their slots, in device and in host memory;
      ``lookup_seconds``: what its lookups take whatever the rows; ``exchange_seconds``: what its exchanges
      take whatever is in them, of computing and of waiting. The planner fills all three in.
    - ``depth``: batches prefetched ahead, whose rows are pinned. ``window``: batches whose ids are known
      ahead (None: as many as reading ahead has room for).
    - ``rows_per_read``: random reads that one read in the order of places does for. None: on the CPU the
      planner finds it out (:mod:`tierstore.planner.reading`), elsewhere 1.
    - ``read_waits``: the share of the drives' time that plans wait for, because a batch lacks more rows than
      are read ahead; the planner fills it in.
    - ``write_amplification``, ``disk_slack``: bytes written, bytes kept at least, per live byte of the store.
    """

    batch_size: int = 512
    dense_seconds: float = 0.0
    dense_bytes: int = 0
    tier_bytes: tuple[int, int] = (0, 0)
    lookup_seconds: float = 0.0
    exchange_seconds: tuple[float, float] = (0.0, 0.0)
    depth: int = 1
    window: int | None = None
    rows_per_read: float | None = None
    read_waits: float = 0.0
    write_amplification: float = 1.5
    disk_slack: float = 1.25

    def __post_init__(self) -> None:
        if not is_integer(self.batch_size, 1):
            raise ConfigError(f"batch_size is {self.batch_size!r}; it must be a positive integer")
        for name in ("dense_seconds", "dense_bytes", "depth"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be 0 or more, and finite")
        for name in ("rows_per_read", "write_amplification", "disk_slack"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be at least 1")

    @property
    def compute_seconds(self) -> float:
        """What a rank computes, or waits for, whatever its shards are."""
        return self.dense_seconds + sum(self.exchange_seconds)

    @property
    def idle_seconds(self) -> float:
        """The part of them in which it waits, and leaves its processor to other threads."""
        return self.exchange_seconds[1]

    @property
    def fixed_hbm(self) -> int:
        """Device memory of a rank that no shard can have."""
        return self.dense_bytes + self.tier_bytes[0]

    def fixed_host(self, topology: Topology) -> int:
        """Host memory of a host that no shard can have."""
        buffers = RANK_BUFFERS if topology.ssd_per_host else 0
        tiers = self.tier_bytes[1] if topology.host_memory_per_host else 0
        return (buffers + tiers) * topology.ranks_per_host


def tier_bytes(tables: Iterable[TableSpec], topology: Topology) -> tuple[int, int]:
    """``Workload.tier_bytes`` for tables that are not cut by columns: one tier per row size, each with an
    equal part of the memory."""
    rows = row_sizes(tables)

    def fixed(memory: int) -> int:
        room = {size: int(memory / len(rows) / (size + TIER_BYTES_PER_SLOT)) for size in rows}
        slots = (min(POLICY_FIXED_SLOTS, count, room[size]) for size, count in rows.items())
        return sum(slots) * POLICY_FIXED_BYTES

    return fixed(topology.hbm_per_rank), fixed(topology.host_memory_per_host // topology.ranks_per_host)


def exchange_seconds(tables: Iterable[TableSpec], topology: Topology) -> tuple[float, float]:
    """``Workload.exchange_seconds``: every collection exchanges for itself."""
    collections = len({table.module for table in tables})
    waiting = EXCHANGES * topology.exchange("collective")
    return collections * topology.exchange("step"), collections * waiting


def row_sizes(tables: Iterable[TableSpec]) -> dict[int, int]:
    """Rows of all tables by bytes of a row, not cut by columns."""
    rows: dict[int, int] = {}
    for table in tables:
        size = row_bytes(table.embedding_dim, table.optimizer)
        rows[size] = rows.get(size, 0) + table.rows
    return rows


@dataclass(frozen=True, eq=False)
class Load:
    """Seconds per step that do not depend on cache sizes."""

    compute: float = 0.0
    index: float = 0.0
    intra: float = 0.0
    inter: float = 0.0

    @property
    def seconds(self) -> tuple[float, float, float, float]:
        """All of them, in the order of the fields."""
        return self.compute, self.index, self.intra, self.inter

    def __add__(self, other: Load) -> Load:
        return Load(
            self.compute + other.compute,
            self.index + other.index,
            self.intra + other.intra,
            self.inter + other.inter,
        )


@dataclass(frozen=True, eq=False)
class ShardCost:
    """One shard. ``curve``: misses per unique row, by rows held. A cache has ``floor`` rows at least.

    ``link_s``, ``ssd_s``: seconds of the rank's link, of the host's drives, per missing row; ``link_bytes``,
    ``ssd_bytes_moved``: host-memory traffic of one. ``index_bytes`` (host memory) and ``ssd_bytes`` are due
    unless all rows stay in memory. ``fixed_*`` are buffers. ``policy_s``: the part of ``load.index`` that
    is not due where device memory holds every row of all shards of this row size; ``store_s`` is due to
    the rank per row missing in memory.
    """

    rows: int
    columns: int
    row_bytes: int
    slot_bytes: float
    unique: float
    curve: MissCurve
    floor: float
    hbm_floor: float
    load: Load
    fixed_hbm: int
    fixed_host: int
    index_bytes: int
    ssd_bytes: int
    link_s: float
    ssd_s: float
    link_bytes: float
    ssd_bytes_moved: float
    policy_s: float = 0.0
    store_s: float = 0.0
    two_tier: float = 0.0
    in_hbm: bool = False
    in_memory: bool = False


def shard_cost(
    table: TableSpec,
    topology: Topology,
    work: Workload,
    demand: ParameterConstraints,
    row_cuts: int,
    column_cuts: int,
    link: Load,
) -> ShardCost:
    """One of ``row_cuts`` x ``column_cuts`` equal shards; ``link`` has its exchange seconds."""
    size = work.batch_size * topology.world_size
    rows = -(-table.rows // row_cuts)
    columns = -(-table.embedding_dim // column_cuts)
    bytes_ = row_bytes(columns, table.optimizer)
    unique, curve = table.demand(size)
    unique, accesses = unique / row_cuts, table.accesses(size) / row_cuts
    curve = curve.scaled(rows / float(curve.rows[-1]))
    slot = bytes_ + TIER_BYTES_PER_SLOT + POLICY_BYTES_PER_SLOT
    pieces = row_cuts * column_cuts
    floor = min(rows, (work.depth + 1) * unique)
    record = record_bytes(bytes_)
    outputs = vectors(table, size) / (1 if table.pooled else row_cuts)
    ids = exchanged_ids(table, size, accesses)
    each = topology.row_seconds
    moved = accesses * columns * FLOAT * 2 + unique * bytes_ * 2
    compute = moved / topology.hbm_bw + accesses * each["lookup"] + unique * each["update"]
    policy = unique * each["policy"]
    index = accesses / topology.index_rows_per_s + unique * each["plan"] + policy
    staged = (work.depth + 1) * unique * curve.at(floor) * bytes_
    return ShardCost(
        rows=rows,
        columns=columns,
        row_bytes=bytes_,
        slot_bytes=slot,
        unique=unique,
        curve=curve,
        floor=max(floor, min(rows, (demand.min_hbm_bytes + demand.min_uvm_bytes) / pieces / slot)),
        hbm_floor=rows
        if demand.stays_in_hbm
        else max(floor, min(rows, demand.min_hbm_bytes / pieces / slot)),
        load=link + Load(compute, index),
        fixed_hbm=int((work.depth + 1) * ids + 2 * outputs * columns * FLOAT),
        fixed_host=int(staged),
        index_bytes=rows * INDEX_BYTES_PER_ROW,
        ssd_bytes=int(rows * record * work.disk_slack),
        policy_s=policy,
        store_s=each["store"],
        two_tier=TWO_TIER_READS if topology.one_fetcher else 0.0,
        link_s=2 * bytes_ / topology.host_link_bw + each["link"],
        ssd_s=_ssd_seconds(record, topology, work),
        link_bytes=2 * bytes_,
        ssd_bytes_moved=2 * record,
        in_hbm=demand.stays_in_hbm,
        in_memory=demand.stays_in_memory or topology.ssd_per_host == 0,
    )


def vectors(table: TableSpec, global_batch: int) -> float:
    """Output rows of a step: one per bag, or one per id."""
    if not table.pooled:
        return table.accesses(global_batch)
    return float(global_batch * len(table.feature_names))


def exchanged_ids(table: TableSpec, global_batch: int, accesses: float) -> float:
    """Bytes of ``accesses`` ids of a global batch, of the lengths of all its bags, and of weights."""
    size = 4 if table.num_embeddings <= _INT32_ROWS else 8
    weights = WEIGHT_BYTES if table.weighted else 0
    return accesses * (size + weights) + global_batch * len(table.feature_names) * size


def read_bytes(record: int) -> int:
    """Bytes that the native store reads for one record: the blocks of 4 KiB that it lies in. In frames of one
    block none crosses its end; in larger frames (docs/formats.md) records lie anywhere."""
    if record <= 4096 and 4096 % record <= 4096 // 50:
        return 4096
    return 4096 + record - 1


def _ssd_seconds(record: int, topology: Topology, work: Workload) -> float:
    """Reading one record, and writing it later: every row that is touched becomes dirty."""
    read = topology.read_seconds(read_bytes(record)) / (work.rows_per_read or 1.0)
    return read + work.write_amplification * record / topology.ssd_write_bw


def fetched_share(topology: Topology, work: Workload) -> float:
    """What a rank's fetching thread takes per second of its host's drives, for the search, which knows only
    these: if ranks share the drives evenly and a row is one read of a block."""
    read = topology.read_seconds(4096) / (work.rows_per_read or 1.0)
    return work.read_waits + topology.row_seconds["store"] / read / topology.ranks_per_host


def waited(topology: Topology, exchange: float) -> float:
    """Seconds of exchanges that are part of computing: the CPU's training thread waits for them."""
    return exchange if topology.one_fetcher else 0.0


def features_of(table: TableSpec) -> int:
    """Each is asked for by itself."""
    return max(1, len(table.feature_names))


def replica_cost(table: TableSpec, topology: Topology, work: Workload) -> ShardCost:
    """One replica of a data-parallel table: every rank gets the ids and gradients of all ranks, and makes the
    same update (docs/sharding.md); no dense gradient is reduced."""
    size = work.batch_size * topology.world_size
    accesses, (unique, _) = table.accesses(size), table.demand(size)
    bytes_ = row_bytes(table.embedding_dim, table.optimizer)
    ids = exchanged_ids(table, size, accesses)
    gradients = vectors(table, size) * table.embedding_dim * FLOAT
    near, far = topology.others()
    each, width = topology.row_seconds, table.embedding_dim * FLOAT
    moved = (accesses + accesses / topology.world_size) * width + 2 * unique * bytes_
    intra = (ids + gradients) * near / topology.intra_host_bw
    inter = (ids + gradients) * far / topology.inter_host_bw
    compute = moved / topology.hbm_bw + accesses * each["lookup"] + unique * each["update"]
    compute += features_of(table) * topology.world_size * topology.exchange("piece")
    load = Load(
        compute=compute + waited(topology, intra + inter),
        index=accesses / topology.index_rows_per_s + unique * (each["plan"] + each["policy"]),
        intra=intra,
        inter=inter,
    )
    held = table.rows * (bytes_ + TIER_BYTES_PER_SLOT + POLICY_BYTES_PER_SLOT)
    curve = MissCurve.through([0], [1], table.rows)
    return ShardCost(
        rows=table.rows,
        columns=table.embedding_dim,
        row_bytes=bytes_,
        slot_bytes=0.0,
        unique=0.0,
        curve=curve,
        floor=table.rows,
        hbm_floor=table.rows,
        load=load,
        fixed_hbm=int(held + (work.depth + 1) * ids + gradients),
        fixed_host=0,
        index_bytes=0,
        ssd_bytes=0,
        link_s=0.0,
        ssd_s=0.0,
        link_bytes=0.0,
        ssd_bytes_moved=0.0,
        policy_s=unique * each["policy"],
        in_hbm=True,
        in_memory=True,
    )
