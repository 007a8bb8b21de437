"""Constants of the runtime, what a training step does, and what every rank pays whatever its shards are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tierstore.config import TierConfig, is_integer
from tierstore.planner.checks import must_be
from tierstore.planner.constraints import ParameterConstraints
from tierstore.planner.tables import TableSpec
from tierstore.planner.topology import Topology
from tierstore.rounds import ENTRIES, MANY, Ahead, FloatArray

# Tests compare these with the runtime.
TIER_BYTES_PER_SLOT = 30 + 8 * 2
POLICY_BYTES_PER_SLOT = 16  # lookahead
POLICY_FIXED_SLOTS = 7_800  # the first slots of lookahead take
POLICY_FIXED_BYTES = 40  # more
READ_AHEAD_SHARE = 8  # reading ahead takes one in so many bytes of the tables
READ_AHEAD_AT_MOST = 4 << 30
HELD_BYTES_PER_ROW = 13 + 8 * 2 + ENTRIES * 12  # of a row that is read ahead, beside its bytes
BYTES_PER_ID, BYTES_PER_BAG = 24, 16  # of a batch and its lookup; measured
READ_AHEAD_OF_MEMORY = 64  # the ranks of a host take one byte in so many together
EXCHANGES = 4  # collectives of a step of one sharded collection: sizes, ids, vectors, gradients

INDEX_BYTES_PER_ROW = 12  # of the native store: 10.8 to 11.9 at its usual fill
COMPACT_INDEX_BYTES_PER_ROW = 8  # at most, while a table fills; 3 to 4 once it is full
COMPACT_INDEX_ROWS = 1 << 18  # rows from which on a table takes no more than that; its index begins as a hash
RANK_BUFFERS = 40 << 20  # per rank that stores: write queue, read buffers, the policies' fixed parts
MOST_STORED_ROWS = 15 << 35  # of one size in one store: 2^40 places, half perhaps unused, a 16th for copies
FLOAT = 4
WRITE_AMPLIFICATION = 1.5  # bytes written per byte of records
DISK_SLACK = 1.25  # bytes that a store keeps at least, per live byte
RANK_STAGES = ("compute", "index", "intra_host", "inter_host", "host_link", "fetch")
"""``fetch``: on the CPU index and link, which one thread does in turn; elsewhere 0. With fewer than two
processors per rank this thread also waits for those that compute."""


@dataclass(frozen=True)
class Workload:
    """What one step does beside the tables.

    - ``batch_size``: examples per rank and step.
    - ``dense_seconds``: compute of the unsharded part per step; ``dense_bytes``: its device memory
      (parameters, gradients, optimizer state, activations). The user measures or states both.
    - ``depth``: batches prefetched ahead, whose rows are pinned. ``window``: batches whose ids are known
      ahead (None: as many as training chooses). ``read_ahead``: bytes of a rank for rows read ahead
      (None: an eighth of the tables' bytes, up to 1/64 of the host memory for its ranks together).
    - ``rows_per_read``: rows that one random read of the drives brings. None: predicted on the CPU
      (:mod:`tierstore.rounds`), 1 elsewhere.
    - ``tiers``: says the dtypes of lower tiers; None: each collection's own, or the table's in every tier.
    """

    batch_size: int = 512
    dense_seconds: float = 0.0
    dense_bytes: int = 0
    depth: int = 1
    window: int | None = None
    read_ahead: int | None = None
    rows_per_read: float | None = None
    tiers: TierConfig | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        must_be("batch_size", self.batch_size, is_integer(self.batch_size, 1), "a positive integer")
        for name in ("dense_seconds", "dense_bytes", "depth"):
            value = getattr(self, name)
            must_be(name, value, 0 <= value < math.inf, "0 or more, and finite")
        ahead, reads = self.read_ahead, self.rows_per_read
        must_be("read_ahead", ahead, ahead is None or is_integer(ahead), "a whole number of bytes, or None")
        must_be("rows_per_read", reads, reads is None or 1 <= reads < math.inf, "at least 1")


@dataclass(frozen=True)
class Problem:
    """What is to be planned: ``demands`` has the constraints of each of ``tables``."""

    topology: Topology
    work: Workload
    tables: Sequence[TableSpec]
    demands: Sequence[ParameterConstraints]

    @property
    def global_batch(self) -> int:
        """Examples of all ranks per step."""
        return self.work.batch_size * self.topology.world_size

    @cached_property
    def waiting_seconds(self) -> float:
        """Seconds per step during which a rank waits for collectives and leaves its processor to others."""
        return self._collections * EXCHANGES * self.topology.exchange("collective")

    @cached_property
    def compute_seconds(self) -> float:
        """Seconds per step that a rank computes, or waits, whatever its shards are."""
        exchanges = self._collections * self.topology.exchange("step")
        return self.work.dense_seconds + exchanges + self.waiting_seconds

    def fetch_seconds(self, seconds: FloatArray, link: FloatArray) -> FloatArray:
        """Return the seconds of each rank's fetching thread, by those of RANK_STAGES before it: (ranks,)."""
        if not self.topology.one_fetcher:
            return np.zeros(len(link))
        busy = seconds[:, 0] - self.waiting_seconds
        batch = self.topology.row_seconds["batch"]
        return batch + seconds[:, 1] + link + self.topology.in_turn * busy

    @cached_property
    def window(self) -> int:
        """Batches whose ids are known ahead."""
        return self._ahead.automatic() if self.work.window is None else self.work.window

    @cached_property
    def held_share(self) -> float:
        """The part of the memory for reading ahead that the window leaves to rows: half of it at least."""
        return self._ahead.held_share(self.window)

    @cached_property
    def read_ahead_share(self) -> float:
        """Host memory for rows that are read ahead, per byte of tables that have rows on the SSD."""
        return self._ahead.read_ahead / self.bytes_per_rank

    @property
    def bytes_per_rank(self) -> float:
        """Bytes of the rows of all tables, as ``hbm`` has them, per rank."""
        return sum(table.rows * table.row_bytes() for table in self.tables) / self.topology.world_size

    @cached_property
    def _ahead(self) -> Ahead:
        """The batches of one rank, if rows are spread evenly over the ranks."""
        tables, work, topology = self.tables, self.work, self.topology
        sizes = np.array([table.row_bytes("ssd") for table in tables])
        ids = sum(table.accesses(work.batch_size) for table in tables)
        # Bags of one id each share their offsets, half of a bag's bytes.
        bags = work.batch_size * sum(len(t.feature_names) / (1 + (t.pooling_factor == 1)) for t in tables)
        demands = [[t.demand(n * self.global_batch)[0] for n in (1, MANY)] for t in tables]
        unique, many = np.array(demands).T / topology.world_size
        memory = topology.host_memory_per_host / topology.ranks_per_host
        most = min(self.bytes_per_rank / READ_AHEAD_SHARE, memory / READ_AHEAD_OF_MEMORY, READ_AHEAD_AT_MOST)
        return Ahead(
            batch_bytes=ids * BYTES_PER_ID + bags * BYTES_PER_BAG,
            unique=unique,
            unique_of_many=many,
            rows=np.array([table.rows for table in tables]) / topology.world_size,
            held_bytes=sizes + HELD_BYTES_PER_ROW,
            read_ahead=most if work.read_ahead is None else work.read_ahead,
        )

    @cached_property
    def fixed_hbm(self) -> int:
        """Device memory of a rank that no shard can have, in bytes."""
        return self.work.dense_bytes + self._policy_bytes(self.topology.hbm_per_rank)

    @cached_property
    def fixed_host(self) -> int:
        """Host memory of a host that no shard can have, in bytes."""
        topology = self.topology
        buffers = RANK_BUFFERS if topology.ssd_per_host else 0
        policies = self._policy_bytes(topology.host_memory_per_host // topology.ranks_per_host)
        return (buffers + policies) * topology.ranks_per_host

    @property
    def _collections(self) -> int:
        """Each exchanges for itself."""
        return len({table.module for table in self.tables})

    def _policy_bytes(self, memory: int) -> int:
        """Return what the policies of a rank's tier take beside slots, if row sizes have equal parts."""
        rows: Counter[int] = Counter()
        for table in self.tables:
            rows[table.row_bytes()] += table.rows
        room = {size: int(memory / len(rows) / (size + TIER_BYTES_PER_SLOT)) for size in rows}
        slots = (min(POLICY_FIXED_SLOTS, count, room[size]) for size, count in rows.items())
        return sum(slots) * POLICY_FIXED_BYTES


def index_bytes(rows: int) -> int:
    """Return the most bytes of the native store's index of a table of so many rows."""
    return rows * (COMPACT_INDEX_BYTES_PER_ROW if rows >= COMPACT_INDEX_ROWS else INDEX_BYTES_PER_ROW)


def slot_bytes(row: int) -> float:
    """Return the bytes that a slot for a row of ``row`` bytes takes of a memory tier."""
    return row + TIER_BYTES_PER_SLOT + POLICY_BYTES_PER_SLOT
