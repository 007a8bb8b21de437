"""Divides each rank's device memory and each host's memory among the shards placed there, exactly."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstore.planner.costs import MOST_STORE_BYTES, MOST_STORED_ROWS, STORE_SLACK, ShardCost, Workload
from tierstore.planner.curves import Floats
from tierstore.planner.cuts import Cut
from tierstore.planner.prices import Steps, hbm_steps, memory_steps
from tierstore.planner.topology import Topology

_WHOLE = 1e-6, 1e-14  # rows, and share of them: what rounding may leave of a shard that is held whole
_MOST = 2.0**62  # bytes: what is more does not fit anywhere


@dataclass(frozen=True, eq=False)
class Placed:
    """A table's cut on its ranks."""

    table: int
    cut: Cut
    ranks: Sequence[int]


@dataclass(eq=False)
class Allocation:
    """Rows of each shard in device memory, and in device and host memory together (float64, (shards,)).

    Shards are in the order of the placements and their ranks. ``missing``: bytes by which the memories are
    too small, by resource and place: {("hbm", rank): n, ("host_memory", host): n, ("ssd", host): n}.
    """

    costs: list[ShardCost]
    table: list[int]
    rank: NDArray[np.int64]
    hbm_rows: Floats
    memory_rows: Floats
    missing: dict[tuple[str, int], int]
    ssd_room: Floats | float = 1.0
    """What each shard's part of the SSD is, by what it needs there at least."""

    def __post_init__(self) -> None:
        self.rows = self.field("rows")
        self.slot = self.field("slot_bytes")

    def field(self, name: str) -> Floats:
        """One of the fields of ShardCost for every shard."""
        known: dict[int, float] = {}
        return np.array([known.setdefault(id(c), getattr(c, name)) for c in self.costs], dtype=np.float64)

    @property
    def stored(self) -> NDArray[np.bool_]:
        """Which shards need the SSD."""
        return self.memory_rows < self.rows

    def hbm_bytes(self) -> NDArray[np.int64]:
        return _whole_bytes(self.hbm_rows * self.slot + self.field("fixed_hbm"))

    def uvm_bytes(self) -> NDArray[np.int64]:
        held = (self.memory_rows - self.hbm_rows) * self.slot + self.field("fixed_host")
        return _whole_bytes(held + self.field("index_bytes") * self.stored)

    def ssd_need(self) -> NDArray[np.int64]:
        """Bytes of the SSD without which the shards do not fit."""
        return _whole_bytes(self.field("ssd_bytes") * self.stored)

    def ssd_bytes(self) -> NDArray[np.int64]:
        return _whole_bytes(np.multiply(self.ssd_need(), self.ssd_room, dtype=np.float64))

    def crowded(self) -> str:
        """What does not fit one store however large the SSD is: more rows of one size than it has places for.
        "" when all fits."""
        rows: dict[tuple[int, int], float] = {}
        for cost, rank, stored in zip(self.costs, self.rank.tolist(), self.stored.tolist(), strict=True):
            rows[rank, cost.row_bytes] = rows.get((rank, cost.row_bytes), 0.0) + stored * cost.rows
        for (rank, size), count in rows.items():
            if count > MOST_STORED_ROWS:
                return (
                    f"rank {rank} would store {count:,.0f} rows of {size} bytes, and a store has places for "
                    f"{MOST_STORED_ROWS:,} of one size"
                )
        return ""

    def misses(self, rows: Floats) -> Floats:
        """Misses per unique row of each shard, if it held ``rows`` (shards,); equal shards ask once."""
        known: dict[tuple[int, float], float] = {}
        result = np.empty(len(rows))
        for i, (cost, n) in enumerate(zip(self.costs, rows.tolist(), strict=True)):
            key = id(cost), n
            if key not in known:
                known[key] = cost.curve.at(n)
            result[i] = known[key]
        return result

    def reads(self) -> Floats:
        """Reads from the SSD per unique row of each shard. A row's use is forgotten when it leaves device
        memory, so host memory keeps worse rows than as much device memory would (docs/planner.md)."""
        below = 1 - self.hbm_rows / np.maximum(self.memory_rows, 1.0)
        worse = self.misses(self.memory_rows) * (1 + self.field("two_tier") * below)
        return np.minimum(worse, self.misses(self.hbm_rows))


def allocate(
    topology: Topology,
    work: Workload,
    placed: Sequence[Placed],
    for_ssd: bool = False,
    gradual: bool = False,
    whole: Container[int] = (),
) -> Allocation:
    """Device memory by marginal gain of link time (``for_ssd``: of SSD time, which weighs large rows less),
    then host memory by marginal gain of SSD time (``gradual``: as in :func:`memory_steps`). The tables of
    ``whole`` get memory for all rows first."""
    costs = [item.cut.cost for item in placed for _ in item.ranks]
    table = [item.table for item in placed for _ in item.ranks]
    rank = np.array([r for item in placed for r in item.ranks], dtype=np.int64)
    result = Allocation(costs, table, rank, np.zeros(len(costs)), np.zeros(len(costs)), {})
    replicas = result.slot == 0
    result.hbm_rows[replicas] = result.memory_rows[replicas] = result.rows[replicas]
    fixed = np.bincount(rank, result.field("fixed_hbm"), topology.world_size) + work.fixed_hbm
    steps: dict[int, Steps] = {}
    for r in range(topology.world_size):
        here = np.flatnonzero((rank == r) & ~replicas)
        for i in here:
            if id(costs[i]) not in steps:
                steps[id(costs[i])] = hbm_steps(costs[i], for_ssd)
        fast = [steps[id(costs[i])] for i in here]
        rows, missing = _fill(fast, result.slot[here], float(topology.hbm_per_rank - fixed[r]))
        result.hbm_rows[here] = _whole_rows(rows, result.rows[here])
        if missing > 0:
            result.missing["hbm", r] = int(missing) + 1
    for h in range(topology.hosts):
        here = np.flatnonzero((rank // topology.ranks_per_host == h) & ~replicas)
        _fill_host(topology, work, result, here, h, gradual, whole)
    result.ssd_room = _ssd_room(topology, work, result)
    return result


def _ssd_room(topology: Topology, work: Workload, result: Allocation) -> Floats:
    """What a host's SSD has left goes to its stores, as far as they have a use for it."""
    host = result.rank // topology.ranks_per_host
    need = np.bincount(host, result.ssd_need(), topology.hosts)
    left = topology.ssd_per_host - topology.ranks_per_host * STORE_SLACK  # which ranks add to their parts
    room = left / np.maximum(need, 1.0)
    most = max(1.0, MOST_STORE_BYTES / work.disk_slack)
    return np.asarray(np.clip(room, 1.0, most)[host])


def _fill_host(
    topology: Topology,
    work: Workload,
    result: Allocation,
    here: NDArray[np.int64],
    host: int,
    gradual: bool,
    whole: Container[int],
) -> None:
    costs = [result.costs[i] for i in here]
    known: dict[tuple[int, float], Steps] = {}
    steps = []
    least = [
        float(result.costs[i].rows) if result.table[i] in whole else float(result.hbm_rows[i]) for i in here
    ]
    for cost, rows in zip(costs, least, strict=True):
        key = id(cost), rows
        if key not in known:
            known[key] = memory_steps(cost, rows, gradual)
        steps.append(known[key])
    room = topology.host_memory_per_host - work.fixed_host(topology) - sum(cost.fixed_host for cost in costs)
    room += float((result.hbm_rows[here] * result.slot[here]).sum())
    held, missing = _fill(steps, result.slot[here], room)
    held = _whole_rows(held, result.rows[here])
    result.memory_rows[here] = np.maximum(held, result.hbm_rows[here])
    if missing > 0:
        result.missing["host_memory", host] = int(missing) + 1
    stored = int(result.ssd_need()[here].sum()) - int(topology.ssd_per_host)
    if stored > 0:
        result.missing["ssd", host] = stored


def _ends(steps: Steps, corner: int) -> bool:
    """Whether the step behind ``corner`` leads to all rows, where a store is needed no longer."""
    return corner + 2 == len(steps.rows) and bool(steps.stored[corner])


def _whole_rows(held: Floats, rows: Floats) -> Floats:
    """Slots that ``held`` rows of shards of ``rows`` need: without an SSD not one may be lacking."""
    all_ = held >= rows - np.maximum(_WHOLE[0], _WHOLE[1] * rows)
    return np.where(all_, rows, np.floor(held))


def _whole_bytes(sizes: Floats) -> NDArray[np.int64]:
    return np.minimum(sizes, _MOST).astype(np.int64)


def _fill(steps: Sequence[Steps], slot: Floats, room: float) -> tuple[Floats, float]:
    """(Rows of each shard, bytes missing for the floors) for ``room`` bytes, dearest segments first."""
    rows = np.array([step.rows[0] for step in steps])
    room -= sum(float(step.bytes[0]) for step in steps)
    if room < 0 or not steps:
        return rows, max(0.0, -room)
    lengths = [len(step.bytes) - 1 for step in steps]
    owner = np.repeat(np.arange(len(steps)), lengths)
    if not len(owner):
        return rows, 0.0
    sizes = np.concatenate([np.diff(step.bytes) for step in steps])
    falling = np.concatenate([np.minimum.accumulate(step.density) for step in steps])
    order = np.argsort(-falling, kind="stable")
    whole = np.cumsum(sizes[order]) <= room
    bought = int(whole.argmin()) if not whole.all() else len(order)
    level = (
        _level(steps, owner, sizes, falling, falling[order[bought]], room) if bought < len(order) else None
    )
    if level is not None:
        return level, 0.0
    count = np.bincount(owner[order[:bought]], minlength=len(steps))
    rows = np.array([step.rows[k] for step, k in zip(steps, count, strict=True)])
    if bought < len(order):
        i = int(owner[order[bought]])
        rest = room - float(sizes[order[:bought]].sum())
        last = steps[i].rows[count[i] + 1]
        # Part of a step; on the way to holding everything the index is still there.
        rows[i] = min(rows[i] + np.floor(rest / max(slot[i], 1.0)), max(last - 1, rows[i]))
    return rows, 0.0


def _level(
    steps: Sequence[Steps],
    owner: NDArray[np.int64],
    sizes: Floats,
    falling: Floats,
    price: float,
    room: float,
) -> Floats | None:
    """Rows if all steps at ``price``, which ``room`` ends among, are taken in equal parts, as equal shards
    should; None if these cannot be taken in parts."""
    dearer, tied = falling > price * (1 + 1e-9), np.isclose(falling, price, rtol=1e-9, atol=0.0)
    here = owner[tied]
    count = np.bincount(owner[dearer], minlength=len(steps))
    if len(np.unique(here)) < len(here) or any(_ends(steps[i], count[i]) for i in here):
        return None
    rows = np.array([step.rows[k] for step, k in zip(steps, count, strict=True)])
    share = (room - float(sizes[dearer].sum())) / float(sizes[tied].sum())
    for i in here.tolist():
        rows[i] += share * (steps[i].rows[count[i] + 1] - rows[i])
    return rows
