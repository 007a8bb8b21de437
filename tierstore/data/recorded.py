"""Datasets held in memory, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tierstore.data.dataset import Batch, TableInfo, batch_ranges, check_batching, one_id_per_table

TRAIN_SHARE = 0.9


@dataclass(frozen=True)
class TimeOrdered:
    """Base of datasets whose examples are known by number: the first ``num_train`` train, the rest tests."""

    name: str
    tables: tuple[TableInfo, ...]
    labels: np.ndarray  # uint8 (n,)

    @property
    def num_train(self) -> int:
        return int(len(self.labels) * TRAIN_SHARE)

    @property
    def num_test(self) -> int:
        return len(self.labels) - self.num_train

    def train(self, batch_size: int, *, epochs: int = 1, start_batch: int = 0) -> Iterator[Batch]:
        check_batching(batch_size, epochs, start_batch)
        ranges = batch_ranges(self.num_train, batch_size, epochs, start_batch)
        return (self.examples(first, end) for first, end in ranges)

    def test(self, batch_size: int) -> Iterator[Batch]:
        check_batching(batch_size)
        skip = self.num_train
        ranges = batch_ranges(self.num_test, batch_size)
        return (self.examples(skip + first, skip + end) for first, end in ranges)

    def examples(self, first: int, end: int) -> Batch:
        """Return the batch of examples first .. end - 1."""
        raise NotImplementedError


@dataclass(frozen=True)
class ColumnDataset(TimeOrdered):
    """One id per table and example. ids: int32 (tables, n); dense: any float type, (n, D)."""

    ids: np.ndarray
    dense: np.ndarray

    @property
    def dense_dim(self) -> int:
        return self.dense.shape[1]

    def examples(self, first: int, end: int) -> Batch:
        return one_id_per_table(
            self.tables, self.dense[first:end], self.ids[:, first:end], self.labels[first:end]
        )
