"""A dataset held in memory: columns of ids, dense features and labels, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tierstore.data.dataset import Batch, TableInfo, check_batching, in_order, one_id_per_table


@dataclass(frozen=True)
class RecordedDataset:
    """Examples in the order of time: the first ``num_train`` train, the rest tests.

    ids: int32 (tables, n); dense: float32 (n, D); labels: uint8 (n,).
    """

    name: str
    tables: tuple[TableInfo, ...]
    ids: np.ndarray
    dense: np.ndarray
    labels: np.ndarray
    num_train: int

    @property
    def dense_dim(self) -> int:
        return self.dense.shape[1]

    @property
    def num_test(self) -> int:
        return len(self.labels) - self.num_train

    def train(self, batch_size: int, *, epochs: int = 1, start_batch: int = 0) -> Iterator[Batch]:
        check_batching(batch_size, epochs, start_batch)
        return in_order(self.num_train, self._batch, batch_size, epochs, start_batch)

    def test(self, batch_size: int) -> Iterator[Batch]:
        check_batching(batch_size)
        skip = self.num_train
        return in_order(self.num_test, lambda first, end: self._batch(skip + first, skip + end), batch_size)

    def _batch(self, first: int, end: int) -> Batch:
        return one_id_per_table(
            self.tables, self.dense[first:end], self.ids[:, first:end], self.labels[first:end]
        )
