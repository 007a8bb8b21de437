"""Generated examples: ids by Zipf-Mandelbrot popularity from tables of any size, labels that can be learned.

A batch is a pure function of (seed, batch number, batch size). The labels of examples come from a hidden
logistic model: every id of every table, and every dense feature, has a fixed effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tierstore.data import popularity
from tierstore.data.dataset import Batch, TableInfo, batch_ranges, check_batching, ones
from tierstore.data.popularity import stream_seed
from tierstore.errors import ConfigError
from tierstore.sparse import KeyedJaggedTensor

MAX_ROWS = 1 << 48
MAX_POOLING_FACTOR = 100.0
TEST_EXAMPLES = 1 << 16

_TRAIN, _TEST, _TABLES, _HIDDEN = range(4)  # separate the streams of random numbers
_LENGTHS, _DENSE, _LABELS = -1, -2, -3
_EFFECT_STD, _DENSE_STD, _BIAS = 1.5, 0.5, -1.0  # of the logit


@dataclass(frozen=True)
class SyntheticTable:
    """A table and how its ids are drawn.

    ``rows``: rows of the table; ``in_play``: how many of them are drawn at one time (None: all). The k-th
    most popular id is drawn with a probability in proportion to (k + q)^-s. ``pooling_factor``: mean ids per
    bag; a bag has from 1 id up to 1 less than twice that.
    """

    name: str
    rows: int
    s: float
    q: float = 0.0
    pooling_factor: float = 1.0
    in_play: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise ConfigError(f"{self.name}: rows must be in 1 .. 2^48, not {self.rows}")
        if not 1 <= self.ranks <= self.rows:
            raise ConfigError(f"{self.name}: {self.ranks} ids in play do not fit a table of {self.rows} rows")
        if not (0 <= self.s <= 10 and 0 <= self.q < math.inf):
            raise ConfigError(
                f"{self.name}: popularity needs 0 <= s <= 10 and q >= 0, not {self.s} and {self.q}"
            )
        if not 1 <= self.pooling_factor <= MAX_POOLING_FACTOR:
            raise ConfigError(
                f"{self.name}: pooling_factor must be in 1 .. {MAX_POOLING_FACTOR:g}, "
                f"not {self.pooling_factor}"
            )

    @property
    def ranks(self) -> int:
        return self.rows if self.in_play is None else self.in_play

    @property
    def lanes(self) -> int:
        """Return the ``in_play`` of popularity.drifted: replacements are a multiple of it away in rank."""
        return self.ranks if self.rows >= 2 * self.ranks else max(1, self.rows // 16)


@dataclass(frozen=True)
class SyntheticDataset:
    """drift: share of the ids in play that are replaced per batch. num_train None: endless."""

    name: str
    specs: tuple[SyntheticTable, ...]
    seed: int = 0
    drift: float = 0.0
    num_train: int | None = None
    dense_dim: int = 13

    def __post_init__(self) -> None:
        if not self.specs:
            raise ConfigError(f"{self.name}: at least one table is needed; give tables=1 or more")
        if not 0 <= self.drift <= 1:
            raise ConfigError(f"{self.name}: drift is a share of the ids per batch, 0 .. 1, not {self.drift}")
        if self.num_train is not None and self.num_train < 1:
            raise ConfigError(f"{self.name}: examples must be at least 1, not {self.num_train}")

    @property
    def tables(self) -> tuple[TableInfo, ...]:
        return tuple(TableInfo(spec.name, spec.rows) for spec in self.specs)

    @property
    def num_test(self) -> int:
        return TEST_EXAMPLES if self.num_train is None else min(TEST_EXAMPLES, -(-self.num_train // 10))

    def train(self, batch_size: int, *, epochs: int = 1, start_batch: int = 0) -> Iterator[Batch]:
        """Yield batches as ``Dataset`` does, endlessly if ``num_train`` is None. All epochs are equal."""
        check_batching(batch_size, epochs, start_batch)
        if self.num_train is None:
            return self._endless(batch_size, start_batch)
        ranges = batch_ranges(self.num_train, batch_size, epochs, start_batch)
        return (
            self._batch(_TRAIN, first // batch_size, end - first, first // batch_size)
            for first, end in ranges
        )

    def test(self, batch_size: int) -> Iterator[Batch]:
        """Yield other examples, with the popularity at the end of training (at its start if endless)."""
        time = 0 if self.num_train is None else -(-self.num_train // batch_size)
        ranges = batch_ranges(self.num_test, batch_size)
        return (self._batch(_TEST, first // batch_size, end - first, time) for first, end in ranges)

    def _endless(self, batch_size: int, number: int) -> Iterator[Batch]:
        while True:
            yield self._batch(_TRAIN, number, batch_size, number)
            number += 1

    def _batch(self, split: int, number: int, size: int, time: int) -> Batch:
        lengths = np.empty((len(self.specs), size), dtype=np.int64)
        for t, spec in enumerate(self.specs):
            popularity.draw_lengths(
                lengths[t], float(spec.pooling_factor), stream_seed(self.seed, split, number, t, _LENGTHS)
            )
        counts = lengths.sum(axis=1)
        ends = np.cumsum(counts)
        values = np.empty(int(ends[-1]), dtype=np.int64)
        dense = np.empty((size, self.dense_dim), dtype=np.float32)
        popularity.draw_normals(dense.reshape(-1), stream_seed(self.seed, split, number, _DENSE))
        logits = _BIAS + dense @ self._dense_effects()
        for t, spec in enumerate(self.specs):
            ids = values[ends[t] - counts[t] : ends[t]]
            table_seed = stream_seed(self.seed, _TABLES, t)
            popularity.draw_ids(
                ids,
                spec.ranks,
                float(spec.s),
                float(spec.q),
                spec.rows,
                spec.lanes,
                float(self.drift * time),
                table_seed,
                stream_seed(self.seed, split, number, t),
            )
            scale = _EFFECT_STD * math.sqrt(
                3.0 / (len(self.specs) * spec.pooling_factor)
            )  # of a uniform effect: 1/3
            popularity.add_effects(logits, ids, lengths[t], scale, table_seed)
        labels = np.empty(size, dtype=np.float32)
        popularity.draw_labels(labels, logits, stream_seed(self.seed, split, number, _LABELS))
        return Batch(torch.from_numpy(dense), self._sparse(values, lengths, counts), torch.from_numpy(labels))

    def _dense_effects(self) -> np.ndarray:
        effects = np.empty(self.dense_dim, dtype=np.float32)
        popularity.draw_normals(effects, stream_seed(self.seed, _HIDDEN))
        return effects.astype(np.float64) * (_DENSE_STD / math.sqrt(max(1, self.dense_dim)))

    def _sparse(self, values: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> KeyedJaggedTensor:
        # Without offsets, which follow from the lengths: a window keeps many batches.
        every = torch.from_numpy(lengths.reshape(-1)) if (lengths != 1).any() else ones(lengths.size)
        return KeyedJaggedTensor(
            [spec.name for spec in self.specs],
            torch.from_numpy(values),
            lengths=every,
            stride=lengths.shape[1],
            length_per_key=counts.tolist(),
        )
