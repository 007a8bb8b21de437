"""What this machine's CPU engine takes per row and byte: the costs that ``tierstore bench device`` writes.

Small tables are trained with prefetch, and pushed through the tiers in the ways that a step does; the seconds
of each way are fitted by non-negative least squares to the planner's terms (docs/planner.md). The models by
which these figures are judged (``tierstore bench plan-step``) have other tables, sizes and skews.

Seconds are those of the clock, waits for other batches and for the drive left out: what threads cost one
another is part of them. So nothing else should run meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls

import tierstore
from tierstore import EmbeddingBagConfig, KeyedJaggedTensor, TierConfig
from tierstore.cache import lookup_order
from tierstore.cache.engine import set_num_threads
from tierstore.cache.tiers.memory import bytes_for
from tierstore.cache.tiers.read_ahead import ReadAhead
from tierstore.optim import RowWiseAdagrad
from tierstore.pipeline.session import Session
from tierstore.planner.topology import ROW_SIZE_COSTS

from ._neighbours import LOUD, Neighbours

DIMS = ((16, 96), (24, 48))
"""Of the tables of a collection, two of each: two row sizes, so that their tiers compete for the CPU's caches
as those of most models do."""
_TABLES_PER_DIM = 2
_ROWS = 375_000  # of a table
_IDS, _BAG = 1 << 13, 8  # ids of a table
_HELD = dict(zip(DIMS, (4, 8), strict=True))
"""The memory tiers hold a fourth of one collection's rows, an eighth of the other's, if rows are to miss."""
_DEPTH, _WINDOW = 2, 8
_TRIES = 3
_LOADED = 1 << 16  # rows at a time
_WARM = 10
_CHUNK = 8
"""Batches whose mean is one measurement; the median of these is not moved by the moments in which a shared
machine is slower."""
_SHORT = 3  # as many steps again where they are the shortest
_FEW_MISS = (2.0, 12_500.0)  # many distinct rows, nearly all among those that a fourth of the memory holds
KINDS = {
    "memory": [(0.0, 10.0, _IDS), (1.2, 10.0, _IDS), (*_FEW_MISS, _IDS), (0.6, 10.0, _IDS // 8)],
    "uvm": [(0.0, 10.0, _IDS), (0.7, 10.0, _IDS), (1.2, 10.0, _IDS), (*_FEW_MISS, _IDS)],
    "ssd": [(0.6, 10.0, _IDS), (1.1, 10.0, _IDS), (*_FEW_MISS, _IDS)],
}
"""Where the rows are; of each, popularities P(k-th row) ~ (k + q)^-s as (s, q), and ids of a table."""
_ROUNDS = 3


class Clock:
    """Seconds of the prefetching thread per batch, its waits left out: until it is deduplicated and
    announced, then until its rows are in place."""

    def __init__(self) -> None:
        self.index: list[float] = []
        self.plan: list[float] = []
        self._own = threading.local()  # other threads wait, too

    @property
    def fetch(self) -> list[float]:
        """Both, of every batch that was planned."""
        return [index + plan for index, plan in zip(self.index, self.plan, strict=False)]

    def _timed(self, work: Callable[..., None], into: list[float]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start, self._own.waited = time.perf_counter(), 0.0
            work(*args)
            into.append(time.perf_counter() - start - self._own.waited)

        return timed

    def _waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            wall, busy = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **options)
            finally:
                waited = (time.perf_counter() - wall) - (time.thread_time() - busy)
                self._own.waited = getattr(self._own, "waited", 0.0) + waited

        return timed

    @contextmanager
    def watching(self, bags: Any) -> Iterator[Clock]:
        """Times the prefetches that begin meanwhile, and the store of ``bags``."""
        order = lookup_order.LookupOrder
        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (Session, "_prepare", self._timed(Session._prepare, self.index)),
            (Session, "_plan", self._timed(Session._plan, self.plan)),
            (order, "wait_released", self._waiting(order.wait_released)),
            (ReadAhead, "wait", self._waiting(ReadAhead.wait)),
        ]
        store = bags.engine.store
        if store is not None:
            places += [(store, name, self._waiting(getattr(store, name))) for name in ("read", "write")]
        before = [getattr(owner, name) for owner, name, _ in places]
        for owner, name, timed in places:
            setattr(owner, name, timed)
        try:
            yield self
        finally:
            for (owner, name, _), original in zip(places, before, strict=True):
                setattr(owner, name, original)


@dataclass(frozen=True)
class Part:
    """Of a batch, what is in the tiers of one row size: ids, distinct rows, those that missed, those that
    were read from the store."""

    dim: int
    row_bytes: int
    ids: float
    unique: float
    misses: float
    stores: float

    @property
    def moved(self) -> float:
        return 2 * self.misses * self.row_bytes

    @property
    def computed(self) -> float:
        """Bytes that lookups and updates touch."""
        return 8 * self.ids * self.dim + 2 * self.unique * self.row_bytes


@dataclass(frozen=True)
class Sample:
    """The typical batch of one collection and its seconds by stage. ``others``: CPU seconds per second that
    other processes took."""

    mode: str
    parts: Sequence[Part]
    fetch: float
    compute: float
    others: float = 0.0

    def total(self, name: str) -> float:
        """The sum over the row sizes; "one" for what is once per batch, "lookup", "evict" and "ahead" for
        what is once per row size, as those of the planner's ROW_SIZE_COSTS. "evicted": distinct rows where
        rows may have to leave the fast tier."""
        if name == "one":
            return 1.0
        if name in ROW_SIZE_COSTS:
            due = {"lookup": True, "evict": self.mode != "memory", "ahead": self.mode == "ssd"}[name]
            return float(due * len(self.parts))
        if name == "evicted":
            return self.total("unique") if self.mode != "memory" else 0.0
        return float(sum(getattr(part, name) for part in self.parts))

    @classmethod
    def of(cls, values: dict[str, Any]) -> Sample:
        """From what ``asdict`` made of one."""
        return cls(**{**values, "parts": [Part(**part) for part in values["parts"]]})

    @staticmethod
    def median(same: Iterable[Sample]) -> Sample:
        """The median of samples of one kind, disturbed ones left out where there are others."""
        every = list(same)
        calm = [sample for sample in every if sample.others < LOUD] or every
        values = {
            name: float(np.median([getattr(s, name) for s in calm]))
            for name in ("fetch", "compute", "others")
        }
        return replace(calm[0], **values)


def runtime_figures(steps: int = 20, folder: str | None = None) -> dict[str, Any]:
    """Fields of a topology: ``hbm_bw``, ``host_link_bw``, ``index_rows_per_s``, ``row_seconds`` and
    ``row_size_seconds``; and ``step_s``, what a collection computes per step beside its rows. From ``steps``
    batches of each of 22 kinds, three times."""
    return fitted([found for mode in KINDS for dims in DIMS for found in samples(mode, dims, steps, folder)])


def alone(mode: str, dims: tuple[int, ...], steps: int, folder: str) -> dict[str, Any]:
    """One round of :func:`samples` in a process of its own, and how disturbed the most disturbed was."""
    torch.set_num_threads(1)
    set_num_threads(1)
    found = samples(mode, dims, steps, folder, rounds=1)
    return {"others": max(s.others for s in found), "samples": [asdict(s) for s in found]}


def samples(
    mode: str, dims: tuple[int, ...], steps: int, folder: str | None = None, rounds: int = _ROUNDS
) -> list[Sample]:
    """Those of all :data:`KINDS` of a mode, from one collection, in turns; of each the median."""
    bags = _collection(mode, dims, folder)
    count = steps * (_SHORT if mode == "memory" else 1)
    try:
        turns = [
            [_calm(bags, mode, popularity, ids, count, seed) for *popularity, ids in KINDS[mode]]
            for seed in range(rounds)
        ]
    finally:
        bags.close(commit=False)
    return [Sample.median(same) for same in zip(*turns, strict=True)]


def _calm(bags: Any, mode: str, popularity: Iterable[float], count: int, steps: int, seed: int) -> Sample:
    """The least disturbed of three at most; the first one that no other process disturbed."""
    found: list[Sample] = []
    while len(found) < _TRIES and (not found or found[-1].others >= LOUD):
        found.append(_sample(bags, mode, popularity, count, steps, seed + _ROUNDS * len(found)))
    return min(found, key=lambda sample: sample.others)


def _sample(bags: Any, mode: str, popularity: Iterable[float], count: int, steps: int, seed: int) -> Sample:
    """Trains the tables for some batches of ``count`` ids each and takes the mean one."""
    (s, q), random = popularity, np.random.default_rng(seed)
    weights = (np.arange(_ROWS) + q) ** -s
    edges, names = np.cumsum(weights) / weights.sum(), np.random.default_rng(99).permutation(_ROWS)
    tables = bags.embedding_bag_configs()
    drawn = [
        [names[np.searchsorted(edges, random.random(count))] for _ in tables] for _ in range(steps + _WARM)
    ]
    clock, compute, counts = Clock(), [], []
    batches = [_features(bags, ids) for ids in drawn]
    groups = bags.engine.groups
    width = sum(table.embedding_dim for table in tables)
    output_grad, dense = torch.ones(count // _BAG, width), _Dense(count // _BAG, width)
    neighbours = Neighbours()
    with clock.watching(bags):
        for features in tierstore.prefetch(iter(batches), bags, depth=_DEPTH, window=_WINDOW):
            start = time.thread_time()
            bags(features).values().backward(output_grad)
            compute.append(time.thread_time() - start)
            dense.step()
            counts.append([_counted(group) for group in groups])
    others = neighbours.share()
    parts = []
    for i, group in enumerate(groups):
        missed, read = (np.array(counts[-1][i]) - counts[_WARM][i]) / (len(counts) - 1 - _WARM)
        own = [t for t, table in enumerate(tables) if table.embedding_dim == group.layout.dim]
        unique = float(np.mean([sum(len(np.unique(ids[t])) for t in own) for ids in drawn]))
        layout = group.layout.dim, group.layout.row_bytes
        parts.append(Part(*layout, count * len(own), unique, float(missed), float(read)))
    # The last batches are planned without as many behind them in the window.
    typical = slice(_WARM, -_WINDOW)
    stages = (_middle(values[typical]) for values in (clock.fetch, compute))
    return Sample(mode, parts, *stages, others)


def _middle(seconds: Sequence[float]) -> float:
    """The median of the means of :data:`_CHUNK` neighbours each."""
    chunks = np.array_split(np.array(seconds), max(1, len(seconds) // _CHUNK))
    return float(np.median([chunk.mean() for chunk in chunks]))


def _counted(group: Any) -> tuple[int, int]:
    """Rows that missed in the fast tier of a group, and that were found in its store, so far."""
    hbm, ssd = group.stats.tiers["hbm"], group.stats.tiers.get("ssd")
    return hbm.rows - hbm.row_hits, 0 if ssd is None else ssd.row_hits


class _Dense:
    """What the training thread usually does beside the bags: a small perceptron's step."""

    def __init__(self, examples: int, dim: int) -> None:
        self.input = torch.randn(examples, dim)
        self.model = torch.nn.Sequential(torch.nn.Linear(dim, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.input).square().mean().backward()
        self.optimizer.step()


def _features(bags: Any, ids: list[NDArray[np.int64]]) -> KeyedJaggedTensor:
    names = [table.feature_names[0] for table in bags.embedding_bag_configs()]
    every = torch.from_numpy(np.concatenate(ids))
    return KeyedJaggedTensor(names, every, None, torch.full((len(every) // _BAG,), _BAG))


def _collection(mode: str, dims: tuple[int, ...], folder: str | None) -> Any:
    optimizer = RowWiseAdagrad(lr=0.01)
    tables = [
        EmbeddingBagConfig(_ROWS, dim, f"t{dim}_{i}", feature_names=[f"f{dim}_{i}"])
        for dim in dims
        for i in range(_TABLES_PER_DIM)
    ]
    rows = _ROWS * _TABLES_PER_DIM

    def size(held: int) -> int:
        return sum(bytes_for(held, optimizer.row_bytes(dim), "lookahead") for dim in dims)

    some, all_ = size(rows // _HELD[dims]), size(rows + rows // 8)
    path = None if folder is None else f"{folder}/{mode}{dims[0]}"
    config = {
        "memory": TierConfig(hbm=all_, ssd=0),
        "uvm": TierConfig(hbm=some, uvm=all_, ssd=0),
        "ssd": TierConfig(hbm=some, uvm=some, path=path),
    }[mode]
    bags = tierstore.EmbeddingBagCollection(tables, config=config, optimizer=optimizer)
    for table in tables:
        for first in range(0, _ROWS, _LOADED):
            ids = torch.arange(first, min(first + _LOADED, _ROWS))
            bags.load_rows(ids, torch.zeros(len(ids), table.embedding_dim), None, table.name)
    return bags


def fitted(samples: list[Sample]) -> dict[str, Any]:
    """The planner's terms from samples of all :data:`KINDS`."""
    memory = [s for s in samples if s.mode == "memory"]
    step, lookup, update, per_byte = _fit(
        memory, ("one", "ids", "unique", "computed"), [s.compute for s in memory]
    )
    terms = ("ids", "unique", "evicted", "misses", "moved", "stores", *ROW_SIZE_COSTS)
    per_id, plan, policy, link, link_byte, store, *fixed = _fit(samples, terms, [s.fetch for s in samples])
    return {
        "index_rows_per_s": 1 / max(per_id, 1e-12),
        "row_size_seconds": dict(zip(ROW_SIZE_COSTS, fixed, strict=True)),
        "hbm_bw": 1 / max(per_byte, 1e-13),
        "host_link_bw": 1 / max(link_byte, 1e-13),
        "step_s": step,
        "row_seconds": {
            "lookup": lookup,
            "update": update,
            "plan": plan,
            "policy": policy,
            "link": link,
            "store": store,
        },
    }


def _fit(samples: Sequence[Sample], terms: Iterable[str], seconds: Sequence[float]) -> list[float]:
    """Non-negative coefficients, by relative error."""
    a = np.array([[s.total(name) for name in terms] for s in samples], dtype=np.float64)
    b = np.maximum(seconds, 1e-6)
    scale = a.max(axis=0)
    found, _ = nnls(a / scale / b[:, None], np.ones(len(b)))
    return [float(value) for value in found / scale]
