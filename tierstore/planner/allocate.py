"""Divides each rank's device memory and each host's memory among the shards placed there, exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstore.placement import MOST_STORE_BYTES, STORE_SLACK
from tierstore.planner.costs import MOST_STORED_ROWS, Problem
from tierstore.planner.curves import Floats
from tierstore.planner.options import ShardCost, ShardingOption
from tierstore.planner.prices import Steps, hbm_steps, memory_steps

_WHOLE = 1e-6, 1e-14  # rows, and share of them: what rounding may leave of a shard that is held whole
_MOST = 2.0**62  # bytes: what is more does not fit anywhere


@dataclass(frozen=True, eq=False)
class Placed:
    """A table's option on its ranks."""

    table: int
    option: ShardingOption
    ranks: Sequence[int]


@dataclass(eq=False)
class Allocation:
    """Rows of each shard in device memory, and in device and host memory together (float64, (shards,)).

    Shards are in the order of the placements and their ranks. ``missing``: bytes by which the memories are
    too small, by resource and place: {("hbm", rank): n, ("host_memory", host): n, ("ssd", host): n}.
    ``ssd_room``: what each shard's part of the SSD is, by what it needs there at least.
    """

    costs: list[ShardCost]
    rank: NDArray[np.int64]
    hbm_rows: Floats
    memory_rows: Floats
    missing: dict[tuple[str, int], int]
    ssd_room: Floats | float = 1.0

    def __post_init__(self) -> None:
        self.rows = self.field("rows")
        self.slot = self.field("slot_bytes")

    def field(self, name: str) -> Floats:
        """Return one of the fields of ShardCost for every shard."""
        return self._each(lambda cost, _: getattr(cost, name), np.zeros(len(self.costs)))

    def misses(self, rows: Floats) -> Floats:
        """Return the misses per unique row of each shard if it held ``rows`` (shards,)."""
        return self._each(lambda cost, n: cost.curve.at(n), rows)

    def _each(self, value: Callable[[ShardCost, float], float], of: NDArray) -> Floats:
        """Return ``value`` of every shard and number; equal shards ask once."""
        pairs = list(zip(self.costs, of.tolist(), strict=True))
        known = {pair: value(*pair) for pair in dict.fromkeys(pairs)}
        return np.array([known[pair] for pair in pairs], dtype=np.float64)

    @property
    def stored(self) -> NDArray[np.bool_]:
        """Which shards need the SSD."""
        return self.memory_rows < self.rows

    def hbm_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of each shard on its device, buffers included: int64 (shards,)."""
        return _whole_bytes(self.hbm_rows * self.slot + self.field("fixed_hbm"))

    def uvm_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of each shard in host memory, the store's index included: int64 (shards,)."""
        held = (self.memory_rows - self.hbm_rows) * self.slot + self.field("fixed_host")
        return _whole_bytes(held + self.field("index_bytes") * self.stored)

    def ssd_need(self) -> NDArray[np.int64]:
        """Return the bytes of the SSD without which each shard does not fit: int64 (shards,)."""
        return _whole_bytes(self.field("ssd_bytes") * self.stored)

    def ssd_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of the SSD that each shard gets: int64 (shards,)."""
        return _whole_bytes(self.ssd_need() * np.asarray(self.ssd_room, dtype=np.float64))

    def crowded(self) -> str:
        """Return which rank stores more rows of one size than a store has places for; "" when all fit."""
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


def allocate(problem: Problem, placed: Sequence[Placed], for_ssd: bool = False) -> Allocation:
    """Divide device memory by marginal gain of link time, then host memory by marginal gain of SSD time.

    ``for_ssd``: device memory by gain of SSD time, too, which weighs large rows less.
    """
    topology = problem.topology
    costs = [item.option.cost for item in placed for _ in item.ranks]
    rank = np.array([r for item in placed for r in item.ranks], dtype=np.int64)
    result = Allocation(costs, rank, np.zeros(len(costs)), np.zeros(len(costs)), {})
    replicas = result.slot == 0
    result.hbm_rows[replicas] = result.memory_rows[replicas] = result.rows[replicas]
    fixed = np.bincount(rank, result.field("fixed_hbm"), topology.world_size) + problem.fixed_hbm
    for r in range(topology.world_size):
        here = np.flatnonzero((rank == r) & ~replicas)
        steps = _steps(costs, here, np.zeros(len(costs)), lambda cost, _: hbm_steps(cost, for_ssd))
        rows, missing = _fill(steps, result.slot[here], float(topology.hbm_per_rank - fixed[r]))
        result.hbm_rows[here] = _whole_rows(rows, result.rows[here])
        if missing > 0:
            result.missing["hbm", r] = int(missing) + 1
    for h in range(topology.hosts):
        here = np.flatnonzero((rank // topology.ranks_per_host == h) & ~replicas)
        _fill_host(problem, result, here, h)
    result.ssd_room = _ssd_room(problem, result)
    return result


def _steps(
    costs: Sequence[ShardCost],
    here: NDArray[np.int64],
    rows: NDArray,
    make: Callable[[ShardCost, float], Steps],
) -> list[Steps]:
    """Return the steps of some shards; equal ones are made once."""
    pairs = [(costs[i], float(rows[i])) for i in here]
    known = {pair: make(*pair) for pair in dict.fromkeys(pairs)}
    return [known[pair] for pair in pairs]


def _fill_host(problem: Problem, result: Allocation, here: NDArray[np.int64], host: int) -> None:
    topology = problem.topology
    steps = _steps(result.costs, here, result.hbm_rows, memory_steps)
    room = topology.host_memory_per_host - problem.fixed_host - float(result.field("fixed_host")[here].sum())
    room += float((result.hbm_rows[here] * result.slot[here]).sum())
    held, missing = _fill(steps, result.slot[here], room)
    result.memory_rows[here] = np.maximum(_whole_rows(held, result.rows[here]), result.hbm_rows[here])
    if missing > 0:
        result.missing["host_memory", host] = int(missing) + 1
    stored = int(result.ssd_need()[here].sum()) - int(topology.ssd_per_host)
    if stored > 0:
        result.missing["ssd", host] = stored


def _ssd_room(problem: Problem, result: Allocation) -> Floats:
    """Return what each store gets of its host's SSD: all of it, as far as the stores have a use for it."""
    topology = problem.topology
    host = result.rank // topology.ranks_per_host
    need = np.bincount(host, result.ssd_need(), topology.hosts)
    left = topology.ssd_per_host - topology.ranks_per_host * STORE_SLACK  # which ranks add to their parts
    most = max(1.0, MOST_STORE_BYTES / problem.work.disk_slack)
    return np.asarray(np.clip(left / np.maximum(need, 1.0), 1.0, most)[host])


def _whole_rows(held: Floats, rows: Floats) -> Floats:
    """Return the slots for ``held`` rows of shards of ``rows``: without an SSD not one may be lacking."""
    every = held >= rows - np.maximum(_WHOLE[0], _WHOLE[1] * rows)
    return np.where(every, rows, np.floor(held))


def _whole_bytes(sizes: NDArray) -> NDArray[np.int64]:
    return np.minimum(sizes, _MOST).astype(np.int64)


def _fill(steps: Sequence[Steps], slot: Floats, room: float) -> tuple[Floats, float]:
    """Return (rows of each shard, bytes missing for the floors) for ``room`` bytes, dearest steps first."""
    rows = np.array([step.rows[0] for step in steps])
    room -= sum(float(step.bytes[0]) for step in steps)
    owner = np.repeat(np.arange(len(steps)), [len(step.bytes) - 1 for step in steps])
    if room < 0 or not len(owner):
        return rows, max(0.0, -room)
    sizes = np.concatenate([np.diff(step.bytes) for step in steps])
    falling = np.concatenate([step.density for step in steps])
    order = np.argsort(-falling, kind="stable")
    whole = np.cumsum(sizes[order]) <= room
    bought = len(order) if whole.all() else int(whole.argmin())
    count = np.bincount(owner[order[:bought]], minlength=len(steps))
    rows = np.array([step.rows[k] for step, k in zip(steps, count, strict=True)])
    if bought == len(order):
        return rows, 0.0
    price = falling[order[bought]]
    tied = np.isclose(falling, price, rtol=1e-9, atol=0.0)
    dearer = np.bincount(owner[(falling > price) & ~tied], minlength=len(steps))
    here = owner[tied]
    if len(np.unique(here)) == len(here) and not any(_ends(steps[i], dearer[i]) for i in here):
        # Equal shards should take equal parts of the steps at the price that the room ends among.
        share = (room - float(sizes[(falling > price) & ~tied].sum())) / float(sizes[tied].sum())
        rows = np.array([step.rows[k] for step, k in zip(steps, dearer, strict=True)])
        rows[here] += share * np.array([np.diff(steps[i].rows)[dearer[i]] for i in here])
        return rows, 0.0
    i, rest = int(owner[order[bought]]), room - float(sizes[order[:bought]].sum())
    last = steps[i].rows[count[i] + 1]
    # Part of a step; on the way to holding everything the index is still there.
    rows[i] = min(rows[i] + np.floor(rest / max(slot[i], 1.0)), max(last - 1, rows[i]))
    return rows, 0.0


def _ends(steps: Steps, corner: int) -> bool:
    """Return whether the step behind ``corner`` leads to all rows, where a store is needed no longer."""
    return corner + 2 == len(steps.rows) and bool(steps.stored[corner])
