"""Repetition, popularity and drift of a trace: the figures that synthetic traces must match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cache_policies import PreparedTrace, prepare
from tierstore.errors import InputError
from tierstore.keys import ID_BITS
from tierstore.trace.trace import Trace

#: Upper edges of the bins "used so often within the batch" (as in Meta's dlrm_datasets); the last is open.
REUSE_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_TOP_SHARES = (0.001, 0.01, 0.1)


@dataclass(frozen=True)
class ZipfFit:
    """Uses of the k-th most used row ~ (k + q)^-s, fitted to the rows used at min_uses ``min_uses`` times."""

    s: float
    q: float
    rows: int
    min_uses: int


@dataclass(frozen=True)
class Description:
    """All ratios are between 0 and 1. ``rows_by_reuse`` and ``accesses_by_reuse`` have a bin per
    ``REUSE_EDGES`` and one more, and are means over the batches, as is ``unique_ratio`` (distinct rows /
    accesses).
    """

    name: str
    tables: int
    batches: int
    accesses: int
    footprint: int
    unique_ratio: float
    rows_by_reuse: list[float]
    accesses_by_reuse: list[float]
    used_once: float  # share of the rows that the whole trace uses once
    coverage: dict[str, float]  # share of accesses to the top 0.1 %, 1 %, 10 % of the rows used
    drift: float | None  # share of the early favourites' accesses that the favourites lose until the end
    zipf: ZipfFit | None
    per_table: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain JSON values."""
        return asdict(self)


def describe(trace: Trace, progress: Callable[[int], None] | None = None) -> Description:
    """Read the trace once and describe it; ``progress(batches read)`` is called now and then.

    Raises InputError if the trace has no accesses.
    """
    histograms = _Reuse()
    halves = _Drift(trace.num_batches)

    def watched() -> Iterator[np.ndarray]:
        for i, keys in enumerate(trace.key_batches()):
            histograms.add(keys)
            halves.add(i, keys)
            if progress:
                progress(i + 1)
            yield keys

    prepared = prepare(watched())
    if not prepared.accesses:
        raise InputError(f"{trace.name}: the trace has no accesses")
    rows, accesses = histograms.means()
    row_accesses = prepared.row_accesses()
    counts = np.sort(row_accesses)[::-1]
    return Description(
        name=trace.name,
        tables=len(trace.tables),
        batches=prepared.batches,
        accesses=prepared.accesses,
        footprint=prepared.footprint,
        unique_ratio=histograms.unique_ratio(),
        rows_by_reuse=rows,
        accesses_by_reuse=accesses,
        used_once=float((counts == 1).mean()),
        coverage={f"{share:.1%}": _coverage(counts, share) for share in _TOP_SHARES},
        drift=halves.result(),
        zipf=fit_zipf(counts),
        per_table=_per_table(trace, prepared, row_accesses),
    )


def fit_zipf(counts: np.ndarray, min_uses: int = 10) -> ZipfFit | None:
    """Fit a Zipf-Mandelbrot law to ``counts``, the uses of each row, most used first.

    The fit is a weighted least-squares fit of logarithms, in bins of ranks that grow by a tenth. Rows with
    less than ``min_uses`` uses are left out, since chance decides their counts. Return None if fewer than 20
    rows remain.
    """
    counts = counts[counts >= min_uses].astype(np.float64)
    if counts.size < 20:
        return None
    edges = np.unique(np.concatenate([[0], np.geomspace(1, counts.size, 100).round()]).astype(np.int64))
    sizes = np.diff(edges)
    means = np.add.reduceat(counts, edges[:-1]) / sizes
    ranks = np.sqrt((edges[:-1] + 1.0) * edges[1:])
    weights = np.sqrt(np.minimum(means * sizes, 1e4))  # counting errors shrink with the number of uses
    best: tuple[float, float, float] | None = None
    for q in np.concatenate([[0.0], np.geomspace(0.1, max(1.0, counts.size), 200)]):
        x = np.stack([np.ones_like(ranks), np.log(ranks + q)], axis=1) * weights[:, None]
        solution, *_ = np.linalg.lstsq(x, np.log(means) * weights, rcond=None)
        error = float(np.square(x @ solution - np.log(means) * weights).sum())
        if best is None or error < best[0]:
            best = (error, float(-solution[1]), float(q))
    assert best is not None
    return ZipfFit(round(best[1], 4), round(best[2], 3), counts.size, min_uses)


def _coverage(counts: np.ndarray, share: float) -> float:
    top = max(1, round(share * counts.size))
    return float(counts[:top].sum() / counts.sum())


def _per_table(trace: Trace, prepared: PreparedTrace, row_accesses: np.ndarray) -> dict[str, dict[str, Any]]:
    table_of = (prepared.keys >> np.uint64(ID_BITS)).astype(np.int64)
    rows = np.bincount(table_of, minlength=len(trace.tables))
    accesses = np.bincount(table_of, row_accesses, len(trace.tables)).astype(np.int64)
    uniques = np.bincount(table_of[prepared.rows], minlength=len(trace.tables))
    by_table = np.split(row_accesses[np.argsort(table_of, kind="stable")], np.cumsum(rows)[:-1])
    known = trace.num_embeddings or (0,) * len(trace.tables)
    return {
        name: {
            "num_embeddings": known[t] or None,
            "footprint": int(rows[t]),
            "accesses": int(accesses[t]),
            "unique_ratio": float(uniques[t] / accesses[t]) if accesses[t] else 0.0,
            "zipf": _as_dict(fit_zipf(np.sort(by_table[t])[::-1])),
        }
        for t, name in enumerate(trace.tables)
    }


def _as_dict(fit: ZipfFit | None) -> dict[str, Any] | None:
    return asdict(fit) if fit else None


class _Reuse:
    """Histograms of how often rows are used within a batch."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []
        self.accesses: list[np.ndarray] = []
        self.ratios: list[float] = []

    def add(self, keys: np.ndarray) -> None:
        if not keys.size:
            return
        uses = np.unique(keys, return_counts=True)[1]
        bins = np.searchsorted(REUSE_EDGES, uses)
        count = len(REUSE_EDGES) + 1
        self.rows.append(np.bincount(bins, minlength=count) / uses.size)
        self.accesses.append(np.bincount(bins, uses, count) / keys.size)
        self.ratios.append(uses.size / keys.size)

    def means(self) -> tuple[list[float], list[float]]:
        return np.mean(self.rows, axis=0).tolist(), np.mean(self.accesses, axis=0).tolist()

    def unique_ratio(self) -> float:
        return float(np.mean(self.ratios))


class _Drift:
    """Drift of the favourites, measured in batches that did not choose the favourites.

    Every second batch of the first tenth chooses; the batches between and the last tenth measure.
    """

    def __init__(self, batches: int | None) -> None:
        self.tenth = (batches or 0) // 10
        self.total = batches or 0
        self.parts: dict[str, list[np.ndarray]] = {"choose": [], "early": [], "late": []}

    def add(self, i: int, keys: np.ndarray) -> None:
        if i < self.tenth:
            self.parts["choose" if i % 2 == 0 else "early"].append(keys)
        elif self.tenth and i >= self.total - self.tenth:
            self.parts["late"].append(keys)

    def result(self) -> float | None:
        if self.tenth < 2 or not all(part and sum(map(len, part)) for part in self.parts.values()):
            return None
        keys, uses = np.unique(np.concatenate(self.parts["choose"]), return_counts=True)
        top = max(1, keys.size // 100)
        favourites = keys[np.argsort(uses)[::-1][:top]]
        early, late = (np.isin(np.concatenate(self.parts[p]), favourites).mean() for p in ("early", "late"))
        return float(max(0.0, 1 - late / early)) if early else None
