"""Defines a dataset: batches of dense features, ids per table, and labels, in a reproducible order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tierstore.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class Batch:
    """Examples of one training step. A pytree, so prefetchers and ``tree_map`` see its tensors.

    dense: float32 (B, dense_dim). sparse: int64 values, one key per table, named like the table.
    labels: float32 (B,), 0 or 1.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on ``device``."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(torch.device(device), non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """Return a copy of the batch in pinned memory."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Tell the CUDA allocator that ``stream`` uses the tensors of this batch."""
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)

    def __len__(self) -> int:
        return self.labels.shape[0]


def _flatten(batch: Batch) -> tuple[list[Any], None]:
    return [batch.dense, batch.sparse, batch.labels], None


def _flatten_with_keys(batch: Batch) -> tuple[list[Any], None]:
    names = ("dense", "sparse", "labels")
    return [(pytree.GetAttrKey(name), getattr(batch, name)) for name in names], None


pytree.register_pytree_node(
    Batch,
    _flatten,
    lambda leaves, context: Batch(*leaves),
    serialized_type_name="tierstore.data.Batch",
    flatten_with_keys_fn=_flatten_with_keys,
)


@dataclass(frozen=True)
class TableInfo:
    """An embedding table that a dataset needs: valid ids are 0 <= id < num_embeddings."""

    name: str
    num_embeddings: int


class Dataset(Protocol):
    """A source of batches. Every batch is the same whenever, and however often, it is drawn."""

    @property
    def name(self) -> str:
        """The name by which :func:`load` knows the data set."""
        ...

    @property
    def tables(self) -> tuple[TableInfo, ...]:
        """The tables, in the order of the keys of ``Batch.sparse``."""
        ...

    @property
    def dense_dim(self) -> int:
        """Columns of ``Batch.dense``."""
        ...

    @property
    def num_train(self) -> int | None:
        """Examples of a training pass; None: endless, or unknown while the stream was not read to its end."""
        ...

    @property
    def num_test(self) -> int | None:
        """Examples that are held out; None as for ``num_train``."""
        ...

    def train(self, batch_size: int, *, epochs: int = 1, start_batch: int = 0) -> Iterator[Batch]:
        """Yield training batches, in order; the last batch of an epoch may be smaller.

        ``start_batch`` leaves that many batches out, cheaply, to resume; the number counts over epochs.
        """
        ...

    def test(self, batch_size: int) -> Iterator[Batch]:
        """Yield batches of the examples held out."""
        ...


@lru_cache(maxsize=4)
def ones(count: int) -> Tensor:
    """Return ones, int64 (count,), that batches share, since a window keeps many batches. Nobody may change
    them."""
    with torch.inference_mode(False):  # training uses the same tensor
        return torch.ones(count, dtype=torch.int64, device="cpu")


def one_id_per_table(
    tables: tuple[TableInfo, ...], dense: np.ndarray, ids: np.ndarray, labels: np.ndarray
) -> Batch:
    """Make a batch of one id per table and example: dense (B, D), integer ids (tables, B), labels (B,)."""
    size = labels.shape[0]
    sparse = KeyedJaggedTensor(
        [table.name for table in tables],
        torch.from_numpy(ids.astype(np.int64).reshape(-1)),
        lengths=ones(len(tables) * size),
        stride=size,
    )
    return Batch(
        torch.from_numpy(np.ascontiguousarray(dense, dtype=np.float32)),
        sparse,
        torch.from_numpy(labels.astype(np.float32)),
    )


def check_batching(batch_size: int, epochs: int = 1, start_batch: int = 0) -> None:
    """Raise ValueError for counts that make no sense."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    if epochs < 0 or start_batch < 0:
        raise ValueError(f"epochs and start_batch must not be negative, not {epochs} and {start_batch}")


def batch_ranges(
    examples: int, batch_size: int, epochs: int = 1, start_batch: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each batch of ``epochs`` passes over ``examples``, from ``start_batch`` on."""
    check_batching(batch_size, epochs, start_batch)
    per_epoch = -(-examples // batch_size)
    for number in range(start_batch, per_epoch * epochs):
        first = number % per_epoch * batch_size
        yield first, min(first + batch_size, examples)
