"""What this machine's CPU engine takes per row and byte: the costs that ``tierstore bench device`` writes.

Small tables are trained with prefetch, and pushed through the tiers in the ways that a step does; the seconds
of each way are fitted by non-negative least squares to the planner's terms (docs/planner.md). The models by
which these figures are judged (``tierstore bench plan-step``) have other tables, sizes and skews.

Work is measured in processor time of its thread, so other processes disturb it little; only what the drive
keeps a thread waiting is measured by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls

import tierstore
from tierstore import EmbeddingBagConfig, KeyedJaggedTensor, TierConfig
from tierstore.cache.memory_tier import bytes_for
from tierstore.optim import RowWiseAdagrad
from tierstore.pipeline.session import Session
from tierstore.planner.costs import read_bytes, record_bytes

_DIMS = (16, 96)
_ROWS = 1_500_000
_IDS, _BAG = 1 << 14, 8
_HELD = 4  # the memory tiers hold a fourth of the rows where rows are to miss
_DEPTH, _WINDOW = 2, 8
STAGES = ("index", "plan", "wait", "compute")
_LOADED = 1 << 16  # rows at a time
_WARM = 10
KINDS = {
    "memory": [(0.0, _IDS), (1.2, _IDS), (0.6, _IDS // 8)],
    "uvm": [(0.0, _IDS), (0.7, _IDS), (1.2, _IDS)],
    "ssd": [(0.4, _IDS)],
}
"""Where the rows are; of each, exponents of the rows' popularity and ids of a batch."""
_ROUNDS = 2


@dataclass
class Clock:
    """Seconds of the prefetching thread per batch, by what it does."""

    index: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waited = 0.0

    def _timed(self, work: Callable[..., None], into: list[float]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start, self._waited = time.thread_time(), 0.0
            work(*args)
            into.append(time.thread_time() - start)
            if into is self.plan:
                self.waits.append(self._waited)

        return timed

    def _waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            wall, busy = time.perf_counter(), time.thread_time()
            result = call(*args)
            self._waited += (time.perf_counter() - wall) - (time.thread_time() - busy)
            return result

        return timed

    @contextmanager
    def watching(self, bags: Any) -> Iterator[Clock]:
        """Times the prefetches that begin meanwhile, and the store of ``bags``."""
        prepare, plan = Session._prepare, Session._plan
        store = bags.engine.store
        Session._prepare = self._timed(prepare, self.index)  # type: ignore[method-assign]
        Session._plan = self._timed(plan, self.plan)  # type: ignore[method-assign]
        if store is not None:
            store.read, store.write = self._waiting(store.read), self._waiting(store.write)
        try:
            yield self
        finally:
            Session._prepare, Session._plan = prepare, plan  # type: ignore[method-assign]


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
    index: float
    plan: float
    wait: float
    compute: float


def runtime_figures(steps: int = 12, folder: str | None = None) -> dict[str, Any]:
    """Fields of a topology: ``hbm_bw``, ``host_link_bw``, ``index_rows_per_s``, ``ssd_read_curve`` and
    ``row_seconds``; and ``step_s``, what a collection computes per step beside its rows. From ``steps``
    batches of each of 14 kinds, twice."""
    return fitted([found for mode in KINDS for dim in _DIMS for found in samples(mode, dim, steps, folder)])


def samples(mode: str, dim: int, steps: int, folder: str | None = None) -> Iterator[Sample]:
    """Those of all :data:`KINDS` of a mode, from one table."""
    bags = _collection(mode, dim, folder)
    try:
        for s, count in KINDS[mode]:
            rounds = [_sample(bags, mode, (s, count, steps), seed) for seed in range(_ROUNDS)]
            means = {name: float(np.mean([getattr(r, name) for r in rounds])) for name in STAGES}
            yield replace(rounds[0], **means)
    finally:
        bags.close(commit=False)


def _sample(bags: Any, mode: str, kind: tuple[float, int, int], seed: int) -> Sample:
    """Trains the table for some batches and takes the median one."""
    (s, count, steps), random = kind, np.random.default_rng(seed)
    weights = (np.arange(_ROWS) + 10.0) ** -s
    edges, names = np.cumsum(weights) / weights.sum(), np.random.default_rng(99).permutation(_ROWS)
    drawn = [names[np.searchsorted(edges, random.random(count))] for _ in range(steps + _WARM)]
    clock, compute, counts = Clock(), [], []
    batches = [_features(ids) for ids in drawn]
    chain = bags.engine.chains[0]
    dim = chain.layout.dim
    output_grad = torch.ones(count // _BAG, dim)
    hbm, ssd = (chain.tiers.get(name) for name in ("hbm", "ssd"))
    with clock.watching(bags):
        for features in tierstore.prefetch(iter(batches), bags, depth=_DEPTH, window=_WINDOW):
            start = time.thread_time()
            bags(features).values().backward(output_grad)
            compute.append(time.thread_time() - start)
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
        *(float(np.median(values[typical])) for values in (clock.index, clock.plan, clock.waits, compute)),
    )


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
    per_id, per_unique = _fit([(s.ids, s.unique) for s in memory], [s.index for s in memory])
    held, plan = _fit([(s.ids, s.unique) for s in memory], [s.plan for s in memory])
    step, lookup, update, per_byte = _fit(
        [(1.0, s.ids, s.unique, 8 * s.ids * s.dim + 2 * s.unique * s.row_bytes) for s in memory],
        [s.compute for s in memory],
    )

    def held_rows(s: Sample) -> float:
        return (per_id + held) * s.ids + (per_unique + plan) * s.unique

    policy, link, link_byte = _fit(
        [(s.unique, s.misses, 2 * s.misses * s.row_bytes) for s in uvm],
        [s.index + s.plan - held_rows(s) for s in uvm],
    )
    waits: dict[int, list[float]] = {}
    busy = []
    for s in ssd:
        moved = s.unique * policy + s.misses * (link + 2 * link_byte * s.row_bytes)
        busy.append((s.index + s.plan - held_rows(s) - moved) / s.stores)
        waits.setdefault(read_bytes(record_bytes(s.row_bytes)), []).append(s.wait / s.stores)
    rates = np.minimum.accumulate([1 / max(np.mean(waits[size]), 1e-9) for size in sorted(waits)])
    store = max(0.0, float(np.mean(busy)))
    return {
        "index_rows_per_s": 1 / max(per_id + held, 1e-12),
        "hbm_bw": 1 / max(per_byte, 1e-13),
        "host_link_bw": 1 / max(link_byte, 1e-13),
        "ssd_read_curve": [[size, float(rate)] for size, rate in zip(sorted(waits), rates, strict=True)],
        "ssd_read_iops": float(rates[0]),
        "step_s": step,
        "row_seconds": {
            "lookup": lookup,
            "update": update,
            "plan": per_unique + plan,
            "policy": policy,
            "link": link,
            "store": store,
        },
    }


def _fit(terms: list[tuple[float, ...]], seconds: list[float]) -> list[float]:
    """Non-negative coefficients, by relative error."""
    a, b = np.array(terms, dtype=np.float64), np.maximum(seconds, 1e-6)
    scale = a.max(axis=0)
    found, _ = nnls(a / scale / b[:, None], np.ones(len(b)))
    return [float(value) for value in found / scale]
