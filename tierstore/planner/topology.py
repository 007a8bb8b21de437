"""The machines: how many ranks and hosts, bytes of each tier, and how fast bytes and rows move."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.config import is_integer, is_number, parse_bytes
from tierstore.planner.checks import fields_of, must_be, require
from tierstore.rounds import BLOCK, FILE_BYTES, MERGED_READ_BYTES, Cost, batch_cost

_SIZES = ("hbm_per_rank", "host_memory_per_host", "ssd_per_host")
_MOST_RANKS = 1 << 16

ROW_COSTS = {
    "lookup": "each id looked up, forward and backward",
    "update": "each distinct row of a batch that is updated",
    "plan": "each distinct row found in the slot index and pinned",
    "policy": "each distinct row of a table that device memory does not hold whole: next uses and victims",
    "link": "each row that is not in device memory",
    "store": "each row that comes from the store, on the CPU",
    "batch": "each batch that is prefetched, whatever its rows",
    "read": "each batch of which rows come from the store, whatever the rows",
}
"""Keys of ``Topology.row_seconds``, and what each is of."""

EXCHANGE_COSTS = {
    "step": "a step of one sharded collection, whatever the rows and bytes",
    "collective": "waiting for each of its collectives, during which nothing is computed",
    "piece": "what one rank asks one shard for; half of it where it is asked, half where it is answered",
}
"""Keys of ``Topology.exchange_seconds``, and what each is of; a rank alone exchanges nothing."""

# Round figures of data sheets for one current accelerator, its host and its drives; of a server without one
# for "cpu". They are stated, not measured: `tierstore bench device` replaces them.
_RATES = {
    "hbm_bw": (2.0e12, 20e9),
    "host_link_bw": (50e9, 10e9),
    "ssd_bw": (20e9, 2e9),
    "ssd_write_bw": (10e9, 1e9),
    "ssd_read_iops": (3e6, 100e3),
    "intra_host_bw": (200e9, 4e9),
    "inter_host_bw": (25e9, 1e9),
    "index_rows_per_s": (50e6, 10e6),
}
ASSUMED_RATES: dict[str, dict[str, float]] = {
    device: {name: rates[i] for name, rates in _RATES.items()} for i, device in enumerate(("cuda", "cpu"))
}
# Of "cpu": measured with 2 ranks on 2 processors (docs/planner.md). Of "cuda" nothing was measured: zero.
ASSUMED_EXCHANGE_SECONDS = {"cpu": {"step": 4e-3, "collective": 3e-4, "piece": 5e-5}, "cuda": {}}

ASSUMED: Any = None
"""Default of a rate: take the assumed one."""


@dataclass(frozen=True)
class Topology:
    """``hosts`` equal machines with ``ranks_per_host`` ranks each; rank r is on host r // ranks_per_host.

    Sizes are bytes, or strings ("80GiB") that become bytes. ``hbm_per_rank`` is a rank's own; host memory and
    SSD are shared by the ranks of a host. Rates are per second:

    - ``hbm_bw``: bytes, device memory of a rank.
    - ``host_link_bw``: bytes between device and host memory of a rank, both directions together.
    - ``ssd_bw``, ``ssd_write_bw``: bytes of reads of 64 KiB and of large writes of a host's drives together.
    - ``ssd_read_iops``: random reads of 4 KiB of a host. What a read takes grows with its bytes, evenly.
    - ``intra_host_bw``, ``inter_host_bw``: bytes that a rank receives from ranks of its own, of other hosts.
    - ``index_rows_per_s``: ids that a rank deduplicates and looks up in its slot index.
    - ``row_seconds``: what a row costs beside its bytes, by :data:`ROW_COSTS`; zero where nothing is said.
    - ``exchange_seconds``: what exchanging takes beside bytes, by :data:`EXCHANGE_COSTS`.
    - ``overlap_loss``: the share by which a step takes longer than either of two stages that take equally
      long: 0 if they overlap wholly, 1 if they do not at all. ``ssd_overlap_loss``: the same of the drives'
      stage and all others.
    - ``processors_per_rank``: of the host's CPU; with fewer than two, a rank's threads take turns (matters
      for device "cpu" only).

    ``assumed`` names the rates (and the seconds of exchanges) that were neither given nor measured: reports
    print them.
    """

    hosts: int = 1
    ranks_per_host: int = 1
    hbm_per_rank: int = 0
    host_memory_per_host: int = 0
    ssd_per_host: int = 0
    hbm_bw: float = ASSUMED
    host_link_bw: float = ASSUMED
    ssd_bw: float = ASSUMED
    ssd_write_bw: float = ASSUMED
    ssd_read_iops: float = ASSUMED
    intra_host_bw: float = ASSUMED
    inter_host_bw: float = ASSUMED
    index_rows_per_s: float = ASSUMED
    row_seconds: Mapping[str, float] = field(default_factory=dict)
    exchange_seconds: Mapping[str, float] = field(default_factory=dict)
    overlap_loss: float = 0.0
    ssd_overlap_loss: float = 0.0
    processors_per_rank: float = 2.0
    device: str = "cuda"
    assumed: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        is_device = isinstance(self.device, str) and self.device in ASSUMED_RATES
        must_be("device", self.device, is_device, '"cuda" or "cpu"')
        for name in ("hosts", "ranks_per_host"):
            value = getattr(self, name)
            must_be(f"topology: {name}", value, is_integer(value, 1), "a positive integer")
        ranks = self.world_size
        require(ranks <= _MOST_RANKS, f"topology: {ranks} ranks; plans are made for {_MOST_RANKS} at most")
        for name in _SIZES:
            object.__setattr__(self, name, parse_bytes(getattr(self, name), f"topology: {name}"))
        require(self.hbm_per_rank, "topology: hbm_per_rank is 0; kernels need a cache to work on")
        assumed = [name for name in _RATES if self._fill_rate(name)]
        if not self.exchange_seconds:
            object.__setattr__(self, "exchange_seconds", ASSUMED_EXCHANGE_SECONDS[self.device])
            if ranks > 1:
                assumed.append("exchange_seconds")
        object.__setattr__(self, "assumed", tuple(assumed))
        for name, known in (("row_seconds", ROW_COSTS), ("exchange_seconds", EXCHANGE_COSTS)):
            object.__setattr__(self, name, _checked_seconds(name, getattr(self, name), known))
        _must_be_positive("processors_per_rank", self.processors_per_rank)
        for name in ("overlap_loss", "ssd_overlap_loss"):
            loss = getattr(self, name)
            is_share = is_number(loss) and 0 <= loss <= 1
            must_be(f"topology: {name}", loss, is_share, "a number from 0 to 1")

    def _fill_rate(self, name: str) -> bool:
        """Make a rate a number, and return whether it is the assumed one."""
        value = getattr(self, name)
        assumed = value is ASSUMED
        if assumed:
            value = ASSUMED_RATES[self.device][name]
        elif isinstance(value, str):
            value = parse_bytes(value, f"topology: {name}")
        _must_be_positive(name, value)
        object.__setattr__(self, name, float(value))
        return assumed

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.hosts * self.ranks_per_host

    def exchange(self, kind: str) -> float:
        """Return one of ``exchange_seconds``; 0 for a rank alone."""
        return self.exchange_seconds[kind] if self.world_size > 1 else 0.0

    @property
    def one_fetcher(self) -> bool:
        """Whether one thread of a rank deduplicates, moves and reads in turn, as the CPU engine's does."""
        return self.device == "cpu"

    @property
    def in_turn(self) -> float:
        """Of the seconds that a rank's training thread computes, the share during which its fetching thread
        has no processor: with p processors two threads of t seconds each take max(t, 2 t / p)."""
        return min(1.0, max(0.0, 2 / self.processors_per_rank - 1)) if self.one_fetcher else 0.0

    def step_seconds(self, stages: NDArray, ssd: NDArray) -> float:
        """Return the seconds of a step of the slowest rank. ``stages``: seconds of each rank and stage,
        (ranks, stages); ``ssd``: seconds of the drives of each rank's host, (ranks,).

        Stages of equal means, but not of equal seconds in every batch, wait for one another, since few
        batches are in flight.
        """
        own = _overlapped(stages, self.overlap_loss)
        return float(_overlapped(np.column_stack([own, ssd]), self.ssd_overlap_loss).max())

    @property
    def read_cost(self) -> Cost:
        """Return the seconds of a host's drives for one of many random reads, and for each of its bytes."""
        small, large = 1 / self.ssd_read_iops, MERGED_READ_BYTES / self.ssd_bw
        byte = max((large - small) / (MERGED_READ_BYTES - BLOCK), 1e-15)
        return max(small - byte * BLOCK, 1e-15), byte

    def read_seconds(self, size: int) -> float:
        """Return the seconds of a host's drives for one of many random reads of ``size`` bytes."""
        request, byte = self.read_cost
        return request + byte * size

    def ahead_seconds(self, lacking: float, record: int, rows: float, window: int, room: float) -> float:
        """Return the seconds of the drives for the reads of a batch that lacks ``lacking`` of ``rows`` stored
        records of ``record`` bytes. ``window``: batches known ahead; ``room``: rows that may be held."""
        return batch_cost(lacking, window, room, record, FILE_BYTES * record * rows, self.read_cost)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Topology:
        """Make one of the mapping of a topology.yaml; raise ConfigError for unknown and missing fields."""
        notes = ("measured", "measured_through_page_cache")
        known = (*(item.name for item in fields(cls) if item.init), *notes)
        given = fields_of(values, "topology", known, ("hbm_per_rank", "host_memory_per_host"))
        return cls(**{key: value for key, value in given.items() if key not in notes})


def _overlapped(stages: NDArray, loss: float) -> NDArray:
    """Return the seconds of ``stages``, (n, stages), of which two that take equally long take 1 + ``loss``
    times as long as one: from the longest (no loss) to the sum of all (a loss of 1)."""
    longest = stages.max(axis=1, initial=1e-12)
    if loss < 1e-3:
        return longest
    power = math.log(2) / math.log1p(loss)
    return longest * ((stages / longest[:, None]) ** power).sum(axis=1) ** (1 / power)


def _must_be_positive(name: str, value: Any) -> None:
    must_be(f"topology: {name}", value, is_number(value) and 0 < value < math.inf, "a positive number")


def _checked_seconds(of: str, values: Any, known: Iterable[str]) -> dict[str, float]:
    mapping = isinstance(values, Mapping) and set(values) <= set(known)
    require(mapping, f"topology: {of} must map some of {list(known)} to seconds")
    for name, value in values.items():
        must_be(f"topology: {of}[{name!r}]", value, is_number(value) and 0 <= value < math.inf, "seconds")
    return {name: float(values.get(name, 0.0)) for name in known}
