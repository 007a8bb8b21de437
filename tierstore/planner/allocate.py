"""Divides each rank's device memory and each host's memory among the shards placed there, exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierstore.placement import STORE_SLACK
from tierstore.planner.costs import MOST_STORED_ROWS, Problem
from tierstore.planner.curves import lower_hull
from tierstore.planner.options import Placed, ShardCost
from tierstore.rounds import FloatArray

_WHOLE = 1e-6, 1e-14  # rows, and share of them: what rounding may leave of a shard that is held whole
_MOST = 2.0**62  # bytes: what is more does not fit anywhere


@dataclass(eq=False)
class Steps:
    """The best ways to spend bytes on a shard: corners of a convex curve of seconds over bytes, float64.

    At the last corner all rows are held. ``sizes``, ``density``: bytes from each corner to the next, and
    seconds that each of these saves, falling.
    """

    bytes: FloatArray
    seconds: FloatArray

    def __post_init__(self) -> None:
        self.sizes = np.diff(self.bytes)
        self.density = np.minimum.accumulate(-np.diff(self.seconds) / self.sizes)


def steps_of(cost: ShardCost, floor: float, index: float, per_miss: str, slot: str = "slot_bytes") -> Steps:
    """Return what more than ``floor`` rows save; ``per_miss``: the field with the seconds of a missing row.

    A shard takes ``index`` bytes more unless all its rows are held, so the last corner may come early, in one
    long step that is worth little unless it is taken whole.
    """
    rows, misses = corners(cost, floor)
    size, seconds = rows * getattr(cost, slot) + index, misses * cost.unique * getattr(cost, per_miss)
    size[-1] -= index
    seconds[:-1] += cost.policy_s if per_miss == "link_s" else 0.0
    fewer = np.append(size[:-1] < size[-1], True)
    return Steps(*lower_hull(size[fewer], seconds[fewer]))


def corners(cost: ShardCost, floor: float) -> tuple[FloatArray, FloatArray]:
    """Return the corners of the miss curve behind ``floor`` rows, and the point there."""
    beyond = cost.curve.rows > floor
    rows = np.concatenate([[floor], cost.curve.rows[beyond]])
    return rows, np.concatenate([[cost.curve.at(floor)], cost.curve.misses[beyond]])


@dataclass(eq=False)
class Allocation:
    """Rows of each shard in device memory, and in device and host memory together (float64, (shards,)).

    Shards are in the order of the placements and their ranks. ``missing``: bytes by which the memories are
    too small, by resource and place: {("hbm", rank): n, ("host_memory", host): n, ("ssd", host): n}.
    ``ssd_bytes``: int64 (shards,), of the SSD, at least what a shard needs. ``promised``: bool (shards,), to
    which shards constraints promise memory.
    """

    costs: list[ShardCost]
    rank: NDArray[np.int64]
    hbm_rows: FloatArray
    memory_rows: FloatArray
    promised: NDArray[np.bool_]
    missing: dict[tuple[str, int], int] = field(default_factory=dict)
    ssd_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        self.rows = self.field("rows")

    def field(self, name: str) -> FloatArray:
        """Return one of the fields of ShardCost for every shard."""
        return np.array([getattr(cost, name) for cost in self.costs], dtype=np.float64)

    def misses(self, rows: FloatArray) -> FloatArray:
        """Return the misses per unique row of each shard if it held ``rows`` (shards,)."""
        pairs = list(zip(self.costs, rows.tolist(), strict=True))
        known = {pair: pair[0].curve.at(pair[1]) for pair in dict.fromkeys(pairs)}  # equal shards ask once
        return np.array([known[pair] for pair in pairs], dtype=np.float64)

    @property
    def stored(self) -> NDArray[np.bool_]:
        """Which shards need the SSD."""
        return self.memory_rows < self.rows

    @property
    def own(self) -> NDArray[np.bool_]:
        """Which shards have their slots to themselves: those in ``promised``, those whose rows are all in
        device memory, and those without rows on the SSD beside shards that have."""
        held = self.memory_rows if self.stored.any() else self.hbm_rows
        return self.promised | (held >= self.rows)

    def hbm_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of each shard on its device, buffers included: int64 (shards,)."""
        return _whole_bytes(self.hbm_rows * self.field("slot_bytes") + self.field("fixed_hbm"))

    def uvm_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of each shard in host memory, the store's index included: int64 (shards,)."""
        held = (self.memory_rows - self.hbm_rows) * self.field("host_slot_bytes") + self.field("fixed_host")
        return _whole_bytes(held + self.field("index_bytes") * self.stored)

    def read_ahead_bytes(self) -> NDArray[np.int64]:
        """Return the part of ``uvm_bytes`` for rows that are read ahead: int64 (shards,)."""
        return _whole_bytes(self.field("read_ahead") * self.stored)

    def ssd_need(self) -> NDArray[np.int64]:
        """Return the bytes of the SSD without which each shard does not fit: int64 (shards,)."""
        return _whole_bytes(self.field("ssd_bytes") * self.stored)

    def crowded(self) -> str:
        """Return which rank stores more rows of one size than a store has places for; "" when all fit."""
        counts: Counter[tuple[int, int]] = Counter()
        for i in np.flatnonzero(self.stored):
            counts[int(self.rank[i]), self.costs[i].stored_bytes] += self.costs[i].rows
        (rank, size), count = max(counts.items(), key=lambda item: item[1], default=((0, 0), 0))
        places = f"and a store has places for {MOST_STORED_ROWS:,} of one size"
        crowded = f"rank {rank} would store {count:,} rows of {size} bytes, {places}"
        return crowded if count > MOST_STORED_ROWS else ""


def allocate(problem: Problem, placed: Sequence[Placed], per_miss: str = "link_s") -> Allocation:
    """Divide device memory by marginal gain of link time, then host memory by marginal gain of SSD time.

    ``per_miss``: "ssd_s" divides device memory by gain of SSD time, too, which weighs large rows less.
    """
    topology = problem.topology
    costs = [item.option.cost for item in placed for _ in item.ranks]
    rank = np.array([r for item in placed for r in item.ranks], dtype=np.int64)
    promised = [problem.demands[item.table].promises_memory for item in placed for _ in item.ranks]
    hbm_rows, memory_rows = np.zeros((2, len(costs)))
    result = Allocation(costs, rank, hbm_rows, memory_rows, np.array(promised, dtype=bool))
    fixed = np.bincount(rank, result.field("fixed_hbm"), topology.world_size) + problem.fixed_hbm
    for r in range(topology.world_size):
        here, room = np.flatnonzero(rank == r), float(topology.hbm_per_rank - fixed[r])
        floors = result.field("hbm_floor")[here]
        result.hbm_rows[here], missing = _fill(result, here, floors, per_miss, room)
        if missing > 0:
            result.missing["hbm", r] = int(missing) + 1
    host = rank // topology.ranks_per_host
    for h in range(topology.hosts):
        _fill_host(problem, result, np.flatnonzero(host == h), h)
    # A store gets all of its host's SSD that it has a use for, but for what ranks add to their parts.
    left = topology.ssd_per_host - topology.ranks_per_host * STORE_SLACK
    own = result.ssd_need()
    need = np.bincount(host, own, topology.hosts)
    most = np.maximum(own, result.field("max_ssd_bytes") * result.stored)
    result.ssd_bytes = _whole_bytes(np.clip(own * (left / np.maximum(need, 1.0))[host], own, most))
    return result


def _fill_host(problem: Problem, result: Allocation, here: NDArray[np.int64], host: int) -> None:
    topology, held = problem.topology, result.hbm_rows[here]
    room = topology.host_memory_per_host - problem.fixed_host - float(result.field("fixed_host")[here].sum())
    room += float((held * result.field("host_slot_bytes")[here]).sum())
    floors, index = np.maximum(held, result.field("memory_floor")[here]), result.field("index_bytes")[here]
    rows, missing = _fill(result, here, floors, "ssd_s", room, index, "host_slot_bytes")
    result.memory_rows[here] = np.maximum(held, rows)  # rows that become bytes and rows again are rounded
    if missing > 0:
        result.missing["host_memory", host] = int(missing) + 1
    stored = int(result.ssd_need()[here].sum()) - int(topology.ssd_per_host)
    if stored > 0:
        result.missing["ssd", host] = stored


def _fill(
    result: Allocation,
    here: NDArray[np.int64],
    floors: FloatArray,
    per_miss: str,
    room: float,
    index: FloatArray | float = 0.0,
    slot_bytes: str = "slot_bytes",
) -> tuple[FloatArray, float]:
    """Spend ``room`` bytes on shards, ``floors`` first; return the rows of each, and the bytes missing.

    ``index``, ``per_miss``, ``slot_bytes``: see :func:`steps_of`.
    """
    slot, rows, index = result.field(slot_bytes)[here], result.rows[here], np.broadcast_to(index, here.shape)
    shards = list(zip((result.costs[i] for i in here), floors.tolist(), index.tolist(), strict=True))
    known = {one: steps_of(*one, per_miss, slot_bytes) for one in dict.fromkeys(shards)}
    steps = [known[one] for one in shards]  # equal shards have equal steps
    held, every = (np.array([step.bytes[corner] for step in steps]) for corner in (0, -1))
    room -= float(held.sum())
    owner = np.repeat(np.arange(len(here)), [len(step.density) for step in steps])
    if room >= 0 and len(owner):
        size, density = (np.concatenate([getattr(s, name) for s in steps]) for name in ("sizes", "density"))
        ends = np.append(np.diff(owner) > 0, True) & (index[owner] > 0)
        held += np.bincount(owner, _bought(size, density, ends, room), len(here))
    whole = held >= every - np.maximum(_WHOLE[0], _WHOLE[1] * rows) * slot
    return np.where(whole, rows, np.floor((held - index) / slot)), max(0.0, -room)


def _bought(size: FloatArray, density: FloatArray, ends: NDArray[np.bool_], room: float) -> FloatArray:
    """Return the bytes of each step that ``room`` bytes buy, densest first.

    Steps at the price that the room ends among are taken in equal parts, so that equal shards get equal rows.
    Steps that end an index (``ends``) are of use only whole, and are taken one after another.
    """
    order = np.argsort(-density, kind="stable")
    over = np.flatnonzero(np.cumsum(size[order]) > room)
    price = density[order[over[0]]] if len(over) else -np.inf
    tied = np.isclose(density, price, rtol=1e-9, atol=0.0)
    bought = size * ((density > price) & ~tied)
    left = room - float(bought.sum())
    if ends[tied].any():
        bought[tied] = np.clip(left - np.cumsum(size[tied]) + size[tied], 0, size[tied])
    else:
        bought[tied] = size[tied] * left / max(float(size[tied].sum()), 1.0)
    return bought


def _whole_bytes(sizes: NDArray) -> NDArray[np.int64]:
    return np.minimum(sizes, _MOST).astype(np.int64)
