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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls

import tierstore
from tierstore import EmbeddingBagConfig, KeyedJaggedTensor, TierConfig
from tierstore.cache.memory_tier import bytes_for
from tierstore.cache.read_ahead import ReadAhead
from tierstore.cache.sequence import Sequence
from tierstore.optim import RowWiseAdagrad
from tierstore.pipeline.session import Session

_DIMS = (16, 96)
_ROWS = 1_500_000
_IDS, _BAG = 1 << 14, 8
_HELD = 4  # the memory tiers hold a fourth of the rows where rows are to miss
_DEPTH, _WINDOW = 2, 8
STAGES = ("fetch", "compute")
_LOADED = 1 << 16  # rows at a time
_WARM = 10
_SHORT = 3  # as many steps again where they are the shortest
_FEW_MISS = (2.0, 50_000.0)  # many distinct rows, nearly all among those that a fourth of the memory holds
KINDS = {
    "memory": [(0.0, 10.0, _IDS), (1.2, 10.0, _IDS), (*_FEW_MISS, _IDS), (0.6, 10.0, _IDS // 8)],
    "uvm": [(0.0, 10.0, _IDS), (0.7, 10.0, _IDS), (1.2, 10.0, _IDS), (*_FEW_MISS, _IDS)],
    "ssd": [(0.6, 10.0, _IDS), (1.1, 10.0, _IDS), (*_FEW_MISS, _IDS)],
}
"""Where the rows are; of each, popularities P(k-th row) ~ (k + q)^-s as (s, q), and ids of a batch."""
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
        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (Session, "_prepare", self._timed(Session._prepare, self.index)),
            (Session, "_plan", self._timed(Session._plan, self.plan)),
            (Sequence, "wait_released", self._waiting(Sequence.wait_released)),
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
class Sample:
    """The typical batch of one table: ids, distinct rows, those that missed, those that were read from the
    store, and seconds by stage."""

    mode: str
    dim: int
    row_bytes: int
    ids: float
    unique: float
    misses: float
    stores: float
    fetch: float
    compute: float


def runtime_figures(steps: int = 20, folder: str | None = None) -> dict[str, Any]:
    """Fields of a topology: ``hbm_bw``, ``host_link_bw``, ``index_rows_per_s``, ``lookup_seconds`` and
    ``row_seconds``; and ``step_s``, what a collection computes per step beside its rows. From ``steps``
    batches of each of 22 kinds, three times."""
    return fitted([found for mode in KINDS for dim in _DIMS for found in samples(mode, dim, steps, folder)])


def samples(mode: str, dim: int, steps: int, folder: str | None = None) -> list[Sample]:
    """Those of all :data:`KINDS` of a mode, from one table, in turns; of each the median."""
    bags = _collection(mode, dim, folder)
    count = steps * (_SHORT if mode == "memory" else 1)
    try:
        rounds = [
            [_sample(bags, mode, popularity, ids, count, seed) for *popularity, ids in KINDS[mode]]
            for seed in range(_ROUNDS)
        ]
    finally:
        bags.close(commit=False)
    return [
        replace(turns[0], **{name: float(np.median([getattr(t, name) for t in turns])) for name in STAGES})
        for turns in zip(*rounds, strict=True)
    ]


def _sample(bags: Any, mode: str, popularity: Iterable[float], count: int, steps: int, seed: int) -> Sample:
    """Trains the table for some batches of ``count`` ids and takes the median one."""
    (s, q), random = popularity, np.random.default_rng(seed)
    weights = (np.arange(_ROWS) + q) ** -s
    edges, names = np.cumsum(weights) / weights.sum(), np.random.default_rng(99).permutation(_ROWS)
    drawn = [names[np.searchsorted(edges, random.random(count))] for _ in range(steps + _WARM)]
    clock, compute, counts = Clock(), [], []
    batches = [_features(ids) for ids in drawn]
    chain = bags.engine.chains[0]
    dim = chain.layout.dim
    output_grad = torch.ones(count // _BAG, dim)
    dense = _Dense(count // _BAG, dim)
    hbm, ssd = (chain.tiers.get(name) for name in ("hbm", "ssd"))
    with clock.watching(bags):
        for features in tierstore.prefetch(iter(batches), bags, depth=_DEPTH, window=_WINDOW):
            start = time.thread_time()
            bags(features).values().backward(output_grad)
            compute.append(time.thread_time() - start)
            dense.step()
            counts.append((hbm.rows - hbm.row_hits, 0 if ssd is None else ssd.row_hits))
    missed, read = (np.array(counts[-1]) - counts[_WARM]) / (len(counts) - 1 - _WARM)
    # The last batches are planned without as many behind them in the window.
    typical = slice(_WARM, -_WINDOW)
    unique = float(np.mean([len(np.unique(ids)) for ids in drawn]))
    return Sample(
        mode,
        dim,
        chain.layout.row_bytes,
        count,
        unique,
        missed,
        read,
        *(float(np.median(values[typical])) for values in (clock.fetch, compute)),
    )


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


def _features(ids: NDArray[np.int64]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.from_numpy(ids), None, torch.full((len(ids) // _BAG,), _BAG))


def _collection(mode: str, dim: int, folder: str | None) -> Any:
    optimizer = RowWiseAdagrad(lr=0.01)
    size = optimizer.row_bytes(dim)
    some, all_ = (bytes_for(rows, size, "lookahead") for rows in (_ROWS // _HELD, _ROWS + 1))
    path = None if folder is None else f"{folder}/{mode}{dim}"
    config = {
        "memory": TierConfig(hbm=all_, ssd=0),
        "uvm": TierConfig(hbm=some, uvm=all_, ssd=0),
        "ssd": TierConfig(hbm=some, uvm=some, path=path),
    }[mode]
    table = EmbeddingBagConfig(_ROWS, dim, "t", feature_names=["f"])
    bags = tierstore.EmbeddingBagCollection([table], config=config, optimizer=optimizer)
    for first in range(0, _ROWS, _LOADED):
        ids = torch.arange(first, min(first + _LOADED, _ROWS))
        bags.load_rows(ids, torch.zeros(len(ids), dim), None, "t")
    return bags


def fitted(samples: list[Sample]) -> dict[str, Any]:
    """The planner's terms from samples of all :data:`KINDS`."""
    memory, uvm, ssd = ([s for s in samples if s.mode == mode] for mode in KINDS)
    each, per_id, plan = _fit([(1.0, s.ids, s.unique) for s in memory], [s.fetch for s in memory])
    step, lookup, update, per_byte = _fit(
        [(1.0, s.ids, s.unique, 8 * s.ids * s.dim + 2 * s.unique * s.row_bytes) for s in memory],
        [s.compute for s in memory],
    )

    def held(s: Sample) -> float:
        return each + per_id * s.ids + plan * s.unique

    policy, link, link_byte = _fit(
        [(s.unique, s.misses, 2 * s.misses * s.row_bytes) for s in uvm], [s.fetch - held(s) for s in uvm]
    )

    def moved(s: Sample) -> float:
        return policy * s.unique + (link + 2 * link_byte * s.row_bytes) * s.misses

    ahead, store = _fit([(s.unique, s.stores) for s in ssd], [s.fetch - held(s) - moved(s) for s in ssd])
    return {
        "index_rows_per_s": 1 / max(per_id, 1e-12),
        "lookup_seconds": each,
        "hbm_bw": 1 / max(per_byte, 1e-13),
        "host_link_bw": 1 / max(link_byte, 1e-13),
        "step_s": step,
        "row_seconds": {
            "lookup": lookup,
            "update": update,
            "plan": plan,
            "policy": policy,
            "link": link,
            "ahead": ahead,
            "store": store,
        },
    }


def _fit(terms: list[tuple[float, ...]], seconds: list[float]) -> list[float]:
    """Non-negative coefficients, by relative error."""
    a, b = np.array(terms, dtype=np.float64), np.maximum(seconds, 1e-6)
    scale = a.max(axis=0)
    found, _ = nnls(a / scale / b[:, None], np.ones(len(b)))
    return [float(value) for value in found / scale]
