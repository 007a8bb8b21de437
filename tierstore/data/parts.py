"""A rank's part of a batch, where the ranks of a job share the examples of each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tierstore.data.dataset import Batch
from tierstore.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class PartOfBatch(Batch):
    """Neighbouring examples of a batch; a rank may have none. A pytree as ``Batch`` is.

    ``whole``: examples of the batch. ``weight``: what the mean loss of the part counts in the mean over the
    ranks, 1 where all ranks have equally many examples.
    """

    whole: int
    weight: float


def part_of(batch: Batch, rank: int, ranks: int) -> PartOfBatch:
    """Return the part of ``batch`` that ``rank`` of ``ranks`` trains on; sizes differ by one at most."""
    size = len(batch)
    begin, end = (size * number // ranks for number in (rank, rank + 1))
    weight = (end - begin) * ranks / size if size else 0.0
    dense, labels = batch.dense[begin:end], batch.labels[begin:end]
    return PartOfBatch(dense, _examples(batch.sparse, begin, end), labels, size, weight)


def _examples(sparse: KeyedJaggedTensor, begin: int, end: int) -> KeyedJaggedTensor:
    """Return the examples ``begin`` to ``end`` of every key; ``sparse`` has equally many of all keys."""
    keys, stride = sparse.keys(), sparse.stride()
    lengths = sparse.lengths().view(len(keys), stride)[:, begin:end].reshape(-1)
    at = sparse.offsets()
    bounds = [(int(at[k * stride + begin]), int(at[k * stride + end])) for k in range(len(keys))]
    weights = sparse.weights_or_none()

    def cut(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[first:last] for first, last in bounds])

    return KeyedJaggedTensor(
        keys,
        cut(sparse.values()),
        None if weights is None else cut(weights),
        lengths=lengths,
        stride=end - begin,
    )


def _flatten(part: PartOfBatch) -> tuple[list[Any], tuple[int, float]]:
    return [part.dense, part.sparse, part.labels], (part.whole, part.weight)


def _flatten_with_keys(part: PartOfBatch) -> tuple[list[Any], tuple[int, float]]:
    names = ("dense", "sparse", "labels")
    return [(pytree.GetAttrKey(name), getattr(part, name)) for name in names], (part.whole, part.weight)


pytree.register_pytree_node(
    PartOfBatch,
    _flatten,
    lambda leaves, context: PartOfBatch(*leaves, *context),
    serialized_type_name="tierstore.data.PartOfBatch",
    flatten_with_keys_fn=_flatten_with_keys,
)
